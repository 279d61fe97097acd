"""The command line: `smetric COMMAND`, a module per group of commands, loaded only when one of them is called.

Exit codes: 0 fine, 1 findings, 2 usage or configuration, 3 a server that does not answer, 130 Ctrl-C.
"""

from __future__ import annotations

import errno
import importlib
import keyword
import signal
import sys
from typing import Any

import click

from smetric import __version__
from smetric.cli.standard_streams import have_standard_streams
from smetric.errors import ConfigError

#: Command to its module in `smetric.cli`, loaded only when it is called, and the sentence that `smetric --help` prints.
COMMANDS = {
    "serve": ("serve", "Route requests to vLLM instances."),
    "demo": ("lab", "Play recorded agent sessions on emulated instances."),
    "check": ("policy", "Check policy files."),
    "test": ("policy", "Run the tests of policy files."),
    "fmt": ("policy", "Lay policy files out canonically."),
    "bench": ("policy", "Measure what decisions cost."),
    "reference": ("policy", "Print the whole policy language."),
    "lsp": ("policy", "Serve an editor: errors, hovers, completion, layout."),
    "replay": ("records", "Make recorded decisions again, by another policy or their own."),
    "explain": ("explain", "Say how a policy decides, or why it decided."),
    "try": ("operate", "Try a policy on the last decisions of a running router."),
    "rollback": ("operate", "Let the policy act again that acted before."),
    "drain": ("operate", "Send an instance nothing new."),
    "undrain": ("operate", "Let an instance be a candidate again."),
    "doctor": ("operate", "Say what is wrong with a live set-up, and how to mend it."),
    "emulate": ("lab", "Run emulated vLLM instances."),
    "config": ("operate", "Print the settings or their schema."),
}


#: Why what is printed cannot be written; that nobody reads it any more is click's to handle.
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


class _BadConfig(click.ClickException):
    """A ConfigError as click prints it."""

    exit_code = ConfigError.exit_code


class _Commands(click.Group):
    """Imports a command when it is asked for, and turns what is no fault of its own into one line."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        have_standard_streams()
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            if error.filename is not None or error.errno not in _NO_ROOM:
                raise
            unwritten = _BadConfig(f"cannot write the output: {error.strerror}")
            unwritten.show()
            sys.exit(unwritten.exit_code)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _ = COMMANDS[cmd_name]
        # `try` is a keyword of Python: its function has a trailing underscore.
        name = f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name
        command = getattr(importlib.import_module(f"smetric.cli.{module}"), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from smetric.errors import did_you_mean

            meant = "" if args[0].startswith("-") else did_you_mean(args[0], COMMANDS)
            if not meant:
                raise
            raise click.UsageError(error.message.rstrip(".") + meant, ctx) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, sentence) for name, (_, sentence) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            raise _BadConfig(str(error)) from error
        except KeyboardInterrupt:
            click.echo("\nInterrupted.", err=True)
            raise click.exceptions.Exit(128 + signal.SIGINT) from None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="smetric", message="%(prog)s %(version)s")
def main() -> None:
    """Route LLM requests to vLLM instances by a policy file, and leave a trace that says why."""
