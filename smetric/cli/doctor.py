"""`smetric doctor`: what is wrong with a live set-up, and how to mend it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import click

from smetric.cli.settings_options import settings_options, settings_table
from smetric.config.whole import from_table
from smetric.doctor.examination import examine
from smetric.doctor.report import as_json, as_text
from smetric.errors import ConfigError
from smetric.telemetry import logs


@click.command()
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--no-probe", is_flag=True, help="Send nothing that engines compute: no prompts, so no proof of hits.")
@click.option("--slow", is_flag=True, help="Measure how long instances keep idle connections, too: some seconds more.")
@settings_options
def doctor(
    form: str,
    no_probe: bool,
    slow: bool,
    config: Path | None,
    params: tuple[str, ...],
    **options: str | tuple[str, ...] | None,
) -> None:
    """Examine the engines, sources and routers of a configuration, and say how to mend what is wrong.

    Run it where the router runs, with the same options as `smetric serve`, beside it or in its place. Ends with 0 if
    there is nothing worse than an info, 1 for errors and warnings, 2 if the settings cannot be used,
    3 if no instance answers.
    """
    settings = from_table(settings_table(config, params, **options))
    if not settings.instances:
        raise ConfigError("no instances to examine: add `instances:` in the file of --config, or --instance URL")
    # What sources log of troubles on the way is found by the checks, with a remedy.
    logs.configure("critical")
    examination = asyncio.run(examine(settings, may_probe=not no_probe, may_wait=slow))
    if form == "json":
        click.echo(json.dumps(as_json(examination), indent=2, ensure_ascii=False))
    else:
        click.echo(as_text(examination))
    raise SystemExit(examination.exit_code)
