"""`smetric replay`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from smetric.cli.policy import Percent, policy_named
from smetric.cli.serve import param_values, set_option
from smetric.errors import ConfigError
from smetric.policy import PolicyError

if TYPE_CHECKING:
    from smetric.records.replay import Comparison


#: What `--against` says for the record itself.
RECORDED = "recorded"


@click.command()
@click.argument("records", metavar="RECORD...", nargs=-1, required=True)
@click.option("--policy", metavar="NAME|FILE|-", help="Who decides anew; the record's own policy when not given.")
@set_option
@click.option(
    "--against",
    metavar="recorded|NAME|FILE",
    default=RECORDED,
    show_default=True,
    help="What that is compared with: what was recorded, or another policy.",
)
@click.option("--format", "form", type=click.Choice(["text", "json", "html"]), default="text", show_default=True)
@click.option("--output", metavar="FILE", help="Write there instead of to standard output.")
@click.option("--examples", metavar="N", type=click.IntRange(0, 64), default=3, show_default=True, help="Moves told.")
@click.option(
    "--fail-under",
    metavar="PERCENT",
    type=Percent(),
    help="End with 1 if they agree on less; 100 where the record's own policy is held against the record.",
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
    """Decide recorded decisions again and say what changes.

    \b
    smetric replay decisions*.jsonl                             does the record come out as it was?
    smetric replay decisions*.jsonl --policy bailian
    smetric replay decisions*.jsonl --set OVERLOAD=1.5          the record's own policy, set differently
    smetric replay decisions*.jsonl --policy new.policy --against bailian --format html --output report.html

    Ends with 0, with 1 where they agree on less than --fail-under or a policy does not check, with 2 where a file is no
    record or none holds a decision.
    """
    settings = param_values(params)
    try:
        found, text = _replayed(records, policy, params, settings, against, form, examples)
    except PolicyError as error:
        raise click.ClickException(f"{error.path} does not check\n\n{error}") from error
    if output is None:
        click.echo(text)
    else:
        try:
            Path(output).write_text(text + "\n", "utf-8")
        except OSError as error:
            raise ConfigError(f"{output}: cannot be written: {error.strerror or error}") from error
    if fail_under is None and policy is None and not settings and against == RECORDED:
        fail_under = 100.0
    if fail_under is not None and (found.agreement is None or found.agreement * 100 < fail_under):
        raise SystemExit(1)


def _replayed(
    records: tuple[str, ...],
    policy: str | None,
    params: tuple[str, ...],
    settings: Mapping[str, float | str | bool],
    against: str,
    form: str,
    examples: int,
) -> tuple[Comparison, str]:
    from smetric.records import report
    from smetric.records import report as html_report
    from smetric.records.reader import Reading
    from smetric.records.replay import Comparison, Judges
    from smetric.records.replay import replay as run

    candidate = policy_named(policy).load(settings) if policy is not None else None
    other = policy_named(against).load() if against != RECORDED else None
    reading = Reading([_path(record) for record in records])
    name = candidate.name if candidate is not None else "the recorded policy"
    if settings and candidate is None:
        name += " with " + ", ".join(params)
    found = Comparison(other.name if other is not None else RECORDED, name)
    after = Judges(candidate, None if candidate is not None else settings)
    before = Judges(other)
    with click.progressbar(
        length=reading.size, label="replaying", file=sys.stderr, hidden=not sys.stderr.isatty()
    ) as bar:
        reading.progressed = bar.update
        run(reading, after, before if other is not None else None, found)
    after.require_used()
    for path in reading.cut_short:
        click.echo(f"{path}: ends in the middle of a line; what is whole was read", err=True)
    told = report.examples(found, examples)
    if form == "json":
        return found, json.dumps(report.as_json(found, told), ensure_ascii=False, indent=2)
    if form == "html":
        return found, html_report.page(found, told).rstrip()
    return found, report.as_text(found, told)


def _path(record: str) -> Path:
    if not os.path.exists(record):
        raise ConfigError(f"{record}: no such file; give files that the setting `record` made")
    if not os.path.isfile(record):
        raise ConfigError(f"{record}: no regular file, and a record is read more than once; write it to one")
    return Path(record)
