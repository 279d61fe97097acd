"""Routes one request."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import structlog
from cachetools import TTLCache

from smetric.errors import HttpError, NoCandidate, RequestError, Shed
from smetric.fleet.fleet import Fleet
from smetric.fleet.instance import Instance, Lease
from smetric.policy import Decision, Outcome, Policy, Snapshot
from smetric.request.request import InferenceRequest, Usage
from smetric.routing.observer import Observer
from smetric.routing.policy_files import Generation
from smetric.routing.routes import Arm, Route, Routes
from smetric.sources.lookups import Columns, LookupDeadline, Lookups
from smetric.sources.source import Source

#: Seconds after which a response id no longer ties requests to the engine that made it, and how many are remembered.
PIN_TTL_S = 3600.0
PIN_MAX = 65536
#: What instances can fetch from, beside their own caches.
TIERS = frozenset({"host_hit_len", "disk_hit_len", "store_hit_len"})

log = structlog.get_logger("smetric.router")


@dataclass(slots=True)
class Routing:
    """Where a request goes and why.

    `decision` is None where no policy ran: pinned requests, and requests nobody may serve. Exactly one of `lease` and
    `error` is set, but where the request is held: then neither is.
    """

    route: Route
    arm: Arm
    generation: Generation
    decision: Decision | None
    lease: Lease | None
    error: HttpError | None
    #: routed, pinned, held, rejected, no_candidate or error.
    outcome: str
    #: Seconds spent evaluating the policy, and waiting for look-ups.
    evaluate_s: float
    lookup_s: float
    #: What observed policies read that the decision did without, as it was then.
    beside: Snapshot | None = None

    @property
    def instance(self) -> Instance:
        """The instance that was charged."""
        assert self.lease is not None
        return self.lease.instance


class Router:
    """Decides where requests go.

    Args:
        fleet: the instances.
        routes: the acting policies.
        sources: those that answer look-ups, best first.
        deadline: the time look-ups may take.
        on_source_failed: told the name of a source that raised.
        observed: policies whose reads are recorded too.
        rng: draws each decision's seed.
    """

    def __init__(
        self,
        fleet: Fleet,
        routes: Routes,
        sources: Sequence[Source] = (),
        *,
        deadline: LookupDeadline | None = None,
        on_source_failed: Callable[[str], None] = lambda _: None,
        observed: Sequence[Policy] = (),
        rng: random.Random | None = None,
    ) -> None:
        self.fleet = fleet
        self.routes = routes
        self._lookups = Lookups(sources, deadline=deadline or LookupDeadline(), on_failed=on_source_failed)
        self._observed = observed
        for route in routes.all:
            if observed or route.shadows is not None:
                route.observer = Observer(fleet, self._lookups, self._beside(route))
        self._rng = rng or random.Random()
        self._turns = 0
        self._pins: TTLCache[str, Instance] = TTLCache(PIN_MAX, PIN_TTL_S, fleet.clock)

    def _beside(self, route: Route) -> list[Policy]:
        """The policies that *route* is observed with."""
        shadows = route.shadows.files if route.shadows is not None else []
        return [*self._observed, *(file.current.policy for file in shadows)]

    def follow(self, observed: Sequence[Policy]) -> None:
        """Gather what *observed* read, and what those in shadow read as they are now."""
        self._observed = observed
        for route in self.routes.all:
            if route.observer is not None:
                route.observer.follow(self._beside(route))

    async def route(
        self, request: InferenceRequest, *, exclude: Collection[Instance] = (), leased: bool = True
    ) -> Routing:
        """Decide and charge. Never raises for what a client or a policy can cause: the error is in the result.

        Args:
            request: what is to be routed.
            exclude: instances that have failed this request.
            leased: it is inference. Otherwise no policy runs, any candidate serves it and nothing is charged.
        """
        route = self.routes.of(request)
        arm = route.control
        try:
            if request.pinned_to:
                return self._pinned(request, route, exclude, leased)
            if not leased:
                lease = self._any(request.model, exclude).charge(0, 0)
                return Routing(route, arm, arm.file.current, None, lease, None, "routed", 0.0, 0.0)
            arm = route.arm_of(request)
            return await self._decide(request, route, arm, exclude)
        except HttpError as error:
            # Frames that its traceback keeps, and on 3.12 those that called them, would keep it, and with it the body.
            error.__traceback__ = None
            return Routing(route, arm, arm.file.current, None, None, error, "no_candidate", 0.0, 0.0)

    async def _decide(
        self, request: InferenceRequest, route: Route, arm: Arm, exclude: Collection[Instance]
    ) -> Routing:
        generation = arm.file.current
        policy = generation.policy
        seed = self._rng.getrandbits(63)
        error: HttpError
        fields = policy.fields if route.observer is None else policy.fields | route.observer.fields
        self._lookups.describe(request, fields)
        evaluate_s = lookup_s = 0.0
        wanted = policy.lookups_always
        asked: Columns = {}
        fresh: Columns = asked
        candidates = self.fleet.candidates(request.model, exclude=exclude)
        snapshot: Snapshot | None = None
        while True:
            if wanted:
                started = time.perf_counter()
                answer = self._lookups.of(request, wanted, candidates, lookup_s)
                if isinstance(answer, dict):
                    fresh = answer
                    lookup_s += time.perf_counter() - started
                else:
                    fresh = await answer
                    lookup_s += time.perf_counter() - started
                    candidates = self.fleet.candidates(request.model, exclude=exclude)
                    snapshot = None
                asked.update(fresh)
            # From here to the charge nothing awaits: the decision rests on a snapshot taken after the last wait.
            if snapshot is None:
                snapshot, fresh = self.fleet.snapshot(candidates, policy.reads), asked
            for name, column in fresh.items():
                cells, origins = column.over(candidates)
                self.fleet.fill(snapshot, name, cells, origins, request.prompt_len)
            started = time.perf_counter()
            try:
                decision = policy.decide(snapshot, request, arm.cursors, seed)
            except Exception:
                log.exception("smetric.policy.failed", policy=policy.name, hash=policy.digest)
                error = HttpError(500, "the routing policy could not be evaluated", "internal_error")
                return Routing(route, arm, generation, None, None, error, "error", evaluate_s, lookup_s)
            evaluate_s += time.perf_counter() - started
            if isinstance(decision, Decision):
                break
            wanted = decision.features
        beside = None
        if route.observer is not None:
            beside = route.observer.at_hand(policy, candidates)
        if decision.index >= 0:
            if cursors := decision.cursors:
                arm.cursors = {**arm.cursors, **cursors}
            hit = snapshot.cell("hit_len", decision.index)
            stored = 0
            if not TIERS.isdisjoint(asked):
                stored = int(max(snapshot.cell(name, decision.index) or 0 for name in TIERS))
            instance = candidates[decision.index]
            lease = instance.charge(request.prompts, request.prompt_len, None if hit is None else int(hit), stored)
            self._lookups.sent(request, lease)
            return Routing(route, arm, generation, decision, lease, None, "routed", evaluate_s, lookup_s, beside)
        if decision.outcome is Outcome.REJECT:
            error = Shed(decision.status, decision.message, decision.retry_after_s)
            return Routing(route, arm, generation, decision, None, error, "rejected", evaluate_s, lookup_s, beside)
        if decision.outcome is Outcome.HOLD:
            return Routing(route, arm, generation, decision, None, None, "held", evaluate_s, lookup_s, beside)
        error = NoCandidate(f"{decision.message} of policy {policy.name}")
        return Routing(route, arm, generation, decision, None, error, "no_candidate", evaluate_s, lookup_s, beside)

    def _pinned(self, request: InferenceRequest, route: Route, exclude: Collection[Instance], leased: bool) -> Routing:
        """A request that continues a response stored on one engine goes there or nowhere."""
        instance = self._pins.get(request.pinned_to)
        if instance is None or instance in exclude:
            raise RequestError(
                "the response or conversation this request continues is not held by any instance here",
                status=404,
                param="response_id",
            )
        if leased:
            lease = instance.charge(request.prompts, request.prompt_len)
            self._lookups.sent(request, lease)
        else:
            lease = instance.charge(0, 0)
        arm = route.control
        return Routing(route, arm, arm.file.current, None, lease, None, "pinned", 0.0, 0.0)

    def _any(self, model: str, exclude: Collection[Instance]) -> Instance:
        """Some candidate for what costs no inference; they take turns."""
        candidates = self.fleet.candidates(model, exclude=exclude)
        self._turns += 1
        return candidates[self._turns % len(candidates)]

    def pin(self, response_id: str, instance: Instance) -> None:
        """Remember that *instance* holds the response *response_id*."""
        self._pins[response_id] = instance

    def first_token(self, lease: Lease, seconds: float) -> None:
        """Tell the sources that follow requests that the stream of one began *seconds* after it was sent."""
        self._lookups.first_token(lease, seconds)

    def prefilled(self, request: InferenceRequest, instance: Instance) -> None:
        """Tell the sources that *instance* has prefilled *request*."""
        self._lookups.prefilled(request, instance)

    def settled(self, request: InferenceRequest, instance: Instance, usage: Usage | None) -> None:
        """Tell the sources that learn from it that *instance* has answered *request* to the end."""
        self._lookups.settled(request, instance, usage)

    def forget(self, instance: Instance) -> None:
        """*instance* restarted: sources forget its cache, and responses stored on it are gone."""
        self._lookups.forget(instance)
        with self._pins.timer:  # one that expires between being found and being deleted is an error
            for response_id in [key for key, holder in self._pins.items() if holder is instance]:
                del self._pins[response_id]
