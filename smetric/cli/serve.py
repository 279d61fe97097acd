"""`smetric serve`: run the router."""

from __future__ import annotations

import signal
from pathlib import Path

import click

from smetric.cli.settings_options import settings_options, settings_table
from smetric.config.whole import from_table
from smetric.errors import ConfigError


@click.command()
@settings_options
def serve(config: Path | None, params: tuple[str, ...], **options: str | tuple[str, ...] | None) -> None:
    """Route requests to vLLM instances until SIGTERM.

    Settings come from FILE, from SMETRIC_… variables and from these options; the later win. SIGHUP has policies and
    certificates that have changed read again.

    \b
    smetric serve --policy smetric --instance http://127.0.0.1:9101 --instance http://127.0.0.1:9102
    smetric serve --config smetric.yaml --port 8080
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])  # no reason to end; it is answered when we serve
    settings = from_table(settings_table(config, params, **options))
    if not settings.instances:
        raise ConfigError(
            "no instances to route to: add --instance http://HOST:PORT, or `instances:` in the file of --config"
        )
    from smetric.policy import PolicyError
    from smetric.serving import run

    try:
        code = run(settings)
    except PolicyError as error:
        click.echo(error, err=True)
        code = 1
    raise SystemExit(code)
