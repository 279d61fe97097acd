"""Commands that operate a running router, and the client of its admin port."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit

import click

from smetric.cli.options import Percent, format_option, param_values, set_option, settings_options, settings_table
from smetric.cli.policy import PolicySource, policy_named
from smetric.config import load
from smetric.config.credential import credential
from smetric.errors import ConfigError
from smetric.features import VOCABULARY
from smetric.policy import PolicyError, PolicyText
from smetric.policy import load as load_policy

#: Exit code for a router that does not answer.
UNREACHABLE = 3

_MOST_BYTES = 4 << 20
_TIMEOUT_S = 5.0
#: Timeout of a trial, seconds; the router itself stops after five.
_TRY_TIMEOUT_S = 30.0

admin_option = click.option(
    "--admin", metavar="URL", default="http://127.0.0.1:9464", show_default=True, help="That router's admin URL."
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
            status, answer = response.status, response.read(_MOST_BYTES)
    except (OSError, http.client.HTTPException, UnicodeError) as error:  # the last for a host like a..b
        raise RouterUnreachable(
            f"{admin} does not answer ({error}); is the router running, is --admin right?"
        ) from error
    if status == 401:
        sent = "wants its token: set" if "Authorization" not in headers else "wants another token than is in"
        raise RouterUnreachable(f"{admin} {sent} SMETRIC_ADMIN__TOKEN or SMETRIC_ADMIN__TOKEN_FILE")
    try:
        said = json.loads(answer)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict) or (status != 200 and not isinstance(said.get("error"), str)):
        raise strange(admin, status)
    return status, said


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
    names = ("SMETRIC_ADMIN__TOKEN", "SMETRIC_ADMIN__TOKEN_FILE")
    environ = {name: os.environ[name] for name in names if name in os.environ}
    admin = load.from_table(load.stack(None, environ, ())).admin
    token = credential("SMETRIC_ADMIN__TOKEN_FILE", admin.token, admin.token_file)
    return {"Authorization": f"Bearer {token.text}"} if token is not None else {}


def _segment(text: str) -> str:
    """Return *text* from the command line as a segment of a path, also if it is not Unicode."""
    return quote(os.fsencode(text), safe="")


def _change_instance(admin: str, instance: str, verb: str) -> dict[str, Any]:
    """Have the router at *admin* drain or undrain *instance*, and return the instance's new state.

    Raises:
        click.ClickException: the router does not know the instance, or refuses.
        RouterUnreachable: it does not answer, or not as SMetric does.
    """
    status, answer = ask(admin, "POST", f"/admin/instances/{_segment(instance)}/{verb}")
    if status != 200:
        raise click.ClickException(f"{instance}: {answer['error']}")
    if not answer.keys() >= {"state", "requests", "others", "kept", "not_kept_because"}:
        raise strange(admin, status)
    if not answer["kept"]:
        click.echo(f"not kept over a restart of the router: {answer['not_kept_because']}", err=True)
    return answer


@click.command()
@click.argument("instance", metavar="INSTANCE")
@admin_option
def drain(instance: str, admin: str) -> None:
    """Stop a running router from sending new requests to INSTANCE; requests under way end in their own time.

    \b
    smetric drain gpu-7
    smetric drain gpu-7 --admin http://10.0.0.5:9464
    """
    answer = _change_instance(admin, instance, "drain")
    click.echo(f"{instance} gets nothing new; requests under way there: {answer['requests']}")
    if not answer["others"]:
        click.echo("no other instance is left: requests are answered 503", err=True)


@click.command()
@click.argument("instance", metavar="INSTANCE")
@admin_option
def undrain(instance: str, admin: str) -> None:
    """Let a running router send INSTANCE requests again, slowly at first.

    \b
    smetric undrain gpu-7
    """
    answer = _change_instance(admin, instance, "undrain")
    click.echo(f"{instance} is no longer drained; its state: {answer['state']}")


@click.command()
@click.argument("name", metavar="[NAME]", default="default")
@click.option("--to", "generation", metavar="N", type=click.IntRange(1), help="This generation, not the one before.")
@admin_option
def rollback(name: str, generation: int | None, admin: str) -> None:
    """Return route NAME at once to the policy that acted before its file changed.

    The file itself stays: it acts again when it changes, and when the router starts. GET /admin/policies lists the
    names, and the last ten generations of each.

    \b
    smetric rollback
    smetric rollback coder --to 3 --admin http://10.0.0.5:9464
    """
    document = {} if generation is None else {"generation": generation}
    status, answer = ask(admin, "POST", f"/admin/policies/{_segment(name)}/rollback", document)
    if status != 200:
        raise click.ClickException(answer["error"])
    try:
        acting = answer["generations"][-1]
        click.echo(
            f"{answer['name']}: {acting['policy']}@{acting['hash']} acts again, that of generation {acting['of']}, as "
            f"generation {acting['number']}, until {answer['path']} changes"
        )
    except (KeyError, IndexError, TypeError) as error:
        raise strange(admin, status) from error


@click.command("try")
@click.argument("policy", metavar="NAME|FILE|-")
@click.option("--of", "name", metavar="NAME", default="default", show_default=True, help="The route to try it on.")
@click.option("--last", metavar="N", type=click.IntRange(1, 1000), default=1000, show_default=True, help="Decisions.")
@click.option("--fail-under", metavar="PERCENT", type=Percent(), help="End with 1 if they agree on less.")
@set_option
@format_option(("text", "json"))
@admin_option
def try_(
    policy: str, name: str, last: int, fail_under: float | None, params: tuple[str, ...], form: str, admin: str
) -> None:
    """Try a policy on the last decisions of a running router; the acting policy stays.

    Its parameters are those configured for the route, or with --set those alone.

    \b
    smetric try candidate.policy
    smetric try candidate.policy --of coder --set OVERLOAD=1.5 --admin http://10.0.0.5:9464
    smetric try candidate.policy --fail-under 95

    Ends with 0, with 1 if they agree on less than --fail-under or the policy does not check, with 2 if no decision can
    be compared.
    """
    source = policy_named(policy)
    document: dict[str, Any] = {"policy": source.text, "last": last, "libraries": _libraries(source)}
    if params:
        document["params"] = param_values(params)
    status, answer = ask(admin, "POST", f"/admin/policies/{_segment(name)}/try", document, timeout_s=_TRY_TIMEOUT_S)
    if status == 422:
        raise click.ClickException(f"{source.path} does not check\n\n{answer['error']}")
    if status != 200:
        raise click.ClickException(answer["error"])
    if form == "json":
        click.echo(json.dumps(answer, ensure_ascii=False, indent=2))
    elif not isinstance(answer.get("text"), str):
        raise strange(admin, status)
    else:
        for warning in answer.get("warnings", ()):
            click.echo(f"{source.path}:{warning}", err=True)
        if answer.get("cut_short"):
            click.echo("the router stopped before it had tried all of them; ask for fewer with --last", err=True)
        click.echo(answer["text"])
    agreement = answer.get("agreement")
    if agreement is None:
        raise SystemExit(2)
    if fail_under is not None and agreement * 100 < fail_under:
        raise SystemExit(1)


def _libraries(source: PolicySource) -> dict[str, str]:
    """Return the libraries beside the policy that it uses. The router reports other faults of the policy."""
    found: dict[str, str] = {}

    def library(name: str) -> PolicyText | None:
        text = source.libraries(name)
        if text is not None:
            found[name] = text.text
        return text

    with contextlib.suppress(PolicyError):
        load_policy(source.text, VOCABULARY, path=source.path, libraries=library)
    return found


@click.command()
@format_option(("text", "json"))
@click.option("--no-probe", is_flag=True, help="Send nothing that engines compute: no prompts, so no proof of hits.")
@click.option("--slow", is_flag=True, help="Also measure how long instances keep idle connections: some seconds more.")
@settings_options
def doctor(
    form: str,
    no_probe: bool,
    slow: bool,
    config: Path | None,
    params: tuple[str, ...],
    **options: str | tuple[str, ...] | None,
) -> None:
    """Examine the engines, sources and routers of a configuration, and say how to repair what is wrong.

    Run it where the router runs, with the same options as `smetric serve`, beside it or instead of it. Ends with 0 if
    there is nothing worse than an info, 1 for errors and warnings, 2 if the settings cannot be used, 3 if no instance
    answers.
    """
    from smetric.doctor.examination import as_json, as_text, examine
    from smetric.telemetry import logs

    table = settings_table(config, params, **options)
    settings = load.from_table(table)
    if not settings.instances:
        raise ConfigError("no instances to examine: add `instances:` in the file of --config, or --instance URL")
    logs.configure("critical")  # the checks report what sources would log
    examination = asyncio.run(examine(settings, partial(load.set_at, table), may_probe=not no_probe, may_wait=slow))
    if form == "json":
        click.echo(json.dumps(as_json(examination), indent=2, ensure_ascii=False))
    else:
        click.echo(as_text(examination))
    raise SystemExit(examination.exit_code)
