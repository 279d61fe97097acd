"""`smetric serve`: the process, its two ports and signals; options that other commands share."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
import structlog
import uvloop

from smetric.app import Application
from smetric.config import Flagged, Settings
from smetric.config.load import RawTable, from_table, stack
from smetric.errors import ConfigError
from smetric.http.listener import (
    ADMIN,
    DATA,
    address_of,
    handed_over,
    listen,
    refuse_open_admin,
    refuse_self,
    serve_port,
)
from smetric.http.tls import Tls
from smetric.telemetry import logs

log = structlog.get_logger("smetric.serving")

#: Seconds that requests have to end after the drain deadline has cut them off.
CUT_OFF_S = 2.0
#: Exit codes after a second signal, and after a drain deadline that cut off requests; otherwise 0.
FORCED, CUT = 1, 4

F = TypeVar("F", bound=Callable[..., Any])
#: The setting of each option. A repeated option replaces the whole list.
_OPTIONS = {
    "--policy": "policy",
    "--instance": "instances",
    "--host": "listen.host",
    "--port": "listen.port",
    "--admin-port": "admin.port",
}


def run(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT, drain, and return the exit code. SIGHUP reads changed files again."""
    logs.configure(settings.log.level, settings.log.format)
    logging.captureWarnings(True)  # otherwise they are plain text in the log
    application = Application(settings)
    _freeze_garbage()
    given = handed_over(os.environ, os.getpid())
    data = given.get(DATA) or listen(settings.listen.host, settings.listen.port)
    admin = given.get(ADMIN) or listen(settings.admin.host, settings.admin.port)
    refuse_open_admin(admin, has_token=application.admin_token is not None)
    refuse_self([one.url for one in settings.instances], [data, admin])
    tls = Tls(settings.listen.cert_file, settings.listen.key_file) if settings.listen.cert_file else None

    def look() -> None:
        log.info("smetric.files.looked_at", reason="SIGHUP")
        application.policies.refresh()
        if tls is not None:
            tls.refresh()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, _at_hangup(runner.get_loop(), look):
        return runner.run(serve_ports(application, data, admin, tls, is_admin_shared=ADMIN in given))


@contextmanager
def _at_hangup(loop: asyncio.AbstractEventLoop, look: Callable[[], None]) -> Iterator[None]:
    """Call *look* in *loop* at each SIGHUP, also at one that was blocked until now.

    At the end all signals are ignored: without the loop's handlers they would change the exit code of a finished drain.
    """
    signal.signal(signal.SIGHUP, lambda *_: loop.call_soon_threadsafe(look))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])
    try:
        yield
    finally:
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)


def _freeze_garbage() -> None:
    """Exclude the objects of the start from garbage collection, and collect less often.

    They live as long as the process, and each full collection stopped all streams for tens of milliseconds. The last
    thousand decisions are objects too, which caused one every few hundred requests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 10)


class Shutdown:
    """SIGTERM and SIGINT: the first one drains the data port, the second one ends at once."""

    def __init__(self) -> None:
        self.draining = asyncio.Event()
        self.forced = asyncio.Event()

    def install(self) -> None:
        """Handle the signals in the running loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.signalled)

    def signalled(self) -> None:
        """Note a signal."""
        (self.forced if self.draining.is_set() else self.draining).set()


async def serve_ports(
    application: Application,
    data: socket.socket,
    admin: socket.socket,
    tls: Tls | None = None,
    *,
    is_admin_shared: bool = False,
) -> int:
    """Serve both ports until a signal and return the exit code.

    Args:
        application: the router.
        data: listening socket of the data port.
        admin: listening socket of the admin port, which is served until the data port has drained.
        tls: certificate of the data port; None for plain HTTP.
        is_admin_shared: another process listens on the admin socket too: leave it as soon as the drain begins.
    """
    settings = application.settings
    shutdown = Shutdown()
    shutdown.install()
    drained = asyncio.Event()

    async def until_draining() -> None:
        await shutdown.draining.wait()
        application.drain()
        log.info("smetric.draining", deadline_s=settings.drain.deadline)
        await asyncio.sleep(settings.drain.announce)

    async def at_deadline() -> None:
        await shutdown.draining.wait()
        await asyncio.sleep(settings.drain.announce + settings.drain.deadline)
        log.warning("smetric.cut_off", requests=application.under_way.cut_off())

    async def serve_admin() -> None:
        leave = shutdown.draining if is_admin_shared else drained
        await serve_port(application.admin_app(), admin, stop=leave.wait, drain_s=1.0)
        await drained.wait()

    policy = application.policy_file.current.policy
    log.info(
        "smetric.serving",
        data=address_of(data, "http" if tls is None else "https"),
        admin=address_of(admin),
        policy=f"{policy.name}@{policy.digest}",
        instances=len(application.fleet.instances),
    )
    admin_port = asyncio.create_task(serve_admin())
    data_port = asyncio.create_task(
        serve_port(
            application.data_app(), data, stop=until_draining, drain_s=settings.drain.deadline + CUT_OFF_S, tls=tls
        )
    )
    deadline = asyncio.create_task(at_deadline())
    forced = asyncio.create_task(shutdown.forced.wait())
    try:
        await asyncio.wait({data_port, admin_port, forced}, return_when=asyncio.FIRST_COMPLETED)
        if forced.done():
            data_port.cancel()
        for port in (data_port, admin_port):
            if port.done() and not port.cancelled() and (error := port.exception()) is not None:
                raise error
        if forced.done():
            return FORCED
        return CUT if application.under_way.cut else 0
    finally:
        shutdown.draining.set()  # the other port ends too if one fails
        drained.set()
        forced.cancel()
        deadline.cancel()
        await asyncio.gather(data_port, admin_port, deadline, forced, return_exceptions=True)
        log.info("smetric.stopped")


set_option = click.option(
    "--set", "params", metavar="PARAM=VALUE", multiple=True, help="A parameter of the policy; repeat it for more."
)


def settings_options(command: F) -> F:
    """Add the options of settings to a command, which passes them to `settings_table`."""
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


def settings_table(config: Path | None, params: tuple[str, ...], **options: str | tuple[str, ...] | None) -> RawTable:
    """Return the settings of file, environment and options, with their places."""
    flags = []
    for option, name in _OPTIONS.items():
        value = options[option.removeprefix("--").replace("-", "_")]
        if value not in (None, ()):
            flags.append(Flagged(option, name, value))
    flags += _param_flags(params)
    return stack(config, os.environ, flags)


def _param_flags(params: tuple[str, ...]) -> list[Flagged]:
    """Return the values of `--set` as flags."""
    flags = []
    for param in params:
        name, equals, value = param.partition("=")
        if not equals or not name.isidentifier():
            raise click.BadParameter(f'expected PARAM=VALUE, such as OVERLOAD=3, got "{param}"', param_hint="--set")
        flags.append(Flagged("--set", f"params.{name}", value))
    return flags


def param_values(params: tuple[str, ...]) -> Mapping[str, float | str | bool]:
    """Return the values of `--set` as parameters of a policy."""
    return from_table(stack(None, {}, _param_flags(params))).params


@click.command()
@settings_options
def serve(config: Path | None, params: tuple[str, ...], **options: str | tuple[str, ...] | None) -> None:
    """Route requests to vLLM instances until SIGTERM.

    Settings come from FILE, from SMETRIC_… variables and from these options; later ones win. SIGHUP reads policies and
    certificates again that have changed.

    \b
    smetric serve --policy smetric --instance http://127.0.0.1:9101 --instance http://127.0.0.1:9102
    smetric serve --config smetric.yaml --port 8080
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])  # it must not end the process before there is a handler
    settings = from_table(settings_table(config, params, **options))
    if not settings.instances:
        raise ConfigError(
            "no instances to route to: add --instance http://HOST:PORT, or `instances:` in the file of --config"
        )
    from smetric.policy import PolicyError

    try:
        code = run(settings)
    except PolicyError as error:
        click.echo(error, err=True)
        code = 1
    raise SystemExit(code)
