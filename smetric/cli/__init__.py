"""Command line `smetric COMMAND`: a module per group of commands, imported only when one of them is called.

Exit codes: 0 fine, 1 findings, 2 usage or configuration, 3 a server that does not answer, 130 Ctrl-C.
"""

from __future__ import annotations

import errno
import importlib
import io
import keyword
import os
import signal
import sys
from typing import Any

import click

from smetric import __version__
from smetric.errors import ConfigError, did_you_mean

#: Commands with their module in `smetric.cli` and the sentence that `smetric --help` prints.
COMMANDS = {
    "serve": ("serve", "Route requests to vLLM instances."),
    "demo": ("lab", "Play recorded agent sessions on emulated instances."),
    "init": ("configure", "Write a commented configuration, and a policy with its tests."),
    "status": ("watch", "Show a running router: its policies, its traffic and its instances."),
    "decisions": ("watch", "List the last decisions of a running router."),
    "policies": ("watch", "List the policies of a running router, or the shipped ones."),
    "check": ("policy", "Check policy files."),
    "test": ("policy", "Run the tests of policy files."),
    "fmt": ("policy", "Format policy files."),
    "bench": ("policy", "Measure the time of decisions."),
    "reference": ("policy", "Print the whole policy language."),
    "lsp": ("policy", "Run the language server for editors."),
    "replay": ("records", "Decide recorded decisions again, by the same or another policy."),
    "explain": ("explain", "Explain the decision of a policy on a snapshot, or one that was made."),
    "try": ("operate", "Try a policy on the last decisions of a running router."),
    "rollback": ("operate", "Go back to the policy before the last change."),
    "drain": ("operate", "Stop sending new requests to an instance."),
    "undrain": ("operate", "Send requests to a drained instance again."),
    "doctor": ("operate", "Find what is wrong with a live set-up, and how to repair it."),
    "emulate": ("lab", "Run emulated vLLM instances."),
    "config": ("configure", "Check or print the settings, or print their schema."),
}

#: Errors of writing the output. Click itself handles a closed pipe.
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


class _UsageError(click.ClickException):
    """ConfigError as click prints it: a line for it and for each further one."""

    exit_code = ConfigError.exit_code

    def __init__(self, *messages: object) -> None:
        super().__init__("\nError: ".join(map(str, messages)))


class _Commands(click.Group):
    """Command group that imports a command on use, and prints errors of the user in one line."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        open_standard_streams()
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            if error.filename is not None or error.errno not in _NO_ROOM:
                raise
            unwritten = _UsageError(f"cannot write the output: {error.strerror}")
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
            raise _UsageError(*error.all()) from error
        except KeyboardInterrupt:
            click.echo("\nInterrupted.", err=True)
            raise click.exceptions.Exit(128 + signal.SIGINT) from None


def open_standard_streams() -> None:
    """Open the null device for closed descriptors 0 to 2, and escape characters that an output cannot encode.

    Otherwise a connection would get the number of a closed descriptor, and its client the messages for standard error.
    This runs before any import that may open a file and keep it, as libffi does since 3.5.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - as long as the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")  # keeps ✓ and ✗ apart


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="smetric", message="%(prog)s %(version)s")
def main() -> None:
    """Route LLM requests to vLLM instances by a policy file, and leave a trace that says why."""
