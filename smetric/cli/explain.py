"""`smetric explain`: why a policy decides as it does on a written-down snapshot, or why a running router decided."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from smetric.cli.admin_port import admin_option, ask, strange
from smetric.cli.policy_argument import policy_named
from smetric.cli.settings_options import param_values, set_option
from smetric.cli.snapshot_file import MAX_BYTES, read_situation
from smetric.errors import ConfigError
from smetric.features import VOCABULARY
from smetric.file_bytes import read_once
from smetric.policy import Decision, PolicyError
from smetric.policy.explain import explain as explanation
from smetric.policy.flip import lead, smallest_changes

if TYPE_CHECKING:
    from smetric.records.reader import Recorded

_ID = re.compile(r"[0-9A-Za-z]{1,64}\Z")


@click.command()
@click.argument("policy", metavar="[NAME|FILE]", required=False)
@click.option(
    "--snapshot", metavar="FILE|-", help="JSON with `instances`, and if need be `request`, `cursors`, `seed`."
)
@set_option
@click.option("--decision", metavar="ID", help="A decision of a running router or of a record: x-smetric-decision-id.")
@click.option("--record", "records", metavar="FILE", multiple=True, help="Look for it there; repeat it for more files.")
@admin_option
def explain(
    policy: str | None,
    snapshot: str | None,
    params: tuple[str, ...],
    decision: str | None,
    records: tuple[str, ...],
    admin: str,
) -> None:
    """Say why a policy decides as it does, how far ahead its pick is, and what would change it.

    \b
    smetric explain smetric --snapshot three-instances.json --set OVERLOAD=1.5
    smetric explain --decision 01JDQ2M7Q0Z5T8F4C6R9K3W1XE
    smetric explain bailian --decision 01JDQ2M7Q0Z5T8F4C6R9K3W1XE --admin http://10.0.0.5:9464
    smetric explain --record decisions.jsonl --decision 01JDQ2M7Q0Z5T8F4C6R9K3W1XE --set OVERLOAD=1.5
    """
    if decision is not None and snapshot is None:
        click.echo(_made(_checked_id(decision), records, admin, policy, params))
    elif policy is not None and snapshot is not None and decision is None and not records:
        click.echo(_account(_decided(policy, snapshot, params)))
    else:
        raise click.UsageError("give a policy and --snapshot FILE, or --decision ID, perhaps with --record FILE")


def _account(decision: Decision) -> str:
    """The explanation of a decision, and what would have changed it."""
    lines = [explanation(decision)]
    ahead = lead(decision)
    if ahead:
        lines.append(f"  lead     {ahead}")
    changes = smallest_changes(decision, VOCABULARY)
    lines += [f"  {'flips at' if at == 0 else '':<8} {change}" for at, change in enumerate(changes)]
    return "\n".join(lines)


def _decided(name: str, snapshot: str, params: tuple[str, ...]) -> Decision:
    """What the policy *name* decides on a snapshot file."""
    source = policy_named(name)
    try:
        most = MAX_BYTES + 1
        data = sys.stdin.buffer.read(most) if snapshot == "-" else read_once(Path(snapshot), most)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{snapshot}: larger than {MAX_BYTES} bytes; is this the right file?")
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"{snapshot}: cannot be read: {reason}; give a JSON file, or - for standard input") from error
    situation = read_situation(text, "<stdin>" if snapshot == "-" else snapshot, VOCABULARY)
    return situation.decide(source.load(param_values(params)), VOCABULARY)


# ── decisions that were made ─────────────────────────────────────────────────


def _checked_id(decision: str) -> str:
    if not _ID.match(decision):
        raise click.BadParameter("expected the value of an x-smetric-decision-id header", param_hint="--decision")
    return decision


def _made(decision: str, records: tuple[str, ...], admin: str, name: str | None, params: tuple[str, ...]) -> str:
    """A decision that was made, decided again by its own policy or by the policy *name*, perhaps set differently."""
    from smetric.records.account import ending, why
    from smetric.records.situation import Judge, NotRecorded, policy_of

    settings = param_values(params)
    recorded = _found_in(records, decision) if records else _kept_by(admin, decision)
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
    return f"{_account(decided)}\n{ended}" if is_recorded else _account(decided)


def _found_in(records: tuple[str, ...], decision: str) -> Recorded:
    from smetric.records.reader import find

    recorded = find(map(Path, records), decision)
    if recorded is None:
        raise click.ClickException(f"decision {decision} is not in {', '.join(records)}")
    return recorded


def _kept_by(admin: str, decision: str) -> Recorded:
    """The decision as the router at *admin* keeps it."""
    from smetric.records.reader import read_alone

    status, document = ask(admin, "GET", f"/admin/decisions/{decision}/record")
    if status == 404:
        raise click.ClickException(f"decision {decision} is not among the last ones of {admin}; is there a --record?")
    if status != 200:
        raise strange(admin, status)
    try:
        return read_alone(document, admin)
    except ValueError as error:
        raise strange(admin, status) from error
