"""`smetric explain`: why a policy decides as it does on a written snapshot, or why a running router decided."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import click
import msgspec

from smetric.cli.admin import admin_option, ask, strange
from smetric.cli.options import painted, param_values, policy_names, set_option
from smetric.cli.policy import policy_named
from smetric.errors import UNREADABLE, ConfigError, did_you_mean
from smetric.features import VOCABULARY
from smetric.files import read_once
from smetric.policy import Decision, Feature, Kind, PolicyError, RequestField
from smetric.policy.explain import explain as explanation
from smetric.policy.explain import lead
from smetric.policy.testing import Situation
from smetric.records.reader import Recorded, find, read_alone
from smetric.records.replay import Judge, NotRecorded, policy_of
from smetric.records.report import ending, why
from smetric.tools.flip import smallest_changes

#: Largest snapshot, bytes: more than ten thousand instances take with all features.
MAX_BYTES = 64 * 1024 * 1024
_MOST_INSTANCES = 10_000
_ID = re.compile(r"[0-9A-Za-z]{1,64}\Z")
_AGE = re.compile(r"age\((\w+)\)\Z")
_IS = {
    Kind.NUMBER: lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    Kind.BOOL: lambda value: isinstance(value, bool),
    Kind.STRING: lambda value: isinstance(value, str),
    Kind.SET: lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
}


@click.command()
@click.argument("policy", metavar="[NAME|FILE]", required=False, shell_complete=policy_names)
@click.option("--snapshot", metavar="FILE|-", help="JSON with `instances`, and optional `request`, `cursors`, `seed`.")
@set_option
@click.option("--decision", metavar="ID", help="A decision of a running router or of a record: x-smetric-decision-id.")
@click.option("--last", is_flag=True, help="The newest decision of a running router.")
@click.option("--record", "records", metavar="FILE", multiple=True, help="Look for it there; repeat it for more files.")
@admin_option
def explain(
    policy: str | None,
    snapshot: str | None,
    params: tuple[str, ...],
    decision: str | None,
    last: bool,
    records: tuple[str, ...],
    admin: str,
) -> None:
    """Explain why a policy decides as it does, how far ahead its pick is, and what would change it.

    \b
    smetric explain smetric --snapshot three-instances.json --set OVERLOAD=1.5
    smetric explain --last
    smetric explain --decision 01JDQ2M7Q0Z5T8F4C6R9K3W1XE
    smetric explain bailian --decision 01JDQ2M7Q0Z5T8F4C6R9K3W1XE --admin http://10.0.0.5:9464
    smetric explain --record decisions.jsonl --decision 01JDQ2M7Q0Z5T8F4C6R9K3W1XE --set OVERLOAD=1.5
    """
    if last and decision is snapshot is None and not records:
        click.echo(painted(_explain_made(_newest(admin), (), admin, policy, params)))
    elif decision is not None and snapshot is None and not last:
        if not _ID.match(decision):
            raise click.BadParameter("expected the value of an x-smetric-decision-id header", param_hint="--decision")
        click.echo(painted(_explain_made(decision, records, admin, policy, params)))
    elif policy is not None and snapshot is not None and decision is None and not records and not last:
        source, situation = policy_named(policy), _read_snapshot(snapshot)
        click.echo(painted(_explain(situation.decide(source.load(param_values(params)), VOCABULARY))))
    else:
        raise click.UsageError(
            "give a policy and --snapshot FILE, or --decision ID, perhaps with --record FILE, or --last"
        )


def _explain(decision: Decision) -> str:
    """Return the explanation of a decision, and the smallest changes that would alter it."""
    lines = [explanation(decision)]
    if ahead := lead(decision):
        lines.append(f"  lead     {ahead}")
    changes = smallest_changes(decision, VOCABULARY)
    lines += [f"  {'flips at' if at == 0 else '':<8} {change}" for at, change in enumerate(changes)]
    return "\n".join(lines)


def _explain_made(
    decision: str, records: tuple[str, ...], admin: str, name: str | None, params: tuple[str, ...]
) -> str:
    """Explain a past decision, made again by its own policy or by the policy *name*, with *params* set."""
    settings = param_values(params)
    recorded = find(map(Path, records), decision) if records else _kept_by(admin, decision)
    if recorded is None:
        raise click.ClickException(f"decision {decision} is not in {', '.join(records)}")
    ended = ending(recorded.line, is_over=bool(records))
    if not recorded.line.ids:
        return f"{why(recorded)}\n{ended}"
    if name is None:
        try:
            policy = policy_of(recorded.policy, settings)
        except PolicyError as error:
            raise click.ClickException(f"the policy of decision {decision} does not check\n\n{error}") from error
    else:
        policy = policy_named(name).load(settings)
    is_recorded = name is None and not settings
    decided = Judge(policy, is_recorded=is_recorded).decide(recorded)
    if isinstance(decided, NotRecorded):
        raise click.ClickException(f"decision {decision}: {decided}, so {policy.name} cannot decide it")
    return f"{_explain(decided)}\n{ended}" if is_recorded else _explain(decided)


def _newest(admin: str) -> str:
    """Return the id of the newest decision of the router at *admin*."""
    status, document = ask(admin, "GET", "/admin/decisions?limit=1")
    try:
        rows = document["decisions"]
        if not rows:
            raise click.ClickException(f"{admin} has decided nothing yet")
        return str(rows[0]["id"])
    except (KeyError, TypeError) as error:
        raise strange(admin, status) from error


def _kept_by(admin: str, decision: str) -> Recorded:
    """Return the decision from the router at *admin*."""
    status, document = ask(admin, "GET", f"/admin/decisions/{decision}/record")
    if status == 404:
        raise click.ClickException(f"decision {decision} is not among the last ones of {admin}; is there a --record?")
    if status != 200:
        raise strange(admin, status)
    try:
        return read_alone(document, admin)
    except ValueError as error:
        raise strange(admin, status) from error


class _SnapshotFile(msgspec.Struct, forbid_unknown_fields=True):
    instances: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=_MOST_INSTANCES)]
    request: dict[str, Any] = {}
    cursors: dict[str, str] = {}
    seed: int = 0


def _read_snapshot(snapshot: str) -> Situation:
    """Read a snapshot with a request as JSON from a file, or from standard input for `-`.

    {"instances": [{"id": "a", "requests": 3, "hit_len": null, "age(requests)": 0.2}, …],
     "request": {"turn": 2, "prompt_len": 9000, "est_hit": 8000}, "cursors": {"least": "a"}, "seed": 7}

    Only `instances` is required. A feature that is left out or null is unknown. An omitted request field that bounds a
    feature, as the prompt's length bounds a hit, is at least as large as that feature of any instance.

    Raises:
        ConfigError: it cannot be read, is not JSON, or breaks a rule of the vocabulary.
    """
    place = "<stdin>" if snapshot == "-" else snapshot
    try:
        most = MAX_BYTES + 1
        data = sys.stdin.buffer.read(most) if snapshot == "-" else read_once(Path(snapshot), most)
    except OSError as error:
        way_out = "give a JSON file, or - for standard input"
        raise ConfigError(f"{snapshot}: cannot be read: {error.strerror}; {way_out}") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{snapshot}: larger than {MAX_BYTES} bytes; is this the right file?")
    try:
        read = msgspec.json.decode(data, type=_SnapshotFile)
    except UNREADABLE as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"{place}: not a snapshot as JSON: {reason}") from error
    given = {}
    for name, item in read.request.items():
        _require_known(name, VOCABULARY.request, f"{place}: request")
        field = VOCABULARY.request[name]
        if item is None and not field.may_be_unknown:
            raise ConfigError(f"{place}: request: {name}: is never unknown; give a value or leave it out")
        given[name] = _typed(item, field, field.high, f"{place}: request: {name}")
    if not 0 <= read.seed < 1 << 64:
        raise ConfigError(f"{place}: seed: expected a whole number from 0 to 2^64 - 1, got {_shown(read.seed)}")
    ids, cells, ages = _columns(read.instances, place, given)
    return Situation(ids, cells, ages, given, read.cursors, read.seed)


def _columns(
    rows: list[dict[str, Any]], place: str, given: Mapping[str, Any]
) -> tuple[list[str], dict[str, list[Any]], dict[str, list[float]]]:
    """Return ids, and per feature cells and ages; an omitted age is 0."""
    ids: dict[str, None] = {}
    cells: dict[str, list[Any]] = {}
    ages: dict[str, list[float]] = {}
    for i, row in enumerate(rows):
        here = f"{place}: instances[{i}]"
        ident = row.get("id")
        if not isinstance(ident, str) or not ident or ident in ids:
            raise ConfigError(f"{here}: id: expected a text of its own, got {_shown(ident)}")
        ids[ident] = None
        for name, value in row.items():
            if name == "id":
                continue
            aged = _AGE.match(name)
            _require_known(aged[1] if aged else name, VOCABULARY.features, here)
            if aged:
                if not _IS[Kind.NUMBER](value) or not 0 <= value < float("inf"):
                    raise ConfigError(f"{here}: {name}: expected seconds, 0 or more, got {_shown(value)}")
                ages.setdefault(aged[1], [0.0] * len(rows))[i] = float(value)
                continue
            feature = VOCABULARY.features[name]
            high = min(feature.high, given.get(feature.at_most, feature.high))
            cells.setdefault(name, [None] * len(rows))[i] = _typed(value, feature, high, f"{here}: {name}")
    return list(ids), cells, ages


def _typed(value: Any, row: Feature | RequestField, high: float, place: str) -> Any:
    """Return *value*, at most *high*, as the language holds it; None for unknown."""
    if value is None:
        return None
    if not _IS[row.kind](value):
        raise ConfigError(f"{place}: expected a {row.kind.value}, got {_shown(value)}")
    if row.kind is Kind.NUMBER:
        if not row.low <= value <= high:
            raise ConfigError(f"{place}: expected a number from {row.low:g} to {high:g}, got {_shown(value)}")
        return float(value)
    return frozenset(value) if row.kind is Kind.SET else value


def _require_known(name: str, names: Iterable[str], place: str) -> None:
    if name not in names:
        meant = did_you_mean(name, names) or "; known here: " + ", ".join(names)
        raise ConfigError(f"{place}: {name[:80]}: no such name{meant}")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:59] + "…"
