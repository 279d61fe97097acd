"""`smetric check`: parse and check policy files."""

from __future__ import annotations

import click

from smetric.cli.policy_argument import read_all
from smetric.features import VOCABULARY
from smetric.policy import Parameter, Policy, PolicyError
from smetric.policy.check import check_text
from smetric.policy.diagnostic import report
from smetric.policy.policy import compiled


@click.command()
@click.argument("policies", metavar="[NAME|FILE|-]...", nargs=-1)
@click.option("-v", "--verbose", is_flag=True, help="Say of each policy what it reads, and when.")
def check(policies: tuple[str, ...], verbose: bool) -> None:
    """Check policies and libraries; all shipped policies when none is named.

    Prints nothing and ends with 0 if they are fine; else prints what is wrong, where, and the way out, and ends with 1.
    Warnings are printed and change nothing.
    """
    found = False
    for source in read_all(policies):
        try:
            file, checked = check_text(source.text, VOCABULARY, path=source.path, libraries=source.libraries)
            policy = compiled(file, checked, VOCABULARY) if file.kind == "policy" else None
        except PolicyError as error:
            click.echo(f"{error}\n", err=True)
            found = True
        else:
            if checked.warnings:
                click.echo(f"{report(checked.warnings, source.text, source.path)}\n", err=True)
            if verbose and policy is not None:
                click.echo(_reads(policy))
    raise SystemExit(1 if found else 0)


def _reads(policy: Policy) -> str:
    """What a policy costs: its parameters, the features that are always at hand, and those looked up on the way."""
    lines = [f"{policy.path}: {policy.name}, {len(policy.tests)} tests"]
    if policy.params:
        lines.append("  parameters  " + ", ".join(map(_param, policy.params.items())))
    at_hand = sorted(policy.reads - policy.lookups.keys())
    lines.append("  reads       " + (", ".join(at_hand) or "nothing"))
    for name, lookup in policy.lookups.items():
        when = "by every decision" if lookup.always else "when reached by " + ", ".join(lookup.asked_by)
        lines.append(f"  looks up    {name}, {when}")
    return "\n".join(lines)


def _param(item: tuple[str, Parameter]) -> str:
    """As it would be declared: `OVERLOAD = 2`, `FLOOR = 16 requests`, `QUEUED = false`."""
    name, param = item
    if isinstance(param.value, bool):
        return f"{name} = {str(param.value).lower()}"
    value = f"{param.value:g}" if isinstance(param.value, float) else param.value
    return f"{name} = {value} {param.unit}".rstrip()
