"""Commands about configuration files: `smetric config` and `smetric init`."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click

from smetric.cli.options import settings_options, settings_table
from smetric.config import load
from smetric.errors import ConfigError
from smetric.files import shipped_policies

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

    Prints all errors of the settings, each with its line; if there are none, all errors of policies with their
    parameters, certificates, keys and tokenizers, each with the line of its setting. Prints nothing and ends with 0 if
    `smetric serve` would start; otherwise ends as that would: 2 if a setting cannot be used, 1 if a policy does not
    check. Warnings leave it at 0. No instance is asked; `smetric doctor` does that.

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


@click.command()
@click.argument("folder", metavar="[FOLDER]", type=click.Path(path_type=Path, file_okay=False), default=Path())
@click.option("--instance", "instances", metavar="URL", multiple=True, help="An instance; repeat it for more.")
def init(folder: Path, instances: tuple[str, ...]) -> None:
    """Write a commented smetric.yaml, and a policy with its tests, into FOLDER; by default into this one.

    Existing files stay as they are: then nothing is written, and the exit code is 2.

    \b
    smetric init
    smetric init router --instance http://10.0.0.7:8000 --instance http://10.0.0.8:8000
    """
    urls = instances or ("http://127.0.0.1:9101", "http://127.0.0.1:9102")
    settings = _SETTINGS.format(instances="\n".join(f"  - {url}" for url in urls))
    policy_text = shipped_policies()["smetric"].read_text("utf-8").replace("policy smetric\n", "policy mine\n")
    files = {folder / "smetric.yaml": settings, folder / "mine.policy": policy_text}
    load.from_table(load.stack(None, {}, [load.Flagged("--instance", "instances", urls)]))
    for path in files:
        if path.exists():
            raise ConfigError(f"{path}: exists already; name another folder, or move it away")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            path.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be written: {error.strerror}") from error
    yaml, policy = (shlex.quote(str(path)) for path in files)
    click.echo(f"wrote {yaml} and {policy}\n\nsmetric test {policy}")
    if not instances:
        click.echo("smetric emulate --instances 2 --port 9101     # in a terminal of its own, unless you have engines")
    click.echo(f"smetric config check {yaml}\nsmetric serve --config {yaml}")


_SETTINGS = """\
# Settings of the router. All that can be set: docs/reference/configuration.md, or `smetric config show`.
# `smetric config check` of this file finds mistakes in it and in its policies, each with its line.

# Your vLLM servers, by their base URLs.
instances:
{instances}

# The policy that picks the instance of each request: a copy of `smetric`, with its tests. It is read again whenever it
# changes. `smetric policies --shipped` lists others, such as lmetric or load_only.
policy: ./mine.policy
params: {{FLOOR: 2}}     # up to 2 requests are no overload, however idle the others are

# Where clients connect, and where operators do. Beyond this machine the admin port needs a token.
# listen: {{host: 0.0.0.0, port: 8080}}
# admin: {{host: 127.0.0.1, port: 9464, token_file: admin.token}}

# Other names for a model: what clients send, and what is sent on.
# models: {{gpt-4o: my-model}}

# A policy that is evaluated beside this one and never followed; `smetric status` shows how often they agree.
# shadow: [load_only]

# A line for each decision, for `smetric replay` and `smetric explain --record`.
# record: decisions.jsonl
"""
