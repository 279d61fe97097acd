"""Commands about configuration files: `smetric config` and `smetric init`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click

from smetric.cli.options import settings_options, settings_table
from smetric.config import load

#: A key that YAML reads as itself without quotes.
_BARE_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*\Z")


@click.group()
def config() -> None:
    """Check or print the settings, or print their schema."""


@config.command("schema")
def print_schema() -> None:
    """Print the JSON Schema of a configuration file.

    Editors complete and check a file whose first line is `# yaml-language-server: $schema=PATH`.
    """
    click.echo(json.dumps(load.schema(), indent=2, ensure_ascii=False))


@config.command("check")
@click.argument("file", metavar="[FILE]", type=click.Path(path_type=Path), required=False)
@settings_options
def check(
    file: Path | None, config: Path | None, params: tuple[str, ...], **options: str | tuple[str, ...] | None
) -> None:
    """Do everything that `smetric serve` does with FILE and the same options, except for listening.

    Prints all errors, each with the line of the setting: settings, policies with their parameters, certificates,
    keys, tokenizers. Prints nothing and ends with 0 if `smetric serve` would start; otherwise ends as that would: 2 if
    a setting cannot be used, 1 if a policy does not check. Warnings leave it at 0. No instance is asked; `smetric
    doctor` does that.

    \b
    smetric config check smetric.yaml
    smetric config check smetric.yaml --policy ./candidate.policy --set OVERLOAD=3
    """
    from smetric.doctor.start import rehearse
    from smetric.telemetry import logs

    if file is not None and config is not None:
        raise click.UsageError("FILE and --config name the same file; give one of them")
    table = settings_table(file or config, params, **options)
    logs.configure("critical")
    problems = rehearse(load.from_table(table), partial(load.set_at, table)).problems
    for problem in problems:
        click.echo(f"{problem}\n" if "\n" in problem.text else problem, err=True)
    raise SystemExit(max((problem.exit_code for problem in problems), default=0))


@config.command("show")
@click.option("--origin", is_flag=True, help="Print the origin of each value.")
@settings_options
def show(origin: bool, config: Path | None, params: tuple[str, ...], **options: str | tuple[str, ...] | None) -> None:
    """Print the settings in force, as YAML: what `smetric serve` would use with the same options."""
    table = settings_table(config, params, **options)
    shown = load.show(load.from_table(table))
    rows = [(text, load.place_of(table, path) if path else "") for text, path in _rows(shown, (), "")]
    width = min(60, max(len(text) for text, _ in rows))
    for text, place in rows:
        click.echo(f"{text:{width}}  # {place}" if origin and place else text)


def _rows(value: Any, path: tuple[str | int, ...], indent: str) -> Iterator[tuple[str, tuple[str | int, ...]]]:
    """Yield lines of YAML with the path of their value; a line that opens a block has none."""
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield f"{indent}- {_flow(item)}", (*path, i)
        return
    for key, item in value.items():
        head = indent + (key if _BARE_KEY.match(key) else json.dumps(key, ensure_ascii=False)) + ":"
        if isinstance(item, dict | list) and item:
            yield head, ()
            yield from _rows(item, (*path, key), indent + "  ")
        else:
            yield f"{head} {_flow(item)}", (*path, key)


def _flow(value: Any) -> str:
    """Return a value in one line; a dollar sign is doubled, as a configuration file has it."""
    return json.dumps(value, ensure_ascii=False).replace("$", "$$")
