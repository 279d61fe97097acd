"""Lists of the models that instances serve, as their `/v1/models` shows them.

They are read every half minute, and again when a request asks for a model that none of them has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from smetric.errors import UNREADABLE
from smetric.fleet.instance import Instance

#: Seconds between two reads of an instance's list, and the least between two that requests cause.
INTERVAL_S = 30.0
LEAST_INTERVAL_S = 1.0
#: Longest wait of a request for a list that is being read, seconds.
WAIT_S = 0.5
#: Most names taken from one list, and its most bytes.
MAX_MODELS = 4096
MAX_BYTES = 1024 * 1024

#: Fields of a model by name, undecoded.
Card = Mapping[str, Any]

log = structlog.get_logger("smetric.sources.models")


class _List(msgspec.Struct):
    data: list[dict[str, msgspec.Raw]]


_read = msgspec.json.Decoder(_List).decode
_name = msgspec.json.Decoder(str).decode


def read_cards(body: bytes) -> dict[str, Card]:
    """Return the models in *body*, a list as engines send it, by their ids.

    Raises:
        ValueError, or one of UNREADABLE: it is none.
    """
    cards: dict[str, Card] = {}
    for card in _read(body.decode()).data[:MAX_MODELS]:
        if bytes(card.get("id", b""))[:1] == b'"':
            cards.setdefault(_name(card["id"]), card)
    if not cards:
        raise ValueError("no model has a name; an engine that is ready lists one")
    return cards


class Unread(Exception):
    """An instance does not answer with what it was asked for. The message is the result it is counted as."""

    def __init__(self, result: str, status: int = 0) -> None:
        super().__init__(result)
        self.needs_key = status in (401, 403)


@dataclass(slots=True)
class _Known:
    """State of one instance's list."""

    cards: dict[str, Card] | None = None
    due: float = float("-inf")
    began: float = float("-inf")
    reading: asyncio.Task[None] | None = None
    #: Why the list could not be read last time; empty if it could.
    problem: str = ""
    needs_key: bool = False


class ModelLists:
    """The lists of all instances: written to `Instance.models`, and kept as cards.

    Args:
        instances: those to ask.
        get: returns the body of a path of an instance, of at most so many bytes, or raises `Unread`.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        instances: Iterable[Instance],
        get: Callable[[Instance, str, int], Awaitable[bytes]],
        clock: Callable[[], float],
    ) -> None:
        self._known = {instance: _Known() for instance in instances}
        self._get = get
        self._clock = clock

    def cards(self, instance: Instance) -> Mapping[str, Card] | None:
        """Return the models that *instance* is sent requests for, by name; None while they are unknown."""
        read, names = self._known[instance].cards, instance.models
        if names is None:
            return read
        known = read or {}
        return {name: known.get(name) or {"id": name, "object": "model"} for name in [*known, *names] if name in names}

    def needs_key(self, instance: Instance) -> bool:
        """Return whether *instance* shows its list only with credentials that the router lacks."""
        return self._known[instance].needs_key

    def forget(self, instance: Instance) -> None:
        """Read the list of *instance* at the next turn, because it has restarted."""
        self._known[instance].due = float("-inf")

    async def keep(self, instance: Instance) -> None:
        """Read the list of *instance* if that is due; a configured list is not read."""
        if not instance.models_fixed and self._clock() >= self._known[instance].due:
            await self._begin(instance)

    async def renew(self) -> None:
        """Read all lists again, each at most once in `LEAST_INTERVAL_S`, and wait for them.

        A read is waited for until `WAIT_S` after its beginning; not at all if the last one of that instance timed out.
        """
        for instance in self._known:
            self._begin_again(instance)
        now = self._clock()
        reads = [each for each in self._known.values() if each.reading is not None and each.problem != "timeout"]
        recent = [each for each in reads if each.began + WAIT_S > now]
        if recent:
            until = max(each.began for each in recent) + WAIT_S
            await asyncio.wait([each.reading for each in recent if each.reading is not None], timeout=until - now)

    def lost(self, instance: Instance, model: str) -> None:
        """Send no more requests for *model* to *instance*, which says that it does not exist, until its list has it."""
        if instance.models is not None and not instance.models_fixed:
            instance.models -= {model}
        self._begin_again(instance)

    def close(self) -> None:
        """End the reads under way."""
        for known in self._known.values():
            if known.reading is not None:
                known.reading.cancel()

    def _begin_again(self, instance: Instance) -> None:
        if self._clock() - self._known[instance].began >= LEAST_INTERVAL_S:
            self._begin(instance)

    def _begin(self, instance: Instance) -> asyncio.Task[None]:
        known = self._known[instance]
        if known.reading is None:
            known.began = self._clock()
            known.due = known.began + INTERVAL_S
            known.reading = asyncio.create_task(self._read(instance, known), name=f"models of {instance.id}")
        return known.reading

    async def _read(self, instance: Instance, known: _Known) -> None:
        """Read the list of *instance*. If that fails, the models known before stay."""
        try:
            cards = read_cards(await self._get(instance, "/v1/models", MAX_BYTES))
        except (Unread, ValueError, *UNREADABLE) as error:
            problem = str(error) if isinstance(error, Unread) else "bad_page"
            if problem != known.problem:
                log.warning("smetric.models.unreadable", instance=instance.id, result=problem)
            known.problem, known.needs_key = problem, isinstance(error, Unread) and error.needs_key
            return
        finally:
            known.reading = None
        known.problem, known.needs_key, known.cards = "", False, cards
        if not instance.models_fixed:
            instance.models = frozenset(cards)
            instance.adapters = frozenset(
                name for name, card in cards.items() if bytes(card.get("parent", b"null")) != b"null"
            )
