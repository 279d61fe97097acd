"""Breaks of prefix caches."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache

import xxhash

from smetric.fleet.instance import Instance
from smetric.request.parts import Kind, Parts, divergence
from smetric.request.request import InferenceRequest

# Kinds of clients, from a closed list, by the product that a User-Agent begins with.

#: What every client becomes that is not in the list, and one that does not say.
OTHER = "other"
#: Beginnings of User-Agents, in lower case; the first that fits.
_PRODUCTS: tuple[tuple[bytes, str], ...] = (
    (b"claude-cli", "claude-code"),
    (b"claude-code", "claude-code"),
    (b"codex", "codex"),
    (b"opencode", "opencode"),
    (b"aider", "aider"),
    (b"cline", "cline"),
    (b"cursor", "cursor"),
    (b"qwencode", "qwen-code"),
    (b"geminicli", "gemini-cli"),
    (b"litellm", "litellm"),
    (b"langchain", "langchain"),
    (b"openai/", "openai-sdk"),
    (b"asyncopenai/", "openai-sdk"),
    (b"anthropic/", "anthropic-sdk"),
    (b"asyncanthropic/", "anthropic-sdk"),
    (b"ai-sdk", "ai-sdk"),
    (b"ai/", "ai-sdk"),
    (b"python-httpx", "python"),
    (b"python-requests", "python"),
    (b"python/", "python"),
    (b"curl/", "curl"),
)
#: All kinds there are.
KINDS = (*dict.fromkeys(kind for _, kind in _PRODUCTS), OTHER)


def client_kind(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """One of `KINDS` for a request with these *headers*, whose names are in lower case."""
    for name, value in headers:
        if name == b"user-agent":
            return _kind_of(value[:32])
    return OTHER


@lru_cache(1024)
def _kind_of(product: bytes) -> str:
    """Most requests come from a few kinds of clients."""
    product = product.lower()
    return next((kind for beginning, kind in _PRODUCTS if product.startswith(beginning)), OTHER)


# Names what breaks the engines' prefix caches: the first part of a prompt that its client did not continue as it was.
#
# Each answered request is compared with the one before it in its session, by hashes of parts (`smetric.reading.parts`).
# A difference counts only where the cache hit fell short of the carried history because of it, so that parallel
# conversations, evictions and requests that were served elsewhere are no breaks.

#: Conversations remembered, those of one session or with one beginning, and parts of all of them together (29 bytes
#: each); the one served longest ago goes first.
MOST_TRAILS = 4096
MOST_ALIKE = 8
MOST_PARTS = 1 << 19
#: Causes told apart; the one seen longest ago goes first. Messages beyond this place are one.
MOST_CAUSES = 256
MOST_PLACES = 16
#: A hit falls short by more than this share of what was expected, and by more than this share of the prompt.
SHORT_OF_EXPECTED = 0.05
SHORT_OF_PROMPT = 0.02
#: A hit may end this share of the prompt behind the part that broke it: lengths are estimated, caches hold blocks.
SLACK = 0.1

#: Kinds of messages that a conversation without a name is known by.
_FIRSTS = (Kind.USER, Kind.ASSISTANT)
_TEMPLATE = ("template", "template arguments")
_SALT = ("cache_salt", "cache_salt")


@dataclass(frozen=True, slots=True)
class Cause:
    """What broke: who sent it, what kind of part (`names.BROKEN_PARTS`), where it stands, what became of it."""

    client: str
    part: str
    place: str
    change: str


@dataclass(slots=True)
class Breaks:
    """How often one cause was seen.

    Args:
        count: follow-ups it broke.
        sessions: conversations it was seen in.
        follow_ups: follow-ups of these conversations since it was first seen in them.
        lost_tokens: tokens that had to be computed again, as far as the hits fell short.
        last_at: when it was last seen, monotonic seconds.
    """

    count: int = 0
    sessions: int = 0
    follow_ups: int = 0
    lost_tokens: int = 0
    last_at: float = 0.0

    @property
    def each_request(self) -> bool:
        """Whether it breaks (almost) every request of its sessions."""
        return self.count >= 3 and self.count >= 0.9 * self.follow_ups


@dataclass(slots=True, eq=False)
class _Trail:
    """The last request of one conversation, and where it was served."""

    parts: Parts
    instance: Instance
    incarnation: int
    keys: tuple[int, ...] = ()
    #: Grows with every request; the smaller the longer ago.
    used: int = 0
    causes: set[Cause] = field(default_factory=set)


class CacheBreaks:
    """Remembers the last request of each conversation and compares the next one with it.

    Args:
        on_break: called with the part and the change of each break.
        clock: monotonic seconds.
    """

    def __init__(self, on_break: Callable[[str, str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._on_break = on_break
        self._clock = clock
        self._trails: OrderedDict[int, _Trail] = OrderedDict()
        self._by_key: dict[int, list[_Trail]] = {}
        #: Parts of all of them together.
        self.parts = 0
        self._answered = 0
        self._causes: OrderedDict[Cause, Breaks] = OrderedDict()
        #: Follow-ups compared; those whose hit fell short; those of them whose prompt continued the last one as it was.
        self.follow_ups = 0
        self.short = 0
        self.unbroken = 0

    @property
    def conversations(self) -> int:
        """How many are remembered."""
        return len(self._trails)

    @property
    def causes(self) -> list[tuple[Cause, Breaks]]:
        """What broke caches, the costliest first."""
        return sorted(self._causes.items(), key=lambda each: -each[1].lost_tokens)

    def answered(self, request: InferenceRequest, instance: Instance, hit_share: float | None, client: str) -> None:
        """*instance* has answered *request* to the end.

        Args:
            request: with the hashes of its parts.
            instance: where it was served.
            hit_share: share of the prompt that was cached, as reported or as the best instance was believed to hold;
                None where neither is known.
            client: what kind of client sent it, from a bounded set.
        """
        parts = request.parts
        if parts is None:
            return
        keys = _keys(request, parts)
        if not keys:
            return
        trail, goes_on = self._previous(keys, parts, request.turn) if request.turn else (None, False)
        if trail is not None and hit_share is not None:
            is_short = self._compare(trail, request, parts, hit_share, client)
            if not (is_short or goes_on):
                trail = None  # another conversation with the same beginning, which has its own place in the cache
        if trail is None:
            trail = _Trail(parts, instance, instance.incarnation)
            self._trails[id(trail)] = trail
        else:
            self.parts -= len(trail.parts.hashes)
            trail.parts, trail.instance, trail.incarnation = parts, instance, instance.incarnation
        self.parts += len(parts.hashes)
        self._trails.move_to_end(id(trail))
        self._answered += 1
        trail.used = self._answered
        self._file(trail, keys)
        while len(self._trails) > MOST_TRAILS or self.parts > MOST_PARTS:
            self._drop(next(iter(self._trails.values())))

    def _previous(self, keys: tuple[int, ...], parts: Parts, turn: int) -> tuple[_Trail | None, bool]:
        """The conversation that *parts* share most messages with, then the cache salt, then the longest beginning.

        A second turn may share none, if the first message was edited: then the one that shares its tools or system.
        Returns also whether they go on where it ended.
        """
        longest = -1
        for key in keys:
            # As a rule the last request of the conversation is found at once, and this one goes on where it ended.
            going_on = None
            for trail in self._by_key.get(key, ()):
                theirs = trail.parts
                if theirs.salt == parts.salt and theirs.is_beginning_of(parts) and len(theirs.hashes) > longest:
                    going_on, longest = trail, len(theirs.hashes)
            if going_on is not None:
                return going_on, True
        alike = list({id(trail): trail for key in keys for trail in self._by_key.get(key, ())}.values())
        best: _Trail | None = None
        most = (0, False, 0)
        ours = parts.messages()
        for trail in alike:
            theirs = trail.parts
            messages = len(theirs.messages().intersection(ours))
            is_second = turn == 1 and theirs.first(Kind.ASSISTANT) is None
            shared = (messages, theirs.salt == parts.salt, theirs.shared_with(parts))
            if shared > most and (messages or (is_second and shared[2])):
                best, most = trail, shared
        return best, best is not None and best.parts.is_beginning_of(parts)

    def _compare(self, trail: _Trail, request: InferenceRequest, parts: Parts, hit_share: float, client: str) -> bool:
        """Blame the first difference to the last request, if the hit fell short and ended there; whether it fell short.

        The last prompt is expected to be held, but not the reply to it: it may be rendered otherwise than it was made.
        """
        self.follow_ups += 1
        for cause in trail.causes:
            self._causes[cause].follow_ups += 1
        expected = min((request.est_hit or 0) / request.prompt_len, trail.parts.size / max(1, parts.size))
        missing = expected - hit_share
        if missing <= max(SHORT_OF_EXPECTED * expected, SHORT_OF_PROMPT):
            return False
        self.short += 1
        found = self._cause(trail, parts, hit_share, client)
        if found is None:
            self.unbroken += 1
            return True
        breaks = self._causes.setdefault(found, Breaks())
        self._causes.move_to_end(found)
        if found not in trail.causes:
            trail.causes.add(found)
            breaks.sessions += 1
            breaks.follow_ups += 1
        breaks.count += 1
        breaks.lost_tokens += round(missing * request.prompt_len)
        breaks.last_at = self._clock()
        if len(self._causes) > MOST_CAUSES:
            gone, _ = self._causes.popitem(last=False)
            for each in self._trails.values():
                each.causes.discard(gone)
        self._on_break(found.part, found.change)
        return True

    def _cause(self, trail: _Trail, parts: Parts, hit_share: float, client: str) -> Cause | None:
        """What the hit of *hit_share* fell short for; None if the prompt goes on as it was, or the cache was lost."""
        if trail.incarnation != trail.instance.incarnation:
            return None
        if parts.salt != trail.parts.salt:
            return Cause(client, *_SALT, "changed")
        found = divergence(trail.parts, parts)
        if found is not None and hit_share <= found.reach_bytes / max(1, parts.size) + SLACK:
            return Cause(client, found.part, _bounded(found.place), found.change.value)
        if parts.template != trail.parts.template:
            return Cause(client, *_TEMPLATE, "changed")
        return None

    def _file(self, trail: _Trail, keys: tuple[int, ...]) -> None:
        """Let *trail* be found under *keys* and no others."""
        if trail.keys == keys:
            return
        self._unfile(trail)
        trail.keys = keys
        for key in keys:
            alike = self._by_key.setdefault(key, [])
            alike.append(trail)
            if len(alike) > MOST_ALIKE:
                self._drop(min(alike, key=lambda each: each.used))

    def _unfile(self, trail: _Trail) -> None:
        for key in trail.keys:
            alike = self._by_key[key]
            alike.remove(trail)
            if not alike:
                del self._by_key[key]
        trail.keys = ()

    def _drop(self, trail: _Trail) -> None:
        self._unfile(trail)
        del self._trails[id(trail)]
        self.parts -= len(trail.parts.hashes)


def _keys(request: InferenceRequest, parts: Parts) -> tuple[int, ...]:
    """What the conversation is found by: its session if the client names one, else the messages it began with.

    Either of the first messages may be edited: the other one still finds it.
    """
    served = request.served.encode()
    if request.session:
        return (xxhash.xxh3_64_intdigest(request.session.encode(), xxhash.xxh3_64_intdigest(served)),)
    seed = xxhash.xxh3_64_intdigest(served, 1)
    # What is a hash already is only told apart by the model.
    return tuple([seed ^ first for kind in _FIRSTS if (first := parts.first(kind)) is not None])


def _bounded(place: str) -> str:
    """*place*, with far messages as one: a cause must come up again to be seen as one."""
    name, bracket, number = place.partition("[")
    return place if not bracket or int(number[:-1]) < MOST_PLACES else f"{name}[{MOST_PLACES}…]"
