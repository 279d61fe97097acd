"""`smetric undrain`: let an instance be a candidate again."""

from __future__ import annotations

import click

from smetric.cli.admin_port import admin_option, change_instance


@click.command()
@click.argument("instance", metavar="INSTANCE")
@admin_option
def undrain(instance: str, admin: str) -> None:
    """Let a running router send INSTANCE requests again, slowly at first.

    \b
    smetric undrain gpu-7
    """
    answer = change_instance(admin, instance, "undrain")
    click.echo(f"{instance} is no longer drained; its state: {answer['state']}")
    if not answer["kept"]:
        click.echo(f"not kept over a restart of the router: {answer['not_kept_because']}", err=True)
