"""What checks look at: the settings, what the instances said, and a router in this process that takes no requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from smetric.app import Application
from smetric.config.settings import CanarySettings, PeersSettings, Settings
from smetric.doctor.address import local_url
from smetric.doctor.engine import Engine, look
from smetric.doctor.wire import Wire
from smetric.errors import ConfigError
from smetric.policy import PolicyError
from smetric.resources import policy_path

#: Seconds the router in this process waits to have seen every instance.
FIRST_LOOK_S = 3.0


@dataclass(frozen=True, slots=True)
class Site:
    """A set-up under examination.

    Args:
        settings: as `smetric serve` would use them.
        wire: for exchanges.
        engines: the instances, as they answered.
        router: started as `smetric serve` would start it, with the same sources.
        policy_problem: why the configured policy cannot be used; the router has another one then.
        may_probe: whether requests may be sent that engines compute something for.
        may_wait: whether a check may wait for many seconds.
    """

    settings: Settings
    wire: Wire
    engines: Sequence[Engine]
    router: Application
    policy_problem: str
    may_probe: bool
    may_wait: bool

    @property
    def reachable(self) -> list[Engine]:
        """The instances that answer."""
        return [engine for engine in self.engines if not engine.problem]

    def first_of_each_model(self) -> list[tuple[str, Engine]]:
        """Every model, and an instance that serves it."""
        found: dict[str, Engine] = {}
        for engine in self.reachable:
            # What else it serves are names of the same model.
            for model in engine.models[:1]:
                found.setdefault(model, engine)
        return list(found.items())


@asynccontextmanager
async def visit(settings: Settings, *, may_probe: bool, may_wait: bool) -> AsyncIterator[Site]:
    """The site of *settings*, while it is entered.

    Raises:
        ConfigError: the settings cannot be used.
    """
    router, policy_problem = _router(settings)
    admin = settings.admin
    keys = {instance.url: instance.key for instance in router.fleet.instances if instance.key is not None}
    if router.admin_token is not None:
        keys[local_url(admin.host, admin.port)] = router.admin_token
    async with Wire(keys) as wire:
        await router.start()
        try:
            engines, _ = await asyncio.gather(
                asyncio.gather(*(look(wire, one, settings.scrape.timeout) for one in settings.instances)),
                router.knows.scraper.first_look(FIRST_LOOK_S),
            )
            yield Site(settings, wire, engines, router, policy_problem, may_probe, may_wait)
        finally:
            await router.stop()


def _router(settings: Settings) -> tuple[Application, str]:
    """A router that leaves no trace, and what is wrong with the configured policy.

    It neither reads nor writes what the running router keeps (its index, what is drained), tells its peers nothing, and
    sends no spans.
    """
    index = replace(settings.prefix_index, folder="")
    silent = replace(settings, prefix_index=index, peers=PeersSettings(), state_dir="")
    try:
        return Application(silent, environ={}), ""
    except PolicyError as error:
        problem = error.diagnostics[0].message if error.diagnostics else "it does not check"
        if error.path != str(policy_path(settings.policy)):  # that of a route, a canary or a shadow
            problem = f"{Path(error.path).name}: {problem}"
    try:
        return Application(
            replace(silent, policy="smetric", params={}, shadow=(), canary=CanarySettings(), routes=()), environ={}
        ), problem
    except PolicyError as error:
        raise ConfigError(f"the shipped policy smetric does not check: {error}") from error
