"""`smetric config`: the settings in force and where each comes from, and the schema of a configuration file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from smetric.cli.settings_options import settings_options, settings_table
from smetric.config.layers import place_of
from smetric.config.whole import SETTINGS, from_table, schema

#: A key, or a value, that YAML reads as itself without quotes.
_BARE_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*\Z")


@click.group()
def config() -> None:
    """Print the settings or their schema."""


@config.command("schema")
def print_schema() -> None:
    """Print the JSON Schema of a configuration file.

    Editors complete and check a file whose first line is `# yaml-language-server: $schema=PATH`.
    """
    click.echo(json.dumps(schema(), indent=2, ensure_ascii=False))


@config.command("show")
@click.option("--origin", is_flag=True, help="Say of each value where it comes from.")
@settings_options
def show(origin: bool, config: Path | None, params: tuple[str, ...], **options: str | tuple[str, ...] | None) -> None:
    """Print the settings in force, as YAML.

    They are those that `smetric serve` would use with the same options.
    """
    table = settings_table(config, params, **options)
    shown = SETTINGS.show(from_table(table))
    rows = [(text, place_of(table, path) if path else "") for text, path in _rows(shown, (), "")]
    width = min(60, max(len(text) for text, _ in rows))
    for text, place in rows:
        click.echo(f"{text:{width}}  # {place}" if origin and place else text)


def _rows(value: Any, path: tuple[str | int, ...], indent: str) -> Iterator[tuple[str, tuple[str | int, ...]]]:
    """Lines of YAML; those that carry a value with its path, those that only open a block with none."""
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
    """A value; in a file, a dollar sign that is one is doubled."""
    return json.dumps(value, ensure_ascii=False).replace("$", "$$")
