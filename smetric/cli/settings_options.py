"""The options that change settings, shared by the commands that read a configuration."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from smetric.config import Flagged
from smetric.config.layers import stack
from smetric.config.raw import Table
from smetric.config.whole import SETTINGS, from_table

F = TypeVar("F", bound=Callable[..., Any])

#: Option to the setting it sets; repeated options replace the whole list.
_OPTIONS = {
    "--policy": "policy",
    "--instance": "instances",
    "--host": "listen.host",
    "--port": "listen.port",
    "--admin-port": "admin.port",
}

set_option = click.option(
    "--set", "params", metavar="PARAM=VALUE", multiple=True, help="A parameter of the policy; repeat it for more."
)


def settings_options(command: F) -> F:
    """Adds the options; the command gets them as keyword arguments and hands them to `settings_table`."""
    for option in reversed(
        (
            click.option("--config", metavar="FILE", type=click.Path(path_type=Path), help="A YAML file of settings."),
            click.option("--policy", metavar="NAME|FILE", help="A shipped policy, or a policy file."),
            click.option("--instance", metavar="URL", multiple=True, help="An instance; repeat it for more."),
            click.option("--host", metavar="ADDRESS", help="Where to listen for clients."),
            click.option("--port", metavar="PORT", help="Port for clients."),
            click.option("--admin-port", metavar="PORT", help="Port for metrics and administration, on loopback."),
            set_option,
        )
    ):
        command = option(command)
    return command


def settings_table(config: Path | None, params: tuple[str, ...], **options: str | tuple[str, ...] | None) -> Table:
    """Everything set by file, environment and options, with its places."""
    flags = []
    for option, name in _OPTIONS.items():
        value = options[option.removeprefix("--").replace("-", "_")]
        if value not in (None, ()):
            flags.append(Flagged(option, name, value))
    flags += _param_flags(params)
    return stack(config, os.environ, flags, SETTINGS)


def _param_flags(params: tuple[str, ...]) -> list[Flagged]:
    """`--set OVERLOAD=3` as flags."""
    flags = []
    for param in params:
        name, equals, value = param.partition("=")
        if not equals or not name.isidentifier():
            raise click.BadParameter(f'expected PARAM=VALUE, such as OVERLOAD=3, got "{param}"', param_hint="--set")
        flags.append(Flagged("--set", f"params.{name}", value))
    return flags


def param_values(params: tuple[str, ...]) -> Mapping[str, float | str | bool]:
    """`--set OVERLOAD=3` as values for a policy's parameters."""
    return from_table(stack(None, {}, _param_flags(params), SETTINGS)).params
