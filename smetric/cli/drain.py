"""`smetric drain`: send an instance nothing new."""

from __future__ import annotations

import click

from smetric.cli.admin_port import admin_option, change_instance


@click.command()
@click.argument("instance", metavar="INSTANCE")
@admin_option
def drain(instance: str, admin: str) -> None:
    """Let a running router send INSTANCE nothing new; requests under way end in their own time.

    \b
    smetric drain gpu-7
    smetric drain gpu-7 --admin http://10.0.0.5:9464
    """
    answer = change_instance(admin, instance, "drain")
    under_way = answer["requests"]
    click.echo(f"{instance} gets nothing new; requests under way there: {under_way}")
    if not answer["others"]:
        click.echo("no other instance is left: requests are answered 503", err=True)
    if not answer["kept"]:
        click.echo(f"not kept over a restart of the router: {answer['not_kept_because']}", err=True)
