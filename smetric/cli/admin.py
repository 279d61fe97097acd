"""Client of a running router's admin port, and the option that names it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit

import click

from smetric.config import load
from smetric.config.credential import credential
from smetric.config.settings import Admin
from smetric.config.values import local_url
from smetric.errors import ConfigError

#: Exit code for a router that does not answer.
UNREACHABLE = 3

_MOST_BYTES = 4 << 20
_TIMEOUT_S = 5.0
#: Timeout of a completion in a shell, seconds.
_COMPLETION_TIMEOUT_S = 1.0

#: Variables that a router and its operators share.
_VARIABLES = tuple(f"SMETRIC_ADMIN__{name}" for name in ("HOST", "PORT", "TOKEN", "TOKEN_FILE"))


def _settings() -> Admin:
    """Return the settings of the admin port in the environment.

    Raises:
        ConfigError: one of them is not valid.
    """
    environ = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    return load.from_table(load.stack(None, environ, ())).admin


def _default_url() -> str:
    settings = _settings()
    return local_url(settings.host, settings.port)


admin_option = click.option(
    "--admin",
    metavar="URL",
    default=_default_url,
    show_default="http://127.0.0.1:9464, or by SMETRIC_ADMIN__HOST and SMETRIC_ADMIN__PORT",
    help="That router's admin URL. Its token is read from SMETRIC_ADMIN__TOKEN or SMETRIC_ADMIN__TOKEN_FILE.",
)


class RouterUnreachable(click.ClickException):
    """No router answers, or another server does."""

    exit_code = UNREACHABLE


def strange(admin: str, status: int) -> RouterUnreachable:
    """Return the error for a reply of another server than SMetric."""
    return RouterUnreachable(f"{admin} answers {status}, but not as SMetric does; is --admin right?")


def ask(
    admin: str, method: str, path: str, document: Any = None, *, timeout_s: float = _TIMEOUT_S
) -> tuple[int, dict[str, Any]]:
    """Return status and JSON of the reply of the router at *admin*; other statuses than 200 have an `error`.

    No proxy is used, and no redirect is followed.

    Args:
        admin: its URL.
        method: GET or POST.
        path: path of the request.
        document: JSON to send; None for nothing.
        timeout_s: timeout in seconds.

    Raises:
        click.BadParameter: *admin* is not a URL.
        ConfigError: the environment holds an invalid token.
        RouterUnreachable: it does not answer, or not as SMetric does.
    """
    with _reply(admin, method, path, document, timeout_s) as response:
        status, answer = response.status, response.read(_MOST_BYTES)
    try:
        said = json.loads(answer)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict) or (status != 200 and not isinstance(said.get("error"), str)):
        raise strange(admin, status)
    return status, said


def follow(admin: str, path: str) -> Iterator[tuple[str, Any]]:
    """Yield name and data of the server-sent events of the router at *admin*, until it ends the stream.

    Raises:
        as of `ask`.
    """
    event = ""
    with _reply(admin, "GET", path, None, _TIMEOUT_S) as response:
        if response.status != 200:
            raise strange(admin, response.status)
        for line in response:
            field, _, value = line.decode().rstrip("\r\n").partition(": ")
            if field == "event":
                event = value
            elif field == "data":
                yield event, json.loads(value)


@contextlib.contextmanager
def _reply(admin: str, method: str, path: str, document: Any, timeout_s: float) -> Iterator[http.client.HTTPResponse]:
    parts = _parts(admin)
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    headers = _authorization()
    if document is not None:
        headers["Content-Type"] = "application/json"
    body = json.dumps(document).encode() if document is not None else None
    try:
        with contextlib.closing(connect(parts.netloc, timeout=timeout_s)) as connection:
            connection.request(method, parts.path.rstrip("/") + path, body, headers)
            response = connection.getresponse()
            if response.status == 401:
                sent = "wants its token: set" if "Authorization" not in headers else "wants another token than is in"
                raise RouterUnreachable(f"{admin} {sent} SMETRIC_ADMIN__TOKEN or SMETRIC_ADMIN__TOKEN_FILE")
            yield response
    except (OSError, http.client.HTTPException, UnicodeError) as error:  # the last for a host like a..b
        raise RouterUnreachable(
            f"{admin} does not answer ({error}); is the router running, is --admin right?"
        ) from error


def _parts(admin: str) -> SplitResult:
    rule = "expected a URL such as http://127.0.0.1:9464"
    if "@" in admin:  # a password may stand before it
        raise click.BadParameter(f"{rule}, and no user or password in it", param_hint="--admin")
    try:
        parts = urlsplit(admin)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url or not re.fullmatch(r"[\x21-\x7e]+", admin) or parts.query or parts.fragment:
        raise click.BadParameter(f'{rule}, got "{admin}"', param_hint="--admin")
    return parts


def _authorization() -> dict[str, str]:
    """Return a header with the admin token from the variables that the router itself reads."""
    admin = _settings()
    token = credential("SMETRIC_ADMIN__TOKEN_FILE", admin.token, admin.token_file)
    return {"Authorization": f"Bearer {token.text}"} if token is not None else {}


def segment(text: str) -> str:
    """Return *text* from the command line as a segment of a path, also if it is not Unicode."""
    return quote(os.fsencode(text), safe="")


def instance_names(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of an instance of the running router; nothing without an answer."""
    return _names(ctx, "/admin/instances", "instances", "id", incomplete)


def route_names(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a route, canary or shadow of the running router; nothing without an answer."""
    return _names(ctx, "/admin/policies", "policies", "name", incomplete)


def _names(ctx: click.Context, path: str, rows: str, key: str, incomplete: str) -> list[str]:
    with contextlib.suppress(click.ClickException, ConfigError, KeyError, TypeError):
        _, document = ask(ctx.params.get("admin") or _default_url(), "GET", path, timeout_s=_COMPLETION_TIMEOUT_S)
        return [row[key] for row in document[rows] if row[key].startswith(incomplete)]
    return []
