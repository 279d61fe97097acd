"""`smetric explain`: why a policy decides as it does on a written-down snapshot, or why a running router decided."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import sys
from pathlib import Path
from urllib.parse import urlsplit

import click

from smetric.cli.policy_argument import read_one
from smetric.cli.settings_options import param_values, set_option
from smetric.cli.snapshot_file import read_situation
from smetric.errors import ConfigError

UNREACHABLE = 3

_ID = re.compile(r"[0-9A-Za-z]{1,64}\Z")
_MOST_BYTES = 4 << 20
_TIMEOUT_S = 5.0


@click.command()
@click.argument("policy", metavar="[NAME|FILE]", required=False)
@click.option(
    "--snapshot", metavar="FILE|-", help="JSON with `instances`, and if need be `request`, `cursors`, `seed`."
)
@set_option()
@click.option("--decision", metavar="ID", help="A decision of a running router: its x-smetric-decision-id.")
@click.option(
    "--admin", metavar="URL", default="http://127.0.0.1:9464", show_default=True, help="That router's admin URL."
)
def explain(
    policy: str | None, snapshot: str | None, params: tuple[str, ...], decision: str | None, admin: str
) -> None:
    """Say why a policy decides as it does.

    \b
    smetric explain smetric --snapshot three-instances.json --set OVERLOAD=1.5
    smetric explain --decision 01JDQ2M7Q0Z5T8F4C6R9K3W1XE
    """
    if decision is not None and policy is None and snapshot is None and not params:
        click.echo(_recorded(decision, admin))
    elif policy is not None and snapshot is not None and decision is None:
        click.echo(_decided(policy, snapshot, params))
    else:
        raise click.UsageError("give either a policy and --snapshot FILE, or --decision ID alone")


def _decided(name: str, snapshot: str, params: tuple[str, ...]) -> str:
    from smetric.features import VOCABULARY
    from smetric.policy import PolicyError, load
    from smetric.policy.explain import explain as explanation

    source = read_one(name)
    try:
        text = sys.stdin.read() if snapshot == "-" else Path(snapshot).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"{snapshot}: cannot be read: {reason}; give a JSON file, or - for standard input") from error
    situation = read_situation(text, "<stdin>" if snapshot == "-" else snapshot, VOCABULARY)
    try:
        policy = load(source.text, VOCABULARY, path=source.path, settings=param_values(params))
    except PolicyError as error:
        raise click.ClickException(f"{source.path} does not check\n\n{error}") from error
    return explanation(situation.decide(policy, VOCABULARY))


def _recorded(decision: str, admin: str) -> str:
    """The explanation that the router at *admin* keeps of a decision."""
    if not _ID.match(decision):
        raise click.BadParameter("expected the value of an x-smetric-decision-id header", param_hint="--decision")
    if not admin.startswith(("http://", "https://")):
        raise click.BadParameter(f'expected a URL such as http://127.0.0.1:9464, got "{admin}"', param_hint="--admin")
    try:
        status, body = _get(admin, f"/admin/decisions/{decision}")
    except (OSError, http.client.HTTPException) as error:
        raise _Unreachable(f"{admin} does not answer ({error}); is the router running, is --admin right?") from error
    if status == 404:
        raise click.ClickException(f"decision {decision} is not among the last ones of {admin}")
    try:
        document = json.loads(body)
        return str(document.get("explanation") or document["summary"])  # where no policy ran there is no table
    except (ValueError, KeyError, AttributeError) as error:
        raise _Unreachable(f"{admin} answers {status}, but not as SMetric does; is --admin right?") from error


def _get(base: str, path: str) -> tuple[int, bytes]:
    """Status and body of a GET; no proxy and no redirect is followed."""
    parts = urlsplit(base)
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    with contextlib.closing(connect(parts.netloc, timeout=_TIMEOUT_S)) as connection:
        connection.request("GET", parts.path.rstrip("/") + path)
        response = connection.getresponse()
        return response.status, response.read(_MOST_BYTES)


class _Unreachable(click.ClickException):
    """The router does not answer, or something else does."""

    exit_code = UNREACHABLE
