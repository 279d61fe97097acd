"""Commands that operate a running router."""

from __future__ import annotations

import asyncio
import contextlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import click

from smetric.cli.admin import admin_option, ask, instance_names, route_names, segment, strange
from smetric.cli.options import (
    Percent,
    format_option,
    param_values,
    policy_names,
    set_option,
    settings_options,
    settings_table,
)
from smetric.cli.policy import PolicySource, policy_named
from smetric.config import load
from smetric.errors import ConfigError
from smetric.features import VOCABULARY
from smetric.policy import PolicyError, PolicyText
from smetric.policy import load as load_policy

#: Timeout of a trial, seconds; the router itself stops after five.
_TRY_TIMEOUT_S = 30.0


def _change_instance(admin: str, instance: str, verb: str) -> dict[str, Any]:
    """Have the router at *admin* drain or undrain *instance*, and return the instance's new state.

    Raises:
        click.ClickException: the router does not know the instance, or refuses.
        RouterUnreachable: it does not answer, or not as SMetric does.
    """
    status, answer = ask(admin, "POST", f"/admin/instances/{segment(instance)}/{verb}")
    if status != 200:
        raise click.ClickException(f"{instance}: {answer['error']}")
    if not answer.keys() >= {"state", "requests", "others", "kept", "not_kept_because"}:
        raise strange(admin, status)
    if not answer["kept"]:
        click.echo(f"not kept over a restart of the router: {answer['not_kept_because']}", err=True)
    return answer


@click.command()
@click.argument("instance", metavar="INSTANCE", shell_complete=instance_names)
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
@click.argument("instance", metavar="INSTANCE", shell_complete=instance_names)
@admin_option
def undrain(instance: str, admin: str) -> None:
    """Let a running router send INSTANCE requests again, slowly at first.

    \b
    smetric undrain gpu-7
    """
    answer = _change_instance(admin, instance, "undrain")
    click.echo(f"{instance} is no longer drained; its state: {answer['state']}")


@click.command()
@click.argument("name", metavar="[NAME]", default="default", shell_complete=route_names)
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


@click.command("try")
@click.argument("policy", metavar="NAME|FILE|-", shell_complete=policy_names)
@click.option(
    "--of",
    "name",
    metavar="NAME",
    default="default",
    show_default=True,
    shell_complete=route_names,
    help="The route to try it on.",
)
@click.option("--last", metavar="N", type=click.IntRange(1, 1000), default=1000, show_default=True, help="Decisions.")
@click.option("--fail-under", metavar="PERCENT", type=Percent(), help="End with 1 if they agree on less.")
@set_option
@format_option(("text", "json"))
@admin_option
def try_(
    policy: str, name: str, last: int, fail_under: float | None, params: tuple[str, ...], form: str, admin: str
) -> None:
    """Try a policy on the last decisions of a running router; the acting policy stays.

    Its parameters are those configured for the route, or with --set those alone. A policy that does not declare
    those of the route needs --set.

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
    status, answer = ask(admin, "POST", f"/admin/policies/{segment(name)}/try", document, timeout_s=_TRY_TIMEOUT_S)
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
