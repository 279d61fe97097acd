"""Commands that show a running router: status, decisions and policies."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import click

from smetric.cli.admin import admin_option, ask, follow, strange
from smetric.cli.options import format_option
from smetric.files import shipped_policies
from smetric.policy.parser import read

Row = Mapping[str, Any]


@click.command()
@format_option(("text", "json"))
@admin_option
def status(form: str, admin: str) -> None:
    """Show a running router: its policies, its traffic of the last seconds, and its instances.

    Ends with 0, with 1 if no instance takes requests, with 3 if no router answers.
    """
    state = _asked(admin, "/admin/state")
    try:
        if form == "json":
            state.pop("history", None)
            click.echo(json.dumps(state, ensure_ascii=False, indent=2))
        else:
            click.echo("\n".join(_status(admin, state)))
        up = state["up"]
    except (KeyError, TypeError, ValueError) as error:
        raise strange(admin, 200) from error
    raise SystemExit(0 if up else 1)


def _status(admin: str, state: Row) -> Iterator[str]:
    yield f"smetric {state['version']} at {admin}: {state['up']} of {len(state['instances'])} instances up"
    for policy in state["policies"]:
        kept = "" if policy["kept_because"] is None else "; its file cannot be used (see `smetric policies`)"
        yield f"policy {policy['route']}: {policy['name']}@{policy['hash']}, generation {policy['generation']}{kept}"
    hits = state["actual"], state["predicted"]
    yield (
        f"last 10 s: {state['rate']:.1f} requests/s; TTFT P50 {_ms(state['ttft_p50_s'])}, P99 "
        f"{_ms(state['ttft_p99_s'])}; imbalance {_number(state['imbalance'])}; cached {_percent(hits[0])}, predicted "
        f"{_percent(hits[1])}"
    )
    for name, agreeing in state["shadows"].items():
        yield f"  in shadow, {name} agrees on {_percent(agreeing)}"
    for outcome, share in state["outcomes"].items():
        if outcome != "routed":
            yield f"  {outcome}: {_percent(share)}"
    yield ""
    yield from table(
        ("instance", "state", "requests", "running", "waiting", "KV use", "hit rate", "load age"),
        (
            (
                one["id"],
                one["state"],
                _number(one["requests"]),
                _number(one["running"]),
                _number(one["waiting"]),
                _percent(one["kv_usage"]),
                _percent(one["hit_rate"]),
                "–" if one["age_s"] is None else f"{one['age_s']:.1f} s",
            )
            for one in state["instances"]
        ),
    )


@click.command()
@click.option(
    "-n", "count", metavar="N", type=click.IntRange(1, 1000), default=20, show_default=True, help="The last N."
)
@click.option("-f", "--follow", "follows", is_flag=True, help="Go on with new ones until Ctrl-C.")
@format_option(("text", "json"), help="json: a line for each decision.")
@admin_option
def decisions(count: int, follows: bool, form: str, admin: str) -> None:
    """List the last decisions of a running router, the newest at the end.

    \b
    smetric decisions -n 5
    smetric decisions -f

    `smetric explain --decision ID` explains one, `smetric explain --last` the newest. A router that decides faster
    than a terminal can show sends a sample with -f; the number of the others is printed.
    """
    try:
        rows = _asked(admin, f"/admin/decisions?limit={count}")["decisions"]
        for row in reversed(rows):
            click.echo(_line(row, form))
        if follows:
            newest = rows[0]["id"] if rows else ""  # ids rise with time
            for event, data in follow(admin, "/admin/decisions/stream?history=0"):
                if event == "decisions":
                    for row in data["rows"]:
                        if row["id"] > newest:
                            click.echo(_line(row, form))
                    if left_out := data["matched"] - len(data["rows"]):
                        click.echo(f"… and {left_out} more", err=True)
    except (KeyError, TypeError, ValueError) as error:
        raise strange(admin, 200) from error


def _line(row: Row, form: str) -> str:
    if form == "json":
        return json.dumps(row, ensure_ascii=False)
    name = row["policy"].partition("@")[0] if row["policy"] else "–"
    route = "" if row["route"] in (None, "default") else f" of {row['route']}"
    ended = "" if row["status"] is None else f"  {row['status']} after {_ms(row['ttft_s'])}"
    return (
        f"{row['time'][11:23]}  {row['id']}  {row['instance'] or row['outcome']}  {row['rule'] or '–'}  {name}{route}  "
        f"turn {_number(row['turn'])}, {_number(row['prompt_len'])} tokens{ended}"
    )


@click.command()
@click.option("--shipped", is_flag=True, help="List the shipped policies instead; no router is asked.")
@format_option(("text", "json"))
@admin_option
def policies(shipped: bool, form: str, admin: str) -> None:
    """List the policies of a running router with their generations, or the shipped ones.

    \b
    smetric policies
    smetric policies --shipped
    """
    if shipped:
        docs = {name: _sentence(path.read_text("utf-8")) for name, path in sorted(shipped_policies().items())}
        lines: Iterable[str] = (f"{name:<26} {doc}" for name, doc in docs.items())
        click.echo(json.dumps(docs, ensure_ascii=False, indent=2) if form == "json" else "\n".join(lines))
        return
    document = _asked(admin, "/admin/policies")
    try:
        text = "\n".join(line for policy in document["policies"] for line in _policy(policy))
    except (KeyError, TypeError, ValueError) as error:
        raise strange(admin, 200) from error
    click.echo(json.dumps(document, ensure_ascii=False, indent=2) if form == "json" else text)


def _sentence(text: str) -> str:
    file, _ = read(text, "")
    return " ".join(file.doc.split()).partition(". ")[0].rstrip(".") + "."


def _policy(policy: Row) -> Iterator[str]:
    share = "" if policy["share"] in {None, 1.0} else f", {policy['share']:.0%} of the conversations"
    role = "" if policy["acts"] else ", in shadow"
    yield f"{policy['name']}: {policy['policy']}@{policy['hash']} from {policy['path']}{role}{share}"
    matches = [f"{key} {', '.join(values)}" for key, values in policy["match"].items() if values]
    if matches:
        yield f"  for         {'; '.join(matches)}"
    if policy["params"]:
        params = (f"{name} = {_value(param['value'])}" for name, param in policy["params"].items())
        yield f"  parameters  {', '.join(params)}"
    if policy["kept_because"] is not None:
        yield f"  its file cannot be used: {policy['kept_because'].splitlines()[0]}"
    for generation in policy["generations"]:
        acted, since = f"{generation['policy']}@{generation['hash']}", generation["since"][:19].replace("T", " ")
        yield f"  generation  {generation['number']}: {acted} since {since}, by {generation['origin']}"


def _value(value: float | bool | str) -> str:
    """Return the value of a parameter as a policy has it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else f"{value:g}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table; columns behind the second are aligned to the right."""
    cells = [head, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for row in cells:
        shown = (
            f"{cell:<{width}}" if i < 2 else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(shown).rstrip()


def _asked(admin: str, path: str) -> dict[str, Any]:
    status, document = ask(admin, "GET", path)
    if status != 200:
        raise strange(admin, status)
    return document


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}" if value < 10_000 else f"{value:.0f}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1000:.0f} ms"
