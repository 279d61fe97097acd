"""`smetric explain`: why a policy decides as it does on a written-down snapshot, or why a running router decided."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from smetric.cli.admin_port import admin_option, ask, strange
from smetric.cli.policy_argument import read_one
from smetric.cli.settings_options import param_values, set_option
from smetric.cli.snapshot_file import read_situation
from smetric.errors import ConfigError

_ID = re.compile(r"[0-9A-Za-z]{1,64}\Z")


@click.command()
@click.argument("policy", metavar="[NAME|FILE]", required=False)
@click.option(
    "--snapshot", metavar="FILE|-", help="JSON with `instances`, and if need be `request`, `cursors`, `seed`."
)
@set_option()
@click.option("--decision", metavar="ID", help="A decision of a running router: its x-smetric-decision-id.")
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
    """Say why a policy decides as it does.

    \b
    smetric explain smetric --snapshot three-instances.json --set OVERLOAD=1.5
    smetric explain --decision 01JDQ2M7Q0Z5T8F4C6R9K3W1XE
    smetric explain --decision 01JDQ2M7Q0Z5T8F4C6R9K3W1XE --record decisions.jsonl
    """
    if decision is not None and policy is None and snapshot is None and not params:
        click.echo(_in_records(decision, records) if records else _recorded(decision, admin))
    elif policy is not None and snapshot is not None and decision is None and not records:
        click.echo(_decided(policy, snapshot, params))
    else:
        raise click.UsageError("give a policy and --snapshot FILE, or --decision ID, with --record FILE or without")


def _decided(name: str, snapshot: str, params: tuple[str, ...]) -> str:
    from smetric.features import VOCABULARY
    from smetric.policy import PolicyError, load
    from smetric.policy.explain import explain as explanation

    source = read_one(name)
    try:
        text = sys.stdin.read() if snapshot == "-" else Path(snapshot).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"{snapshot}: cannot be read: {reason}; give a JSON file, or - for standard input") from error
    situation = read_situation(text, "<stdin>" if snapshot == "-" else snapshot, VOCABULARY)
    try:
        policy = load(
            source.text,
            VOCABULARY,
            path=source.path,
            settings=param_values(params),
            libraries=source.libraries,
        )
    except PolicyError as error:
        raise click.ClickException(f"{source.path} does not check\n\n{error}") from error
    return explanation(situation.decide(policy, VOCABULARY))


def _in_records(decision: str, records: tuple[str, ...]) -> str:
    """The explanation of a decision that stands in one of the files *records*."""
    from smetric.records.account import account
    from smetric.records.reader import find

    found = find(map(Path, records), _checked(decision))
    if found is None:
        raise click.ClickException(f"decision {decision} is not in {', '.join(records)}")
    return account(found)


def _checked(decision: str) -> str:
    if not _ID.match(decision):
        raise click.BadParameter("expected the value of an x-smetric-decision-id header", param_hint="--decision")
    return decision


def _recorded(decision: str, admin: str) -> str:
    """The explanation that the router at *admin* keeps of a decision."""
    _checked(decision)
    status, document = ask(admin, "GET", f"/admin/decisions/{decision}")
    if status == 404:
        raise click.ClickException(f"decision {decision} is not among the last ones of {admin}; is there a --record?")
    try:
        return str(document.get("explanation") or document["summary"])  # where no policy ran there is no table
    except (KeyError, AttributeError) as error:
        raise strange(admin, status) from error
