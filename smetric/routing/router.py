"""Router: from a request to a decision and a charged instance."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import structlog
from cachetools import TTLCache

from smetric.errors import HttpError, NoCandidate, RequestError, Shed
from smetric.features import VOCABULARY
from smetric.fleet.fleet import DECODE_BLOCKS, Candidates, Fleet
from smetric.fleet.instance import Instance, Lease
from smetric.fleet.record import DecisionRecord
from smetric.policy import Decision, Outcome, Policy, Snapshot
from smetric.request.request import InferenceRequest
from smetric.routing.policy_files import Generation
from smetric.routing.routes import Arm, Route, Routes
from smetric.sources.lookups import Columns, LookupDeadline, Lookups
from smetric.sources.models import ModelLists
from smetric.sources.source import Source

#: Seconds for which a response id ties requests to the engine that made it, and most ids that are remembered.
PIN_TTL_S = 3600.0
PIN_MAX = 65536
#: Hit lengths in tiers outside an instance's own cache, from which it can fetch.
TIERS = frozenset({"host_hit_len", "disk_hit_len", "store_hit_len"})

log = structlog.get_logger("smetric.router")


@dataclass(slots=True)
class Routing:
    """Result of routing one request.

    Exactly one of `lease` and `error` is set, or neither while the request is held.

    Args:
        route: the matching route.
        arm: the arm that decided.
        generation: the version of the policy that decided.
        decision: None if no policy ran: pinned requests, and requests that no instance may serve.
        lease: charge of the chosen instance.
        error: answer to the client.
        outcome: routed, pinned, held, rejected, no_candidate or error.
        evaluate_s: seconds spent on evaluating the policy.
        lookup_s: seconds spent on waiting for look-ups.
        beside: features that only observed and shadow policies read, taken before the charge.
    """

    route: Route
    arm: Arm
    generation: Generation
    decision: Decision | None
    lease: Lease | None
    error: HttpError | None
    outcome: str
    evaluate_s: float = 0.0
    lookup_s: float = 0.0
    beside: Snapshot | None = None

    @property
    def instance(self) -> Instance:
        """The charged instance."""
        assert self.lease is not None
        return self.lease.instance


class Router:
    """Routes requests.

    Args:
        fleet: the instances.
        routes: the acting policies.
        sources: the sources of look-ups, best first.
        deadline: deadline of look-ups.
        on_source_failed: called with the name of a source that raised.
        on_late: called with a request whose look-ups were not there in time.
        observed: policies whose features are recorded too.
        rng: draws the seed of each decision.
        models: read again before a model counts as unknown.
    """

    def __init__(
        self,
        fleet: Fleet,
        routes: Routes,
        sources: Sequence[Source] = (),
        *,
        deadline: LookupDeadline | None = None,
        on_source_failed: Callable[[str], None] = lambda _: None,
        on_late: Callable[[InferenceRequest], None] = lambda _: None,
        observed: Sequence[Policy] = (),
        rng: random.Random | None = None,
        models: ModelLists | None = None,
    ) -> None:
        self.fleet = fleet
        self.models = models
        self.routes = routes
        #: The sources, which learn from what becomes of a request.
        self.lookups = Lookups(
            sources, deadline=deadline or LookupDeadline(), on_failed=on_source_failed, on_late=on_late
        )
        #: By route, for those with observed policies or shadows.
        self._observers = {
            route: Observer(fleet, self.lookups) for route in routes.all if observed or route.shadows is not None
        }
        self.follow(observed)
        self._rng = rng or random.Random()
        self._turns = 0
        self._pins: TTLCache[str, Instance] = TTLCache(PIN_MAX, PIN_TTL_S, fleet.clock)

    def follow(self, observed: Sequence[Policy]) -> None:
        """Gather from now on what *observed*, and the current policies in shadow, read."""
        for route, observer in self._observers.items():
            shadows = route.shadows.files if route.shadows is not None else []
            observer.follow([*observed, *(file.current.policy for file in shadows)])

    def observe(self, routing: Routing, record: DecisionRecord) -> None:
        """Look up what observed policies read and the decision did without; called as the request is sent."""
        observer = self._observers.get(routing.route)
        if observer is not None:
            observer.look_up(record)

    async def route(
        self, request: InferenceRequest, *, exclude: Collection[Instance] = (), leased: bool = True
    ) -> Routing:
        """Decide and charge. Errors that clients or policies cause are in the result, never raised.

        Args:
            request: the request.
            exclude: instances on which it has failed.
            leased: whether it is inference. Otherwise no policy runs, any candidate serves it and nothing is charged.
        """
        route = self.routes.of(request)
        arm = route.control
        is_renewed = self.models is None
        while True:
            try:
                if request.pinned_to:
                    return self._pinned(request, route, exclude, leased)
                if not leased:
                    lease = self._any(request.model, exclude).charge(0, 0)
                    return Routing(route, arm, arm.file.current, None, lease, None, "routed")
                arm = route.arm_of(request)
                return await self._decide(request, route, arm, exclude)
            except HttpError as error:
                # The frames of its traceback, and on 3.12 their callers, would keep the request with its body.
                error.__traceback__ = None
                if is_renewed or not isinstance(error, NoCandidate) or error.status != 404:
                    return Routing(route, arm, arm.file.current, None, None, error, "no_candidate")
            assert self.models is not None
            await self.models.renew()
            is_renewed = True

    async def _decide(
        self, request: InferenceRequest, route: Route, arm: Arm, exclude: Collection[Instance]
    ) -> Routing:
        generation = arm.file.current
        policy = generation.policy
        seed = self._rng.getrandbits(63)
        observer = self._observers.get(route)
        self.lookups.describe(request, policy.fields if observer is None else policy.fields | observer.fields)
        evaluate_s = lookup_s = 0.0
        wanted = policy.lookups_always
        asked: Columns = {}
        fresh: Columns = asked
        candidates = self.fleet.candidates(request.model, exclude=exclude)
        snapshot: Snapshot | None = None
        while True:
            if wanted:
                started = time.perf_counter()
                answer = self.lookups.of(request, wanted, candidates, lookup_s)
                if isinstance(answer, dict):
                    fresh = answer
                else:
                    fresh = await answer
                    candidates = self.fleet.candidates(request.model, exclude=exclude)
                    snapshot = None
                lookup_s += time.perf_counter() - started
                asked.update(fresh)
            # From here to the charge nothing awaits: the decision rests on a snapshot taken after the last wait.
            if snapshot is None:
                snapshot, fresh = self.fleet.snapshot(candidates, policy.reads, request), asked
            for name, column in fresh.items():
                cells, origins = column.over(candidates)
                self.fleet.fill(snapshot, name, cells, origins, request.prompt_len)
            started = time.perf_counter()
            try:
                decision = policy.decide(snapshot, request, arm.cursors, seed)
            except Exception:
                log.exception("smetric.policy.failed", policy=policy.name, hash=policy.digest)
                failed = HttpError(500, "the routing policy could not be evaluated", "internal_error")
                return Routing(route, arm, generation, None, None, failed, "error", evaluate_s, lookup_s)
            evaluate_s += time.perf_counter() - started
            if isinstance(decision, Decision):
                break
            wanted = decision.features
        beside = observer.at_hand(policy, candidates, request) if observer is not None else None
        lease: Lease | None = None
        error: HttpError | None = None
        outcome = "held"
        if decision.index >= 0:
            if decision.cursors:
                arm.cursors = {**arm.cursors, **decision.cursors}
            hit = snapshot.cell("hit_len", decision.index)
            tiers = TIERS.intersection(asked)
            stored = int(max(snapshot.cell(name, decision.index) or 0 for name in tiers)) if tiers else 0
            instance = candidates[decision.index]
            is_asked = DECODE_BLOCKS in policy.reads or (beside is not None and DECODE_BLOCKS in beside.columns)
            blocks = request.prompt_blocks()[0] if is_asked else ()
            own_hit = None if hit is None else int(hit)
            lease = instance.charge(request.prompts, request.prompt_len, own_hit, stored, blocks)
            self.lookups.sent(request, lease)
            outcome = "routed"
        elif decision.outcome is Outcome.REJECT:
            error, outcome = Shed(decision.status, decision.message, decision.retry_after_s), "rejected"
        elif decision.outcome is not Outcome.HOLD:
            error, outcome = NoCandidate(f"{decision.message} of policy {policy.name}"), "no_candidate"
        return Routing(route, arm, generation, decision, lease, error, outcome, evaluate_s, lookup_s, beside)

    def _pinned(self, request: InferenceRequest, route: Route, exclude: Collection[Instance], leased: bool) -> Routing:
        """Route a request that continues a response stored on one engine: there or nowhere."""
        instance = self._pins.get(request.pinned_to)
        if instance is None or instance in exclude:
            raise RequestError(
                "the response or conversation this request continues is not held by any instance here",
                status=404,
                param="response_id",
            )
        if leased:
            lease = instance.charge(request.prompts, request.prompt_len)
            self.lookups.sent(request, lease)
        else:
            lease = instance.charge(0, 0)
        arm = route.control
        return Routing(route, arm, arm.file.current, None, lease, None, "pinned")

    def _any(self, model: str, exclude: Collection[Instance]) -> Instance:
        """Return a candidate for a request without inference, in turn."""
        candidates = self.fleet.candidates(model, exclude=exclude)
        self._turns += 1
        return candidates[self._turns % len(candidates)]

    def pin(self, response_id: str, instance: Instance) -> None:
        """Remember that *instance* holds the response *response_id*."""
        self._pins[response_id] = instance

    def lost_model(self, instance: Instance, model: str) -> None:
        """Report that *model* does not exist on *instance*, which was sent a request for it."""
        if self.models is not None:
            self.models.lost(instance, model)

    def forget(self, instance: Instance) -> None:
        """Drop what is known of *instance*, which has restarted: its cache, and the responses stored on it."""
        self.lookups.forget(instance)
        with self._pins.timer:  # a pin that expires between being found and being deleted is an error
            for response_id in [key for key, holder in self._pins.items() if holder is instance]:
                del self._pins[response_id]


class Observer:
    """Reader of features for policies that do not decide: observed ones, and those in shadow.

    Args:
        fleet: the instances.
        lookups: the sources.
        clock: monotonic seconds.
    """

    def __init__(self, fleet: Fleet, lookups: Lookups, clock: Callable[[], float] = time.monotonic) -> None:
        self._fleet = fleet
        self._lookups = lookups
        self._clock = clock
        self._looked_up: frozenset[str] = frozenset()
        self._at_hand: frozenset[str] = frozenset()
        #: Request fields that these policies may read.
        self.fields: frozenset[str] = frozenset()
        self._tasks: set[asyncio.Task[None]] = set()

    def follow(self, policies: Collection[Policy]) -> None:
        """Read for *policies* from now on."""
        reads = frozenset(name for policy in policies for name in policy.reads)
        self._looked_up = frozenset(name for name in reads if VOCABULARY.features[name].lookup)
        self._at_hand = reads - self._looked_up
        self.fields = frozenset(name for policy in policies for name in policy.fields)

    def at_hand(self, acting: Policy, candidates: Candidates, request: InferenceRequest) -> Snapshot | None:
        """Return the features that need no look-up and that *acting* does not read; None if there are none.

        Called before the charge, so that loads are those of the decision.
        """
        missing = self._at_hand - acting.reads
        return self._fleet.snapshot(candidates, missing, request) if missing else None

    def look_up(self, record: DecisionRecord) -> None:
        """Look up what the decision of *record* did without, and add it to the record when it arrives.

        The look-ups begin in the next tick of the loop, when the request has been sent.
        """
        decision = record.decision
        if decision is None or decision.outcome is Outcome.HOLD:
            return
        missing = self._looked_up.difference(decision.snapshot.columns)
        if missing:
            asyncio.get_running_loop().call_soon(self._look_up, record, decision, missing, self._clock())

    def _look_up(self, record: DecisionRecord, decision: Decision, missing: frozenset[str], began: float) -> None:
        candidates = [self._fleet[id] for id in decision.snapshot.ids]
        found = self._lookups.of(record.request, missing, candidates)
        add = partial(self._add, record, decision, candidates, began)
        if isinstance(found, dict):
            add(found)
        else:
            task = asyncio.create_task(_add_later(found, add))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _add(
        self, record: DecisionRecord, decision: Decision, candidates: Sequence[Instance], began: float, columns: Columns
    ) -> None:
        request = record.request
        # Once the answer has begun (the body is gone by then), sources may know of this very prompt.
        if request.body is not None:
            snapshot = Snapshot(decision.snapshot.ids, {}, now=self._fleet.clock())
            for name, column in columns.items():
                self._fleet.fill(snapshot, name, *column.over(candidates), request.prompt_len)
            record.beside = (*record.beside, (snapshot, self._clock() - began))


async def _add_later(found: Awaitable[Columns], add: Callable[[Columns], None]) -> None:
    add(await found)
