"""Feed of the live page: decisions and figures, sent to every viewer four times a second within bounds."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import orjson
import structlog

from smetric import names
from smetric.admin.figures import Figures
from smetric.policy.plan import Outcome
from smetric.telemetry.decision_text import summary_of
from smetric.telemetry.decisions import Activity, DecisionLog, brief

if TYPE_CHECKING:
    from smetric.fleet.record import DecisionRecord, Shadowed
    from smetric.policy.decision import Decision
    from smetric.policy.plan import Step


#: Most characters of one value.
_LONGEST = 200
#: Filter value for all outcomes but the ordinary ones.
ODD = "odd"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionFilter:
    """Filter of the stream of decisions; a field that is not set matches all.

    Args:
        outcome: one of `names.OUTCOMES`, or `odd` for all but routed and pinned.
        rule: label of the rule that fired.
        instance: id of the chosen instance.
        migrated: whether only later turns that moved match.
        margin: largest distance of the runner-up's score, as a share of the larger score.
        text: part of the decision's id, trace id, rule, instance or model, or of the label of a failed guard.
    """

    outcome: str = ""
    rule: str = ""
    instance: str = ""
    migrated: bool = False
    margin: float | None = None
    text: str = ""

    @classmethod
    def from_query(cls, query: Mapping[str, str]) -> DecisionFilter:
        """Return the filter of a query string.

        Raises:
            ValueError: it is not valid; the message says why.
        """
        for name in ("outcome", "rule", "instance", "text"):
            if len(query.get(name, "")) > _LONGEST:
                raise ValueError(f"{name}: longer than {_LONGEST} characters")
        outcome = query.get("outcome", "")
        if outcome not in ("", ODD, *names.OUTCOMES):
            raise ValueError(f"outcome={outcome!r}: one of {', '.join(names.OUTCOMES)}, or {ODD}")
        migrated = query.get("migrated", "")
        if migrated not in ("", "0", "1"):
            raise ValueError(f"migrated={migrated!r}: 0 or 1")
        margin: float | None = None
        if text := query.get("margin", ""):
            try:
                margin = float(text)
            except ValueError:
                margin = -1.0
            if not 0.0 <= margin <= 1.0:
                raise ValueError(f"margin={text!r}: a share between 0 and 1, such as 0.05")
        return cls(
            outcome=outcome,
            rule=query.get("rule", ""),
            instance=query.get("instance", ""),
            migrated=migrated == "1",
            margin=margin,
            text=query.get("text", "").lower(),
        )

    def fits(self, record: DecisionRecord) -> bool:
        """Return whether *record* matches; cheap conditions come first."""
        if self.outcome not in ("", record.outcome) and (self.outcome != ODD or record.outcome in names.ORDINARY):
            return False
        if self.rule and record.rule != self.rule:
            return False
        if self.instance and (record.instance is None or record.instance.id != self.instance):
            return False
        if self.text and not self._is_in(record):
            return False
        if self.migrated and record.migration is None:
            return False
        if self.margin is not None:
            margin = margin_of(record)
            return margin is not None and margin <= self.margin
        return True

    def _is_in(self, record: DecisionRecord) -> bool:
        text = self.text
        own = (record.id, record.trace_id, record.rule, record.outcome, record.request.model)
        if any(text in each.lower() for each in own):
            return True
        if record.instance is not None and text in record.instance.id.lower():
            return True
        return record.decision is not None and any(text in guard.lower() for guard in failed_guards(record.decision))


#: Query parameters.
PARAMETERS = tuple(field.name for field in fields(DecisionFilter))


def failed_guards(decision: Decision) -> list[str]:
    """Return the guards that kept routing rules from firing, in order."""
    return [
        rule.failed
        for step, rule in zip(_outcomes(decision), decision.guards, strict=False)
        if step.outcome is Outcome.ROUTE and rule.failed is not None
    ]


def _outcomes(decision: Decision) -> Iterator[Step]:
    return (step for step in decision.policy.plan.steps if not step.is_filter)


def margin_of(record: DecisionRecord) -> float | None:
    """Return the distance of the runner-up's score as a share of the larger score; None without a runner-up."""
    return record.decision.margin_share if record.decision is not None else None


def row(record: DecisionRecord) -> dict[str, Any]:
    """Return a decision as a row of the stream."""
    decision = record.decision
    moved, hit, margin = record.migration, record.hit, margin_of(record)
    return {
        **brief(record),
        "time_ms": record.time_ns // 1_000_000,
        "rank": record.rank,
        "sentence": summary_of(record),
        "failed_guard": next(iter(failed_guards(decision)), None) if decision is not None else None,
        "moved_from": moved.source if moved is not None else None,
        "moved_by": moved.guard if moved is not None else None,
        "left_behind": moved.left_tokens if moved is not None else None,
        "hit": hit[0] if hit is not None else None,
        "margin": round(margin, 4) if margin is not None else None,
        "shadows": [shadow_of(one) for one in record.shadowed],
    }


def shadow_of(shadowed: Shadowed) -> dict[str, Any]:
    """Return the choice of a policy in shadow; `agrees` is None if it had no answer."""
    return {"policy": shadowed.policy.name, "choice": shadowed.choice, "agrees": shadowed.agrees}


def ending(record: DecisionRecord) -> dict[str, Any]:
    """Return the outcome of a request."""
    usage = record.usage
    return {
        "id": record.id,
        "followed_by": record.followed_by or None,
        "status": record.status,
        "ttft_s": record.ttft_s,
        "duration_s": record.duration_s,
        "error_type": record.error_type or None,
        "cached": usage.cached_tokens if usage is not None else None,
        "shadows": [shadow_of(one) for one in record.shadowed],
    }


#: Messages that may wait for a connection, about ten seconds. A slower viewer is disconnected and may come again.
MOST_WAITING = 48
#: Shown decisions that are followed to their end.
_MOST_OPEN = 512


class Viewer:
    """Viewer of the stream: its filter, and a short queue of server-sent events.

    Args:
        wanted: filter of decisions.
    """

    def __init__(self, wanted: DecisionFilter) -> None:
        self.wanted = wanted
        self._messages: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self.is_over = False
        #: Ids of shown decisions without an ending.
        self._open: dict[str, None] = {}

    def show(
        self,
        decided: Sequence[DecisionRecord],
        ended: Sequence[DecisionRecord],
        most: int,
        row_of: Callable[[DecisionRecord], dict[str, Any]],
    ) -> None:
        """Send at most *most* of the matching decisions, and the endings of those sent before."""
        fitting = [record for record in decided if self.wanted.fits(record)]
        shown = sample(fitting, most)
        if fitting:
            self.send("decisions", {"matched": len(fitting), "rows": [row_of(record) for record in shown]})
        for record in shown:
            if record.duration_s is None and not record.followed_by:
                self._open[record.id] = None
        while len(self._open) > _MOST_OPEN:
            del self._open[next(iter(self._open))]
        ends = [ending(record) for record in ended if record.id in self._open]
        if ends:
            for end in ends:
                del self._open[end["id"]]
            self.send("ended", ends)

    def send(self, event: str, data: Any) -> None:
        """Send a message."""
        self.put(encoded(event, data))

    def put(self, message: bytes) -> None:
        """Send an encoded message; disconnect a viewer with a full queue."""
        if len(self._messages) >= MOST_WAITING:
            self._messages.clear()
            self.leave("slow")
        elif not self.is_over:
            self._messages.append(message)
            self._changed.set()

    def leave(self, why: str) -> None:
        """Send the reason *why* and end."""
        if not self.is_over:
            self.is_over = True
            self._messages.append(encoded("over", {"why": why}))
            self._changed.set()

    async def messages(self) -> AsyncIterator[bytes]:
        """Yield all messages as they come."""
        while True:
            while self._messages:
                yield self._messages.popleft()
            if self.is_over:
                return
            self._changed.clear()
            await self._changed.wait()


def sample(records: Sequence[DecisionRecord], most: int) -> list[DecisionRecord]:
    """Return at most *most* of *records* in order: unusual ones first, then others evenly spread."""
    if len(records) <= most:
        return list(records)
    taken = set(_spread([i for i, record in enumerate(records) if record.outcome not in names.ORDINARY], most))
    moved = [i for i, record in enumerate(records) if record.migration is not None and i not in taken]
    taken.update(_spread(moved, most - len(taken)))
    rest = [i for i in range(len(records)) if i not in taken]
    taken.update(_spread(rest, most - len(taken)))
    return [records[i] for i in sorted(taken)]


def _spread(places: Sequence[int], most: int) -> Sequence[int]:
    return places if len(places) <= most else [places[k * len(places) // most] for k in range(most)]


def encoded(event: str, data: Any) -> bytes:
    """Return a server-sent event; JSON holds no line break."""
    return b"event: %b\ndata: %b\n\n" % (event.encode(), orjson.dumps(data, option=orjson.OPT_NON_STR_KEYS))


#: Looks per second while there are viewers.
LOOKS = 4
#: Most decisions per second for one viewer.
MOST_A_SECOND = 20
#: Most viewers at a time.
MOST_VIEWERS = 16
#: Earlier decisions for a new viewer.
BEFORE = 40

log = structlog.get_logger("smetric.live")


class TooManyViewers(Exception):
    """The number of viewers is at its limit."""


class Feed:
    """Sender of decisions and figures to viewers.

    Args:
        activity: source of decisions and endings.
        figures: figures that they add to.
        decisions: the last decisions.
        about: returns facts about the router, such as its policies; called once a second.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        activity: Activity,
        figures: Figures,
        decisions: DecisionLog,
        about: Callable[[], dict[str, Any]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.figures = figures
        self._activity = activity
        self._decisions = decisions
        self._about = about
        self._clock = clock
        self._viewers: list[Viewer] = []
        self._joined = asyncio.Event()
        self._next_second = clock() + 1.0
        self._task: asyncio.Task[None] | None = None
        self._is_over = False

    async def start(self) -> None:
        """Start to send."""
        self._task = asyncio.create_task(self._run(), name="live-feed")

    async def stop(self) -> None:
        """Disconnect the viewers, and end."""
        self._is_over = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        for viewer in self._viewers:
            viewer.leave("ending")

    def state(self) -> dict[str, Any]:
        """Return facts about the router, and the figures of the last second."""
        return {**self._about(), **self.figures.state()}

    def join(self, wanted: DecisionFilter, *, history: bool) -> Viewer:
        """Return a new viewer; with *history* it begins with the last ten minutes.

        Raises:
            TooManyViewers: there are enough.
        """
        if len(self._viewers) >= MOST_VIEWERS:
            raise TooManyViewers(f"{MOST_VIEWERS} viewers already")
        self.look()  # so that nothing is sent twice
        viewer = Viewer(wanted)
        if history:
            viewer.send("history", self.figures.history())
        viewer.send("state", self.state())
        before = [record for record in self._decisions.recent(len(self._decisions)) if wanted.fits(record)][:BEFORE]
        viewer.show(before[::-1], (), BEFORE, row)
        if self._is_over:
            viewer.leave("ending")
            return viewer
        self._viewers.append(viewer)
        self._joined.set()
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """Remove *viewer*."""
        if viewer in self._viewers:
            self._viewers.remove(viewer)

    def look(self) -> None:
        """Send what happened since the last look."""
        decided, ended = self._activity.take()
        self.figures.add(decided, ended)
        now = self._clock()
        is_second = now >= self._next_second
        if is_second:
            self._next_second = max(self._next_second + 1.0, now)
            self.figures.close_second()
        self._viewers = [viewer for viewer in self._viewers if not viewer.is_over]
        if not self._viewers:
            return
        rows: dict[str, dict[str, Any]] = {}

        def row_of(record: DecisionRecord) -> dict[str, Any]:
            if record.id not in rows:
                rows[record.id] = row(record)
            return rows[record.id]

        state = encoded("state", self.state()) if is_second else b""
        for viewer in self._viewers:
            viewer.show(decided, ended, MOST_A_SECOND // LOOKS, row_of)
            if state:
                viewer.put(state)

    async def _run(self) -> None:
        while True:
            try:
                self.look()
            except Exception:
                log.exception("smetric.live.failed")
            wait_s = 1.0 / LOOKS
            if self._viewers:
                await asyncio.sleep(wait_s)
                continue
            # Without viewers, one look per second is enough.
            self._joined.clear()
            try:
                async with asyncio.timeout(max(wait_s, self._next_second - self._clock())):
                    await self._joined.wait()
            except TimeoutError:
                continue
