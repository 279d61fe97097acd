"""All policies of a router: acting, in shadow or observed; watched, and the acting ones guarded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from smetric import names
from smetric.config.settings import Settings
from smetric.features import VOCABULARY
from smetric.files import policy_path, watch
from smetric.fleet.instance import Instance
from smetric.policy import Policy
from smetric.routing.guardrail import Guardrail, band_of
from smetric.routing.policy_files import Origin, PolicyFile
from smetric.routing.routes import routes_of

#: Numbers of instances at which often one request runs while the others are idle. Two share one mean evenly.
SMALL_FLEET = range(3, 9)


def lacks_load_floor(policy: Policy, instances: int) -> bool:
    """Return whether one running request in an idle fleet of so many *instances* counts as overload.

    The load floor is the parameter `FLOOR` of a policy; 0 is the paper, and fine where it is configured.
    """
    floor = policy.params.get("FLOOR")
    return floor is not None and floor.value == 0 and not floor.configured and instances in SMALL_FLEET


class Policies:
    """The policies that the settings name.

    Args:
        settings: all settings.
        instances: returns all instances.
        on_reloaded: called with the result of each reload, one of `names.RELOADS`.
        on_restored: called with the route and the reason (one of `names.OUT_OF_BAND`) of each guardrail restore.
        on_swapped: called after a file has another policy.

    Raises:
        ConfigError: a policy cannot be read.
        PolicyError: a policy does not check.
    """

    def __init__(
        self,
        settings: Settings,
        instances: Callable[[], Sequence[Instance]],
        on_reloaded: Callable[[str], None],
        on_restored: Callable[[str, str], None],
        on_swapped: Callable[[], None],
    ) -> None:
        self._on_reloaded = on_reloaded
        self._on_swapped = on_swapped
        self._watch: asyncio.Task[None] | None = None
        self.routes = routes_of(settings, self._reloaded)
        self._observed = [
            PolicyFile(policy_path(one.policy), VOCABULARY, one.params, self._reloaded, name=f"observe-{number}")
            for number, one in enumerate(settings.observe, start=1)
        ]
        self._files = [*self.routes.files(), *self._observed]
        self.guardrail: Guardrail | None = None
        if settings.guardrail.enabled:
            self.guardrail = Guardrail(self.routes, instances, band_of(settings), on_restored, aliases=settings.models)

    @property
    def default(self) -> PolicyFile:
        """The policy of all requests that no other route fits."""
        return self.routes.last.control.file

    @property
    def observed(self) -> list[Policy]:
        """Policies that a record will be replayed with."""
        return [file.current.policy for file in self._observed]

    @property
    def recorded(self) -> list[Policy]:
        """Policies beside the acting ones whose request fields are recorded."""
        return [*self.observed, *(file.current.policy for file in self.routes.shadows())]

    def in_force(self) -> list[tuple[str, str, str, int]]:
        """Return file name, policy name, digest and generation of each policy."""
        files = [(file.name, file.current) for file in self.routes.files()]
        return [(name, one.policy.name, one.policy.digest, one.number) for name, one in files]

    def refresh(self) -> None:
        """Read changed files again now."""
        for file in self._files:
            file.refresh()

    async def start(self) -> None:
        """Start to watch the files and the effects of their changes."""
        if self.guardrail is not None:
            await self.guardrail.start()
        self._watch = asyncio.create_task(watch(self._files), name="policy-watch")

    async def stop(self) -> None:
        """Stop watching."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self.guardrail is not None:
            await self.guardrail.stop()

    def _reloaded(self, file: PolicyFile, error: str | None) -> None:
        if error is not None:
            self._on_reloaded(names.RELOAD_KEPT)
            return
        origin = file.current.origin
        self._on_reloaded(names.RELOAD_OK if origin is Origin.FILE else origin.value)
        if self.guardrail is not None:
            self.guardrail.swapped(file)
        self._on_swapped()
