"""`smetric rollback`: let the policy act again that acted before the last change."""

from __future__ import annotations

import click

from smetric.cli.admin_port import admin_option, ask, segment, strange


@click.command()
@click.argument("name", metavar="[NAME]", default="default")
@click.option(
    "--to", "generation", metavar="N", type=click.IntRange(1), help="A certain generation, not the one before."
)
@admin_option
def rollback(name: str, generation: int | None, admin: str) -> None:
    """Let the policy of route NAME act again that acted before its file changed, at once.

    The file is not written: it acts again when it changes, and when the router starts. GET /admin/policies lists the
    names, and the last ten generations of each.

    \b
    smetric rollback
    smetric rollback coder --to 3 --admin http://10.0.0.5:9464
    """
    document = {} if generation is None else {"generation": generation}
    status, answer = ask(admin, "POST", f"/admin/policies/{segment(name)}/rollback", document)
    if status != 200:
        raise click.ClickException(answer["error"])
    try:
        acting = answer["generations"][-1]
        click.echo(
            f"{answer['name']}: {acting['policy']}@{acting['hash']} acts again, that of generation {acting['of']}, as "
            f"generation {acting['number']}, until {answer['path']} changes"
        )
    except (KeyError, IndexError, TypeError) as error:
        raise strange(admin, status) from error
