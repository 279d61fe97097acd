"""`smetric bench`: what a policy's decisions cost."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby

import click

from smetric.bench import REQUESTS, ROUNDS, SIZES, Figure, figures
from smetric.cli.policy_argument import policies_named
from smetric.features import VOCABULARY
from smetric.policy import Policy


@click.command()
@click.argument("policies", metavar="[NAME|FILE|-]...", nargs=-1)
@click.option("--calls", type=click.IntRange(ROUNDS, 1_000_000), default=2000, show_default=True, help="Per figure.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--python", is_flag=True, help="Print the Python that decides instead of measuring it.")
def bench(policies: tuple[str, ...], calls: int, form: str, python: bool) -> None:
    """Measure what decisions cost: of the policies named, else of all shipped ones.

    Microseconds per decision at 8, 32, 128 and 1024 instances, the Decision included: median / 99th percentile, for the
    first request of a session, for a later one whose cache is there, and for one whose cache is gone.
    """
    if python and form != "text":
        raise click.UsageError("--python prints Python, so --format does not go with it")
    found = []
    for source in policies_named(policies):
        if source.is_library:
            click.echo(f"{source.path}: a library, which decides nothing", err=True)
            continue
        policy = source.load()
        if python:
            click.echo(policy.python())
        elif form == "text":
            click.echo(_table(policy, figures(policy, VOCABULARY, calls)))
        else:
            found.append(_document(policy, figures(policy, VOCABULARY, calls)))
    if form == "json":
        click.echo(json.dumps(found, indent=2))


def _table(policy: Policy, measured: Iterable[Figure]) -> str:
    """One line per request, one column per size."""
    width = max(map(len, REQUESTS))
    head = f"{policy.name} {policy.digest}, µs per decision, median / 99th percentile"
    lines = [head, " " * width + "".join(f"{size:>16}" for size in SIZES)]
    ordered = sorted(measured, key=lambda figure: list(REQUESTS).index(figure.request))
    for request, group in groupby(ordered, key=lambda figure: figure.request):
        row = list(group)
        cells = "".join(f"{f'{figure.cost.p50:.1f} / {figure.cost.p99:.1f}':>16}" for figure in row)
        rules = " or ".join(dict.fromkeys(figure.rule for figure in row))
        lines.append(f"{request:<{width}}{cells}  {rules}")
    return "\n".join(lines) + "\n"


def _document(policy: Policy, measured: Iterable[Figure]) -> dict[str, object]:
    rows = []
    for figure in measured:
        row = asdict(figure)
        cost = row.pop("cost")
        rows.append({**row, "p50_us": round(cost["p50"], 3), "p99_us": round(cost["p99"], 3)})
    return {"policy": policy.name, "hash": policy.digest, "figures": rows}
