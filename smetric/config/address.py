"""Kinds for what points elsewhere: the URL of an instance, a network, a policy."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from smetric.config.kind import Kind, interpolated, scalar_of
from smetric.config.raw import Raw, Scalar, wrong

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252}[A-Za-z0-9])?\Z")


class BaseUrl(Kind[str]):
    """An `http` or `https` URL of a host alone: no user info, path, query or fragment. Its value has no final slash.

    Args:
        empty: nothing at all may stand there too.
    """

    _RULE = "an http or https URL without a path, such as http://10.0.0.7:8000"

    def __init__(self, *, empty: bool = False) -> None:
        self._empty = empty

    def parse(self, raw: Raw, name: str) -> str:
        """The URL, scheme and host in lower case."""
        if self._empty and isinstance(raw, Scalar) and not raw.text:
            return ""
        text = scalar_of(raw, name, self._RULE).text
        if "@" in text:  # what stands before it may be a password
            raise wrong(raw, name, f"{self._RULE}, and no user or password in it", got="one with an @")
        try:
            parts = urlsplit(text)
            host, port = parts.hostname or "", parts.port
            if ":" in host:
                host = f"[{ipaddress.IPv6Address(host)}]"
            elif not _HOST.match(host):
                raise ValueError(host)
        except ValueError as error:
            raise wrong(raw, name, self._RULE) from error
        # urlsplit drops tabs and line breaks silently, so the text itself is looked at as well
        if parts.scheme not in ("http", "https") or parts.path not in ("", "/") or re.search(r"[?#\s]", text):
            raise wrong(raw, name, self._RULE)
        return f"{parts.scheme}://{host}" if port is None else f"{parts.scheme}://{host}:{port}"

    def schema(self) -> dict[str, Any]:
        """A string."""
        url = r"https?://[^/@?#\s]+/?"
        return interpolated({"type": "string", "pattern": f"^(?:{url})?$" if self._empty else f"^{url}$"})


class NetworkRange(Kind[Network]):
    """A range of IP addresses, or one address."""

    def parse(self, raw: Raw, name: str) -> Network:
        """The network."""
        rule = "a network such as 10.0.0.0/8, or an address"
        text = scalar_of(raw, name, rule).text
        try:
            return ipaddress.ip_network(text)
        except ValueError as error:
            raise wrong(raw, name, f"{rule} (host bits zero)") from error

    def schema(self) -> dict[str, Any]:
        """A string."""
        return {"type": "string"}

    def show(self, value: Network) -> str:
        """As it would be written."""
        return str(value)


class PolicyRef(Kind[str]):
    """A shipped policy by its name, or a policy file by its path: whatever has a slash or ends in `.policy`."""

    def parse(self, raw: Raw, name: str) -> str:
        """The name, or the path; one that stands in a file starts from that file's folder."""
        rule = "the name of a shipped policy, or the path of a .policy file"
        scalar = scalar_of(raw, name, rule)
        if "\0" in scalar.text or len(scalar.text) > 4096:
            raise wrong(raw, name, rule)
        if scalar.folder is not None and is_policy_path(scalar.text):
            return str(scalar.folder / Path(scalar.text))
        return scalar.text

    def schema(self) -> dict[str, Any]:
        """A string."""
        return {"type": "string"}


class FolderRef(Kind[str]):
    """A folder by its path.

    Args:
        empty: nothing at all may stand there too.
    """

    def __init__(self, *, empty: bool = False) -> None:
        self._empty = empty

    def parse(self, raw: Raw, name: str) -> str:
        """The path; one that stands in a file starts from that file's folder."""
        if self._empty and isinstance(raw, Scalar) and not raw.text:
            return ""
        scalar = scalar_of(raw, name, "the path of a folder")
        if "\0" in scalar.text or len(scalar.text) > 4096:
            raise wrong(raw, name, "the path of a folder")
        return str(scalar.folder / Path(scalar.text)) if scalar.folder is not None else scalar.text

    def schema(self) -> dict[str, Any]:
        """A string."""
        return {"type": "string"}


def is_policy_path(reference: str) -> bool:
    """Whether *reference* is a path, not the name of a shipped policy."""
    return "/" in reference or reference.endswith(".policy")
