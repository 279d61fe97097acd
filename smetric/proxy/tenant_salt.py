"""Cache salts that keep the KV caches of tenants apart."""

from __future__ import annotations

import base64
import hmac
from collections.abc import Iterable

import msgspec

from smetric.config.credential import Credential
from smetric.errors import RequestError
from smetric.http.headers import first
from smetric.request.body import members, patch_member, screen
from smetric.request.request import Api

_STRING = msgspec.json.Decoder(str | None)
#: Longest name of a tenant, bytes.
MAX_NAME = 256


class TenantSalt:
    """Salts requests by the tenant that the gateway names.

    Args:
        header: header of the gateway with the name of the tenant, in lower case.
        secret: key of the salts, so that clients cannot compute them.
    """

    def __init__(self, header: str, secret: Credential) -> None:
        self._header = header.encode()
        self._shown = header
        self._secret = secret

    def salted(self, api: Api, headers: Iterable[tuple[bytes, bytes]], body: bytes, *, trusted: bool) -> bytes:
        """Return *body* with a new `cache_salt`: the HMAC-SHA256 of the tenant and of the client's own salt, if any.

        Raises:
            RequestError: no trusted proxy names the tenant, or the client's salt is no string.
        """
        named = [value for name, value in headers if name == self._header] if trusted else []
        if len(named) != 1 or not 0 < len(named[0]) <= MAX_NAME:
            raise RequestError(
                f"a trusted proxy must name the tenant, once, in `{self._shown}`", status=403, kind="permission_error"
            )
        if api is Api.OTHER and (first(headers, b"content-type") or b"").lower().startswith(b"multipart/"):
            return body  # a file to transcribe has no prefix to share
        found = members(screen(body).body)
        try:
            sent = _STRING.decode(found.get("cache_salt", b"null"))
        except msgspec.DecodeError:
            raise RequestError("`cache_salt` must be a string", param="cache_salt") from None
        tenant = named[0]
        signed = b"%d:%b%b" % (len(tenant), tenant, b"" if sent is None else b"+" + sent.encode())
        digest = hmac.digest(self._secret.text.encode(), signed, "sha256")
        return patch_member(body, "cache_salt", base64.urlsafe_b64encode(digest)[:43].decode())
