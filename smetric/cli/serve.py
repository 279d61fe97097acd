"""`smetric serve`: run the router on its two ports until a signal, and drain it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import structlog
import uvloop

from smetric.app import Application
from smetric.cli.options import settings_options, settings_table
from smetric.config import Settings
from smetric.config.load import from_table
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
from smetric.policy import PolicyError
from smetric.routing.policies import lacks_load_floor
from smetric.telemetry import logs

#: Seconds that requests have to end after they are cut off; then the server drops their connections.
CUT_OFF_S = 2.0
#: Exit codes after a signal: ended at once, or with requests cut off; 0 if every request ended by itself.
FORCED, CUT = 1, 4

log = structlog.get_logger("smetric.serving")


@click.command()
@settings_options
def serve(config: Path | None, params: tuple[str, ...], **options: str | tuple[str, ...] | None) -> None:
    """Route requests to vLLM instances until SIGTERM.

    Settings come from FILE, from SMETRIC_… variables and from these options; the later win. SIGHUP reloads changed
    policies and certificates.

    \b
    smetric serve --policy smetric --instance http://127.0.0.1:9101 --instance http://127.0.0.1:9102
    smetric serve --config smetric.yaml --port 8080
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])  # it must not end the process before it has a handler
    settings = from_table(settings_table(config, params, **options))
    if not settings.instances:
        raise ConfigError(
            "no instances to route to: add --instance http://HOST:PORT, or `instances:` in the file of --config"
        )
    try:
        code = run(settings)
    except PolicyError as error:
        click.echo(error, err=True)
        code = 1
    raise SystemExit(code)


def run(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT, drain, and return the exit code. SIGHUP reloads changed files."""
    logs.configure(settings.log.level, settings.log.format)
    logging.captureWarnings(True)  # otherwise they are plain text between the lines of the log
    application = Application(settings)
    for _, arm in application.routes.acting():
        if lacks_load_floor(arm.file.current.policy, len(settings.instances)):
            log.info("smetric.policy.no_load_floor", route=arm.file.name, policy=arm.file.current.policy.name)
    # What start-up made lives as long as the process. A collection of it would stop every stream for tens of
    # milliseconds, every few hundred requests, because the last decisions are kept as objects.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 10)
    given = handed_over(os.environ, os.getpid())
    data = given.get(DATA) or listen(settings.listen.host, settings.listen.port)
    admin = given.get(ADMIN) or listen(settings.admin.host, settings.admin.port)
    refuse_open_admin(admin.getsockname()[0], has_token=application.admin_token is not None)
    refuse_self([one.url for one in settings.instances], [one.getsockname()[:2] for one in (data, admin)])
    tls = Tls(settings.listen.cert_file, settings.listen.key_file) if settings.listen.cert_file else None

    def reload() -> None:
        log.info("smetric.files.looked_at", reason="SIGHUP")
        application.policies.refresh()
        if tls is not None:
            tls.refresh()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, _at_hangup(runner.get_loop(), reload):
        return runner.run(serve_ports(application, data, admin, tls, is_admin_shared=ADMIN in given))


@contextmanager
def _at_hangup(loop: asyncio.AbstractEventLoop, reload: Callable[[], None]) -> Iterator[None]:
    """Call *reload* in *loop* at each SIGHUP, also at one that came while it was blocked.

    Afterwards all signals are ignored: the loop's handlers are gone, and a signal would replace the exit code.
    """
    signal.signal(signal.SIGHUP, lambda *_: loop.call_soon_threadsafe(reload))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])
    try:
        yield
    finally:
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)


class Shutdown:
    """Handler of SIGTERM and SIGINT: the first one drains the data port, the second one ends at once."""

    def __init__(self) -> None:
        self.draining = asyncio.Event()
        self.forced = asyncio.Event()

    def signalled(self) -> None:
        """Count a signal."""
        (self.forced if self.draining.is_set() else self.draining).set()


async def serve_ports(
    application: Application,
    data: socket.socket,
    admin: socket.socket,
    tls: Tls | None = None,
    *,
    is_admin_shared: bool = False,
) -> int:
    """Serve both ports until a signal, and return the exit code.

    Args:
        application: its settings hold the deadlines.
        data: listening socket for clients.
        admin: listening socket of the admin port, which stays up while the data port drains.
        tls: certificate of the data port; None for plain HTTP.
        is_admin_shared: whether the next process has the admin socket, too; then this one leaves it at once.
    """
    settings, shutdown, drained = application.settings, Shutdown(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, shutdown.signalled)

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

    async def serve_data() -> None:
        drain_s = settings.drain.deadline + CUT_OFF_S
        await serve_port(application.data_app(), data, stop=until_draining, drain_s=drain_s, tls=tls)

    policy = application.policy_file.current.policy
    log.info(
        "smetric.serving",
        data=address_of(data, "http" if tls is None else "https"),
        admin=address_of(admin),
        policy=f"{policy.name}@{policy.digest}",
        instances=len(application.fleet.instances),
    )
    admin_port, data_port, deadline, forced = tasks = [
        asyncio.create_task(part) for part in (serve_admin(), serve_data(), at_deadline(), shutdown.forced.wait())
    ]
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
        shutdown.draining.set()  # a port that failed ends the other
        drained.set()
        forced.cancel()
        deadline.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        log.info("smetric.stopped")
