"""`smetric try`: how a candidate would have decided the last decisions of a running router."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from smetric.cli.admin_port import admin_option, ask, segment, strange
from smetric.cli.policy_argument import PolicySource, policy_named
from smetric.cli.settings_options import param_values, set_option

#: Seconds that the router may take: it stops after five by itself.
_TIMEOUT_S = 30.0


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
    status, answer = ask(admin, "POST", f"/admin/policies/{segment(name)}/try", document, timeout_s=_TIMEOUT_S)
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
    from smetric.policy import PolicyError, Source, load

    found: dict[str, str] = {}

    def library(name: str) -> Source | None:
        text = source.libraries(name)
        if text is not None:
            found[name] = text.text
        return text

    try:
        load(source.text, VOCABULARY, path=source.path, libraries=library)
    except PolicyError:
        return found
    return found
