"""`smetric replay`: recorded decisions, made again by the same or another policy."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from smetric.cli.options import Percent, format_option, param_values, set_option
from smetric.cli.policy import policy_named
from smetric.errors import ConfigError
from smetric.policy import Policy, PolicyError
from smetric.records import report
from smetric.records.reader import Reading
from smetric.records.replay import Comparison, Judges
from smetric.records.replay import replay as run

#: Value of `--against` for the record itself.
RECORDED = "recorded"


@click.command()
@click.argument("records", metavar="RECORD...", nargs=-1, required=True)
@click.option("--policy", metavar="NAME|FILE|-", help="The policy that decides again; by default the record's own.")
@set_option
@click.option(
    "--against",
    metavar="recorded|NAME|FILE",
    default=RECORDED,
    show_default=True,
    help="What to compare with: the record, or another policy.",
)
@format_option(("text", "json", "html"))
@click.option("--output", metavar="FILE", help="Write there instead of to standard output.")
@click.option("--examples", metavar="N", type=click.IntRange(0, 64), default=3, show_default=True, help="Moves shown.")
@click.option(
    "--fail-under",
    metavar="PERCENT",
    type=Percent(),
    help="End with 1 if they agree on less; 100 if the record's own policy is compared with the record.",
)
def replay(
    records: tuple[str, ...],
    policy: str | None,
    params: tuple[str, ...],
    against: str,
    form: str,
    output: str | None,
    examples: int,
    fail_under: float | None,
) -> None:
    """Decide recorded decisions again and report what changes.

    \b
    smetric replay decisions*.jsonl                             does it decide again as recorded?
    smetric replay decisions*.jsonl --policy bailian
    smetric replay decisions*.jsonl --set OVERLOAD=1.5          the record's own policy, set differently
    smetric replay decisions*.jsonl --policy new.policy --against bailian --format html --output report.html

    Ends with 0, with 1 if they agree on less than --fail-under or a policy does not check, with 2 if a file is not a
    record, none holds a decision or none can be compared.
    """
    settings = param_values(params)
    try:
        candidate = policy_named(policy).load(settings) if policy is not None else None
        other = policy_named(against).load() if against != RECORDED else None
        name = candidate.name if candidate is not None else "the recorded policy"
        if settings and candidate is None:
            name += " with " + ", ".join(params)
        found = _replayed(records, candidate, name, settings, other)
        shown = report.examples(found, examples)
    except PolicyError as error:
        raise click.ClickException(f"{error.path} does not check\n\n{error}") from error
    if form == "json":
        text = json.dumps(report.as_json(found, shown), ensure_ascii=False, indent=2)
    else:
        text = report.page(found, shown).rstrip() if form == "html" else report.as_text(found, shown)
    if output is None:
        click.echo(text)
    else:
        try:
            Path(output).write_text(text + "\n", "utf-8")
        except OSError as error:
            raise ConfigError(f"{output}: cannot be written: {error.strerror or error}") from error
    if fail_under is None and policy is None and not settings and against == RECORDED:
        fail_under = 100.0
    if found.agreement is None:
        raise SystemExit(2)
    if fail_under is not None and found.agreement * 100 < fail_under:
        raise SystemExit(1)


def _replayed(
    records: tuple[str, ...],
    candidate: Policy | None,
    name: str,
    settings: Mapping[str, float | str | bool],
    other: Policy | None,
) -> Comparison:
    """Compare decisions of *candidate*, else of the recorded policy, with those of *other*, else of the record."""
    for record in records:
        if not os.path.exists(record):
            raise ConfigError(f"{record}: no such file; give files that the setting `record` made")
        if not os.path.isfile(record):
            raise ConfigError(f"{record}: not a regular file, and a record is read more than once; write it to one")
    reading = Reading([Path(record) for record in records])
    found = Comparison(other.name if other is not None else RECORDED, name)
    after = Judges(candidate, None if candidate is not None else settings)
    with click.progressbar(
        length=reading.size, label="replaying", file=sys.stderr, hidden=not sys.stderr.isatty()
    ) as bar:
        reading.progressed = bar.update
        run(reading, after, Judges(other) if other is not None else None, found)
    after.require_used()
    for path in reading.cut_short:
        click.echo(f"{path}: ends in the middle of a line; whole lines were read", err=True)
    return found
