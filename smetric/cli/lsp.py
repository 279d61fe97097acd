"""`smetric lsp`: the language server for editors."""

from __future__ import annotations

import click

from smetric.errors import ConfigError


@click.command()
@click.option("--stdio", is_flag=True, expose_value=False, help="What many clients append; there is no other way.")
def lsp() -> None:
    """Serve an editor on standard input and output: errors, hovers, completion and layout of policies.

    Editors start it by themselves: see docs/guide/editors.md.
    """
    try:
        from smetric.lsp.server import server
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"smetric lsp needs a package that is not installed ({error.name}): pip install 'smetric-router[lsp]'"
        ) from error
    server.start_io()
