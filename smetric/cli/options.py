"""Options that several commands share: output formats, percentages, policy parameters and settings."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from smetric.config import Flagged
from smetric.config.load import RawTable, from_table, stack
from smetric.files import shipped_policies

F = TypeVar("F", bound=Callable[..., Any])

#: Settings by their option; a repeated option replaces the whole list.
_SETTINGS = {
    "--policy": "policy",
    "--instance": "instances",
    "--host": "listen.host",
    "--port": "listen.port",
    "--admin-port": "admin.port",
}

set_option = click.option(
    "--set", "params", metavar="PARAM=VALUE", multiple=True, help="A parameter of the policy; repeat it for more."
)


def format_option(forms: Iterable[str], help: str | None = None) -> Callable[[F], F]:
    """Return the option `--format`, passed as `form`, with the first of *forms* as default."""
    choices = list(forms)
    return click.option(
        "--format", "form", type=click.Choice(choices), default=choices[0], show_default=True, help=help
    )


class Percent(click.FloatRange):
    """Number from 0 to 100. NaN is rejected: it passes every comparison, and so every bound."""

    def __init__(self) -> None:
        super().__init__(0, 100)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; fail as click does."""
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a valid {self.name}.", param, ctx)
        return number


def settings_options(command: F) -> F:
    """Add the options that set settings; the command passes them to `settings_table`."""
    for option in (
        set_option,
        click.option("--admin-port", metavar="PORT", help="Port for metrics and administration, on loopback."),
        click.option("--port", metavar="PORT", help="Port for clients."),
        click.option("--host", metavar="ADDRESS", help="Address to listen on for clients."),
        click.option("--instance", metavar="URL", multiple=True, help="An instance; repeat it for more."),
        click.option("--policy", metavar="NAME|FILE", shell_complete=policy_names, help="A shipped policy, or a file."),
        click.option("--config", metavar="FILE", type=click.Path(path_type=Path), help="A YAML file of settings."),
    ):
        command = option(command)
    return command


def settings_table(config: Path | None, params: tuple[str, ...], **options: str | tuple[str, ...] | None) -> RawTable:
    """Return the settings of file, environment and options, with their places."""
    flags = [
        Flagged(option, name, value)
        for option, name in _SETTINGS.items()
        if (value := options[option.removeprefix("--").replace("-", "_")]) not in (None, ())
    ]
    return stack(config, os.environ, flags + _param_flags(params))


def param_values(params: tuple[str, ...]) -> Mapping[str, float | str | bool]:
    """Return values of a policy's parameters from options such as `--set OVERLOAD=3`."""
    return from_table(stack(None, {}, _param_flags(params))).params


def policy_names(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a shipped policy, or a file."""
    names = [CompletionItem(name) for name in shipped_policies() if name.startswith(incomplete)]
    return [*names, CompletionItem(incomplete, type="file")]


#: Styles of reports on a terminal: of a severity at the start of a line, a caret, a help, and signs.
_STYLES: tuple[tuple[re.Pattern[str], dict[str, Any]], ...] = (
    (re.compile(r"^(error|FAILED|fail)(?=[: ])", re.M), {"fg": "red", "bold": True}),
    (re.compile(r"^warning(?=:)", re.M), {"fg": "yellow", "bold": True}),
    (re.compile(r"(?<=\| )\s*\^+$|✗", re.M), {"fg": "red"}),
    (re.compile(r"^passed(?= )|✓", re.M), {"fg": "green"}),
    (re.compile(r"[→←]"), {"fg": "green", "bold": True}),
    (re.compile(r"= help(?=:)"), {"fg": "cyan"}),
)


def painted(text: str) -> str:
    """Return a report with colours; `click.echo` removes them where the output is not a terminal."""
    if os.environ.get("NO_COLOR"):
        return text
    for pattern, style in _STYLES:
        text = pattern.sub(lambda match, style=style: click.style(match[0], **style), text)  # type: ignore[misc]
    return text


def _param_flags(params: tuple[str, ...]) -> list[Flagged]:
    flags = []
    for param in params:
        name, equals, value = param.partition("=")
        if not equals or not name.isidentifier():
            raise click.BadParameter(f'expected PARAM=VALUE, such as OVERLOAD=3, got "{param}"', param_hint="--set")
        flags.append(Flagged("--set", f"params.{name}", value))
    return flags
