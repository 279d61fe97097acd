"""`smetric reference`: the policy language on a few pages."""

from __future__ import annotations

import click

from smetric.reference import FORMATS


@click.command()
@click.option("--format", "form", type=click.Choice(list(FORMATS)), default="text", show_default=True)
def reference(form: str) -> None:
    """Print the whole policy language, its built-ins and features, for people and language models.

    \b
    smetric reference --format markdown > reference.md
    """
    click.echo(FORMATS[form]())
