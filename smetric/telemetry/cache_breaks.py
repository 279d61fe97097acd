"""Breaks of prefix caches: the first part of a prompt that its client did not continue as it was.

Each answered request is compared with the one before it in its conversation, by hashes of parts. A difference counts
only where the cache hit fell short of the carried history because of it. So parallel conversations, evictions and
requests served elsewhere are no breaks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import xxhash
from cachetools import LRUCache

from smetric.fleet.instance import Instance
from smetric.request.prompt import Parts, divergence
from smetric.request.request import InferenceRequest

#: Conversations remembered, those of one session or with one beginning, and parts of all of them together (29 bytes
#: each). The conversation served longest ago is forgotten.
MAX_TRAILS = 4096
MAX_ALIKE = 8
MAX_PARTS = 1 << 19
#: Most causes that are kept; the cause seen longest ago is dropped. Messages beyond this place count as one place.
MAX_CAUSES = 256
MAX_PLACES = 16
#: A hit falls short by more than this share of what was expected, and by more than this share of the prompt.
SHORT_OF_EXPECTED = 0.05
SHORT_OF_PROMPT = 0.02
#: A hit may end this share of the prompt behind the part that broke it: lengths are estimated, caches hold blocks.
SLACK = 0.1

_TEMPLATE = ("template", "template arguments")
_SALT = ("cache_salt", "cache_salt")

#: Kind of a client that is not in the list, or that sends no User-Agent.
OTHER = "other"
#: Prefixes of User-Agents, in lower case, and their kinds; the first match counts.
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
KINDS = (*dict.fromkeys(kind for _, kind in _PRODUCTS), OTHER)


def client_kind(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the kind, one of `KINDS`, of a client with these *headers*, whose names are in lower case."""
    for name, value in headers:
        if name == b"user-agent":
            return _kind_of(value[:32])
    return OTHER


@lru_cache(1024)
def _kind_of(product: bytes) -> str:
    product = product.lower()
    return next((kind for beginning, kind in _PRODUCTS if product.startswith(beginning)), OTHER)


@dataclass(frozen=True, slots=True)
class Cause:
    """Cause of breaks: kind of client, part (`names.BROKEN_PARTS`), its place, and its change (`names.CHANGES`)."""

    client: str
    part: str
    place: str
    change: str


@dataclass(slots=True, eq=False)
class Breaks:
    """Breaks by one cause.

    Args:
        count: follow-ups that it broke.
        sessions: conversations in which it was seen.
        follow_ups: follow-ups of these conversations since it was first seen in them.
        lost_tokens: tokens computed again, as far as the hits fell short.
        last_at: last time it was seen, monotonic seconds.
    """

    count: int = 0
    sessions: int = 0
    follow_ups: int = 0
    lost_tokens: int = 0
    last_at: float = 0.0

    @property
    def each_request(self) -> bool:
        """Whether the cause breaks (almost) every request of its conversations."""
        return self.count >= 3 and self.count >= 0.9 * self.follow_ups


@dataclass(slots=True, eq=False)
class _Trail:
    """Last request of a conversation, where it was served, and the breaks seen in the conversation."""

    parts: Parts
    instance: Instance
    incarnation: int
    keys: tuple[int, ...] = ()
    #: Sequence number of its last request.
    used: int = 0
    breaks: set[Breaks] = field(default_factory=set)


class CacheBreaks:
    """Comparison of each request with the one before it in its conversation.

    Args:
        on_break: called with part and change of each break.
        clock: monotonic seconds.
    """

    def __init__(self, on_break: Callable[[str, str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._on_break = on_break
        self._clock = clock
        #: By identity, the one served longest ago first.
        self._trails: dict[int, _Trail] = {}
        self._by_key: dict[int, list[_Trail]] = {}
        #: Parts of all conversations together.
        self.parts = 0
        self._answered = 0
        self._causes: LRUCache[Cause, Breaks] = LRUCache(MAX_CAUSES)
        #: Follow-ups compared; those whose hit fell short; and those of them that continued the last prompt as it was.
        self.follow_ups = 0
        self.short = 0
        self.unbroken = 0

    @property
    def conversations(self) -> int:
        """Number of conversations remembered."""
        return len(self._trails)

    @property
    def causes(self) -> list[tuple[Cause, Breaks]]:
        """Causes and their breaks, the costliest first."""
        return sorted(self._causes.items(), key=lambda each: -each[1].lost_tokens)

    def answered(self, request: InferenceRequest, instance: Instance, hit_share: float | None, client: str) -> None:
        """Compare *request*, which *instance* has answered to the end.

        Args:
            request: with the hashes of its parts.
            instance: where it was served.
            hit_share: share of the prompt that was cached, as reported or as the best instance was believed to hold;
                None if neither is known.
            client: kind of the client, one of `KINDS`.
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
        else:
            del self._trails[id(trail)]
            self.parts -= len(trail.parts.hashes)
            trail.parts, trail.instance, trail.incarnation = parts, instance, instance.incarnation
        self._trails[id(trail)] = trail
        self.parts += len(parts.hashes)
        self._answered += 1
        trail.used = self._answered
        self._file(trail, keys)
        while len(self._trails) > MAX_TRAILS or self.parts > MAX_PARTS:
            self._drop(next(iter(self._trails.values())))

    def _previous(self, keys: tuple[int, ...], parts: Parts, turn: int) -> tuple[_Trail | None, bool]:
        """Return the conversation that shares most messages, then the cache salt, then the longest prefix with *parts*.

        A second turn may share no message, if the first was edited: then its tools or system decide. The second value
        is whether *parts* go on where the conversation ended.
        """
        longest = -1
        for key in keys:
            # As a rule the request goes on where the last one of its conversation ended.
            going_on = None
            for trail in self._by_key.get(key, ()):
                theirs, count = trail.parts, len(trail.parts.hashes)
                if count > longest and theirs.salt == parts.salt and theirs.hashes == parts.hashes[:count]:
                    going_on, longest = trail, count
            if going_on is not None:
                return going_on, True
        alike = list({id(trail): trail for key in keys for trail in self._by_key.get(key, ())}.values())
        best: _Trail | None = None
        most = (0, False, 0)
        ours = parts.messages()
        for trail in alike:
            theirs = trail.parts
            messages = len(theirs.messages().intersection(ours))
            is_second = turn == 1 and theirs.first_assistant is None
            shared = (messages, theirs.salt == parts.salt, theirs.shared_with(parts))
            if shared > most and (messages or (is_second and shared[2])):
                best, most = trail, shared
        return best, best is not None and best.parts.hashes == parts.hashes[: len(best.parts.hashes)]

    def _compare(self, trail: _Trail, request: InferenceRequest, parts: Parts, hit_share: float, client: str) -> bool:
        """Return whether the hit fell short; if so, count the first difference to the last request as its cause.

        The last prompt is expected to be cached, but not its reply, which may be rendered otherwise than it was made.
        """
        self.follow_ups += 1
        for breaks in trail.breaks:
            breaks.follow_ups += 1
        expected = min((request.est_hit or 0) / request.prompt_len, trail.parts.size / max(1, parts.size))
        missing = expected - hit_share
        if missing <= max(SHORT_OF_EXPECTED * expected, SHORT_OF_PROMPT):
            return False
        self.short += 1
        found = self._cause(trail, parts, hit_share, client)
        if found is None:
            self.unbroken += 1
            return True
        known = self._causes.get(found)
        if known is None:
            known = self._causes[found] = Breaks()
        if known not in trail.breaks:
            trail.breaks.add(known)
            known.sessions += 1
            known.follow_ups += 1
        known.count += 1
        known.lost_tokens += round(missing * request.prompt_len)
        known.last_at = self._clock()
        self._on_break(found.part, found.change)
        return True

    def _cause(self, trail: _Trail, parts: Parts, hit_share: float, client: str) -> Cause | None:
        """Return why the hit fell short; None if the prompt goes on as it was, or the cache was lost."""
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
        """Let *trail* be found by *keys* only."""
        if trail.keys == keys:
            return
        self._unfile(trail)
        trail.keys = keys
        for key in keys:
            alike = self._by_key.setdefault(key, [])
            alike.append(trail)
            if len(alike) > MAX_ALIKE:
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
    """Return the keys of the conversation: its session if the client names one, else the messages it began with.

    One of the first messages may be edited: the other one still finds it.
    """
    served = request.served.encode()
    if request.session:
        return (xxhash.xxh3_64_intdigest(request.session.encode(), xxhash.xxh3_64_intdigest(served)),)
    seed = xxhash.xxh3_64_intdigest(served, 1)
    return tuple([seed ^ first for first in (parts.first_user, parts.first_assistant) if first is not None])


def _bounded(place: str) -> str:
    """Return *place*, with far messages as one place: a cause is counted by its place."""
    name, bracket, number = place.partition("[")
    return place if not bracket or int(number[:-1]) < MAX_PLACES else f"{name}[{MAX_PLACES}…]"


def report_of(cause: Cause, breaks: Breaks, now: float) -> dict[str, Any]:
    """Return a cause as `/admin/cache` shows it at *now*, monotonic seconds."""
    return {
        "summary": summary(cause, breaks),
        "client": cause.client,
        "part": cause.part,
        "place": cause.place,
        "change": cause.change,
        "count": breaks.count,
        "follow_ups": breaks.follow_ups,
        "sessions": breaks.sessions,
        "lost_tokens": breaks.lost_tokens,
        "age_s": round(now - breaks.last_at, 1),
    }


def summary(cause: Cause, breaks: Breaks) -> str:
    """Return a line for people, e.g. `claude-code: system[0] changes each request, 14 sessions`."""
    is_each = breaks.each_request
    if cause.change == "changed":
        done = "changes" if is_each else "changed"
    else:
        done = f"{'is' if is_each else 'was'} {cause.change}"
    often = "each request" if is_each else f"{breaks.count} time{'s' if breaks.count != 1 else ''}"
    kind = f" ({cause.part})" if cause.place.endswith("]") and cause.part not in cause.place else ""
    sessions = f"{breaks.sessions} session{'s' if breaks.sessions != 1 else ''}"
    return f"{cause.client}: {cause.place}{kind} {done} {often}, {sessions}"
