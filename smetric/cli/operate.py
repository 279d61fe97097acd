"""Commands that operate a running router."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit

import click

from smetric.cli.policy import PolicySource, policy_named
from smetric.cli.serve import param_values, set_option, settings_options, settings_table
from smetric.config import load
from smetric.config.credential import credential
from smetric.config.values import Secret
from smetric.doctor.examination import as_json, as_text, examine
from smetric.errors import ConfigError
from smetric.telemetry import logs

# Asking a running router's admin port, for the commands that do.

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
    raw = load.Scalar(text=os.environ.get(variable, ""), place=variable)
    text = load.parse(raw, load.kind_of(Secret), "admin.token")
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


# `smetric drain`: send an instance nothing new.


@click.command()
@click.argument("instance", metavar="INSTANCE")
@admin_option
def drain(instance: str, admin: str) -> None:
    """Let a running router send INSTANCE nothing new; requests under way end in their own time.

    \b
    smetric drain gpu-7
    smetric drain gpu-7 --admin http://10.0.0.5:9464
    """
    answer = change_instance(admin, instance, "drain")
    under_way = answer["requests"]
    click.echo(f"{instance} gets nothing new; requests under way there: {under_way}")
    if not answer["others"]:
        click.echo("no other instance is left: requests are answered 503", err=True)
    if not answer["kept"]:
        click.echo(f"not kept over a restart of the router: {answer['not_kept_because']}", err=True)


# `smetric undrain`: let an instance be a candidate again.


@click.command()
@click.argument("instance", metavar="INSTANCE")
@admin_option
def undrain(instance: str, admin: str) -> None:
    """Let a running router send INSTANCE requests again, slowly at first.

    \b
    smetric undrain gpu-7
    """
    answer = change_instance(admin, instance, "undrain")
    click.echo(f"{instance} is no longer drained; its state: {answer['state']}")
    if not answer["kept"]:
        click.echo(f"not kept over a restart of the router: {answer['not_kept_because']}", err=True)


# `smetric rollback`: let the policy act again that acted before the last change.


@click.command()
@click.argument("name", metavar="[NAME]", default="default")
@click.option(
    "--to", "generation", metavar="N", type=click.IntRange(1), help="A certain generation, not the one before."
)
@admin_option
def rollback(name: str, generation: int | None, admin: str) -> None:
    """Let the policy of route NAME act again that acted before its file changed, at once.

    The file is not written: it acts again when it changes, and when the router starts. GET /admin/policies lists the
    names, and the last ten generations of each.

    \b
    smetric rollback
    smetric rollback coder --to 3 --admin http://10.0.0.5:9464
    """
    document = {} if generation is None else {"generation": generation}
    status, answer = ask(admin, "POST", f"/admin/policies/{segment(name)}/rollback", document)
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


# `smetric try`: how a candidate would have decided the last decisions of a running router.

#: Seconds that the router may take: it stops after five by itself.
_TRY_TIMEOUT_S = 30.0


@click.command("try")
@click.argument("policy", metavar="NAME|FILE|-")
@click.option("--of", "name", metavar="NAME", default="default", show_default=True, help="The route it is tried on.")
@click.option("--last", metavar="N", type=click.IntRange(1, 1000), default=1000, show_default=True, help="Decisions.")
@set_option
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@admin_option
def try_(policy: str, name: str, last: int, params: tuple[str, ...], form: str, admin: str) -> None:
    """Try a policy on the last decisions of a running router; nothing is swapped.

    Its parameters are those configured for the route, or with --set those alone.

    \b
    smetric try candidate.policy
    smetric try candidate.policy --of coder --set OVERLOAD=1.5 --admin http://10.0.0.5:9464
    """
    source = policy_named(policy)
    document: dict[str, Any] = {"policy": source.text, "last": last, "libraries": _libraries(source)}
    if params:
        document["params"] = param_values(params)
    status, answer = ask(admin, "POST", f"/admin/policies/{segment(name)}/try", document, timeout_s=_TRY_TIMEOUT_S)
    if status == 422:
        raise click.ClickException(f"{source.path} does not check\n\n{answer['error']}")
    if status != 200:
        raise click.ClickException(answer["error"])
    if form == "json":
        click.echo(json.dumps(answer, ensure_ascii=False, indent=2))
        return
    if not isinstance(answer.get("text"), str):
        raise strange(admin, status)
    for warning in answer.get("warnings", ()):
        click.echo(f"{source.path}:{warning}", err=True)
    if answer.get("cut_short"):
        click.echo("the router stopped before it had tried all of them; ask for fewer with --last", err=True)
    click.echo(answer["text"])


def _libraries(source: PolicySource) -> Mapping[str, str]:
    """The libraries it uses, where they lie beside it; what else is wrong with it the router says."""
    from smetric.features import VOCABULARY
    from smetric.policy import PolicyError, PolicyText, load

    found: dict[str, str] = {}

    def library(name: str) -> PolicyText | None:
        text = source.libraries(name)
        if text is not None:
            found[name] = text.text
        return text

    try:
        load(source.text, VOCABULARY, path=source.path, libraries=library)
    except PolicyError:
        return found
    return found


# `smetric config`: the settings in force and where each comes from, and the schema of a configuration file.

#: A key, or a value, that YAML reads as itself without quotes.
_BARE_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*\Z")


@click.group()
def config() -> None:
    """Print the settings or their schema."""


@config.command("schema")
def print_schema() -> None:
    """Print the JSON Schema of a configuration file.

    Editors complete and check a file whose first line is `# yaml-language-server: $schema=PATH`.
    """
    click.echo(json.dumps(load.schema(), indent=2, ensure_ascii=False))


@config.command("show")
@click.option("--origin", is_flag=True, help="Say of each value where it comes from.")
@settings_options
def show(origin: bool, config: Path | None, params: tuple[str, ...], **options: str | tuple[str, ...] | None) -> None:
    """Print the settings in force, as YAML.

    They are those that `smetric serve` would use with the same options.
    """
    table = settings_table(config, params, **options)
    shown = load.show(load.from_table(table))
    rows = [(text, load.place_of(table, path) if path else "") for text, path in _rows(shown, (), "")]
    width = min(60, max(len(text) for text, _ in rows))
    for text, place in rows:
        click.echo(f"{text:{width}}  # {place}" if origin and place else text)


def _rows(value: Any, path: tuple[str | int, ...], indent: str) -> Iterator[tuple[str, tuple[str | int, ...]]]:
    """Lines of YAML; those that carry a value with its path, those that only open a block with none."""
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield f"{indent}- {_flow(item)}", (*path, i)
        return
    for key, item in value.items():
        head = indent + (key if _BARE_KEY.match(key) else json.dumps(key, ensure_ascii=False)) + ":"
        if isinstance(item, dict | list) and item:
            yield head, ()
            yield from _rows(item, (*path, key), indent + "  ")
        else:
            yield f"{head} {_flow(item)}", (*path, key)


def _flow(value: Any) -> str:
    """A value; in a file, a dollar sign that is one is doubled."""
    return json.dumps(value, ensure_ascii=False).replace("$", "$$")


# `smetric doctor`: what is wrong with a live set-up, and how to mend it.


@click.command()
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--no-probe", is_flag=True, help="Send nothing that engines compute: no prompts, so no proof of hits.")
@click.option("--slow", is_flag=True, help="Measure how long instances keep idle connections, too: some seconds more.")
@settings_options
def doctor(
    form: str,
    no_probe: bool,
    slow: bool,
    config: Path | None,
    params: tuple[str, ...],
    **options: str | tuple[str, ...] | None,
) -> None:
    """Examine the engines, sources and routers of a configuration, and say how to mend what is wrong.

    Run it where the router runs, with the same options as `smetric serve`, beside it or in its place. Ends with 0 if
    there is nothing worse than an info, 1 for errors and warnings, 2 if the settings cannot be used,
    3 if no instance answers.
    """
    settings = load.from_table(settings_table(config, params, **options))
    if not settings.instances:
        raise ConfigError("no instances to examine: add `instances:` in the file of --config, or --instance URL")
    # What sources log of troubles on the way is found by the checks, with a remedy.
    logs.configure("critical")
    examination = asyncio.run(examine(settings, may_probe=not no_probe, may_wait=slow))
    if form == "json":
        click.echo(json.dumps(as_json(examination), indent=2, ensure_ascii=False))
    else:
        click.echo(as_text(examination))
    raise SystemExit(examination.exit_code)
