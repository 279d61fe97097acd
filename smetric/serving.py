"""Serves an application's two ports until it is told to end, drains, and says how it went.

What the ports serve is put together in `smetric.app`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog
import uvloop

from smetric.app import Application
from smetric.config import Settings
from smetric.proxy.exposure import refuse_open_admin, refuse_self
from smetric.proxy.server import Shutdown, address_of, listen, serve
from smetric.proxy.supervisor import ADMIN, DATA, handed_over
from smetric.proxy.tls import Tls
from smetric.telemetry import logs

#: Seconds that requests which are cut off have to end before the server drops their connections.
CUT_OFF_S = 2.0
#: Exit codes of a router that was told to end; 0 when every request ended by itself.
FORCED, CUT = 1, 4

log = structlog.get_logger("smetric.serving")


def run(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT, drain, and return the exit code. SIGHUP has changed files read again."""
    logs.configure(settings.log.level, settings.log.format)
    logging.captureWarnings(True)  # or they stand in the log as plain text
    application = Application(settings)
    _spare_the_collector()
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
    """Have *loop* call *look* at each SIGHUP, also at one that came while it was blocked.

    In the end no signal counts any more: the loop's own handlers go with it, and a process that has done all it had to
    would end as if it had not.
    """
    signal.signal(signal.SIGHUP, lambda *_: loop.call_soon_threadsafe(look))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])
    try:
        yield
    finally:
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)


def _spare_the_collector() -> None:
    """Let the garbage collector pass over what start-up made, and come less often.

    All of it lives as long as the process. Walking it stopped every stream for tens of milliseconds; the last thousand
    decisions, which are kept as objects, made that happen every few hundred requests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 10)


async def serve_ports(
    application: Application,
    data: socket.socket,
    admin: socket.socket,
    tls: Tls | None = None,
    *,
    is_admin_shared: bool = False,
) -> int:
    """Both ports, the data port by *tls* if given, until a signal; returns the exit code.

    The admin port stays up while the data port drains, unless its socket is shared: then the next process has it.
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
        await serve(application.admin_app(), admin, stop=leave.wait, drain_s=1.0)
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
        serve(application.data_app(), data, stop=until_draining, drain_s=settings.drain.deadline + CUT_OFF_S, tls=tls)
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
        shutdown.draining.set()  # where one port fails, the other has to end, too
        drained.set()
        forced.cancel()
        deadline.cancel()
        await asyncio.gather(data_port, admin_port, deadline, forced, return_exceptions=True)
        log.info("smetric.stopped")
