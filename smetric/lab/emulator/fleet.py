"""Fleet of emulated instances that listen on ports."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from types import TracebackType
from typing import Self, cast

from hypercorn.asyncio import serve
from hypercorn.config import Config
from hypercorn.typing import ASGIFramework

from smetric.http.listener import listen
from smetric.lab.emulator.instance import EmulatedInstance, EmulatedSettings
from smetric.lab.emulator.lmcache import EmulatedLmcache
from smetric.lab.emulator.server import EmulatedServer

#: Timeout of idle connections, as in uvicorn.
KEEP_ALIVE_S = 5
#: Time to end open responses at shutdown.
GRACE_S = 3.0


class EmulatedFleet:
    """Emulated instances of equal settings; they listen inside `async with`.

    Args:
        count: number of instances.
        settings: of each instance.
        host: address to listen on.
        port: of the first instance, the others follow; 0 takes free ports.
        lmcache: also serve LMCache's lookups, on the port after the last instance's; its instance ids are host:port.
    """

    def __init__(
        self,
        count: int = 1,
        settings: EmulatedSettings | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        lmcache: bool = False,
    ) -> None:
        if count < 1:
            raise ValueError(f"count is {count}: a fleet has at least 1 instance")
        self.instances = [EmulatedInstance(settings) for _ in range(count)]
        #: URL of each instance; empty while they do not listen.
        self.urls: list[str] = []
        #: URL of LMCache's coordinator and controller; empty while they do not listen.
        self.lmcache_url = ""
        self._lmcache = lmcache
        self._host = host
        self._port = port
        self._stopping = asyncio.Event()
        self._servers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Listen.

        Raises:
            ConfigError: a port is taken, or the address belongs to another machine.
        """
        ports = [self._port + offset if self._port else 0 for offset in range(len(self.instances) + self._lmcache)]
        with ExitStack() as opened:  # closes the first sockets if a further port is taken
            listeners = [opened.enter_context(listen(self._host, port)) for port in ports]
            opened.pop_all()
        shown = f"[{self._host}]" if ":" in self._host else self._host
        addresses = [f"{shown}:{listener.getsockname()[1]}" for listener in listeners]
        count = len(self.instances)
        self.urls = [f"http://{address}" for address in addresses[:count]]
        apps: list[object] = [EmulatedServer(instance) for instance in self.instances]
        if self._lmcache:
            self.lmcache_url = f"http://{addresses[count]}"
            apps.append(EmulatedLmcache(list(zip(addresses[:count], self.instances, strict=True))))
        for app, listener in zip(apps, listeners, strict=True):
            config = _config(listener.detach())
            server = serve(cast(ASGIFramework, app), config, shutdown_trigger=self._stopping.wait, mode="asgi")
            self._servers.append(asyncio.create_task(server))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abort all requests, as vLLM does on SIGTERM, and stop listening."""
        for instance in self.instances:
            instance.abort_all()
        self._stopping.set()
        await asyncio.gather(*self._servers)
        self._servers.clear()
        self.urls.clear()
        self.lmcache_url = ""

    def reset(self) -> None:
        """Restart every instance: empty caches, new counters, new start times."""
        for instance in self.instances:
            instance.reset()


def _config(descriptor: int) -> Config:
    config = Config()
    config.bind = [f"fd://{descriptor}"]
    config.accesslog = None
    config.errorlog = None
    config.include_server_header = False
    config.keep_alive_timeout = KEEP_ALIVE_S
    config.keep_alive_max_requests = 1 << 31
    config.graceful_timeout = GRACE_S
    config.backlog = 1024
    return config
