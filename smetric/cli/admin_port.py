"""Asking a running router's admin port, for the commands that do."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit

import click

from smetric.config.credential import credential
from smetric.config.kind import Secret
from smetric.config.raw import Scalar

#: Exit code of a router that does not answer.
UNREACHABLE = 3

_MOST_BYTES = 4 << 20
_TIMEOUT_S = 5.0

admin_option = click.option(
    "--admin", metavar="URL", default="http://127.0.0.1:9464", show_default=True, help="That router's admin URL."
)


class Unreachable(click.ClickException):
    """The router does not answer, or something else does."""

    exit_code = UNREACHABLE


def ask(
    admin: str, method: str, path: str, document: Any = None, *, timeout_s: float = _TIMEOUT_S
) -> tuple[int, dict[str, Any]]:
    """Status and JSON of the answer of the router at *admin*; no proxy and no redirect is followed.

    Unless the status is 200, `error` says why.

    Args:
        admin: its URL.
        method: GET or POST.
        path: what is asked for.
        document: sent along as JSON; None for nothing.
        timeout_s: seconds it may take.

    Raises:
        click.BadParameter: *admin* is no URL.
        ConfigError: what the environment holds is no token.
        Unreachable: it does not answer, or not as SMetric does.
    """
    parts = _parts(admin)
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        with contextlib.closing(connect(parts.netloc, timeout=timeout_s)) as connection:
            headers = _authorization()
            if document is not None:
                headers["Content-Type"] = "application/json"
            body = json.dumps(document).encode() if document is not None else None
            connection.request(method, parts.path.rstrip("/") + path, body, headers)
            response = connection.getresponse()
            status, answer = response.status, response.read(_MOST_BYTES)
    except (OSError, http.client.HTTPException, UnicodeError) as error:  # the last for a host like a..b
        raise Unreachable(f"{admin} does not answer ({error}); is the router running, is --admin right?") from error
    if status == 401:
        sent = "wants its token: set" if "Authorization" not in headers else "wants another token than is in"
        raise Unreachable(f"{admin} {sent} SMETRIC_ADMIN__TOKEN or SMETRIC_ADMIN__TOKEN_FILE")
    try:
        said = json.loads(answer)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict) or (status != 200 and not isinstance(said.get("error"), str)):
        raise strange(admin, status)
    return status, said


def _parts(admin: str) -> SplitResult:
    rule = "expected a URL such as http://127.0.0.1:9464"
    if "@" in admin:  # what stands before it may be a password
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
    """The admin token, from where the router itself would take it."""
    variable = "SMETRIC_ADMIN__TOKEN"
    text = Secret().parse(Scalar(text=os.environ.get(variable, ""), place=variable), "admin.token")
    token = credential(f"{variable}_FILE", text, os.environ.get(f"{variable}_FILE", ""))
    return {"Authorization": f"Bearer {token.text}"} if token is not None else {}


def segment(text: str) -> str:
    """*text*, whatever was typed, as one segment of a path."""
    return quote(os.fsencode(text), safe="")


def change_instance(admin: str, instance: str, verb: str) -> dict[str, Any]:
    """How *instance* stands after the router at *admin* was told to *verb* it.

    Raises:
        click.ClickException: the router knows no such instance, or refuses.
        Unreachable: it does not answer, or not as SMetric does.
    """
    status, answer = ask(admin, "POST", f"/admin/instances/{segment(instance)}/{verb}")
    if status != 200:
        raise click.ClickException(f"{instance}: {answer['error']}")
    if not answer.keys() >= {"state", "requests", "others", "kept", "not_kept_because"}:
        raise strange(admin, status)
    return answer


def strange(admin: str, status: int) -> Unreachable:
    """What to raise where the answer is not that of SMetric."""
    return Unreachable(f"{admin} answers {status}, but not as SMetric does; is --admin right?")
