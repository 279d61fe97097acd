"""Plays of recorded sessions."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import msgspec
import orjson
from xxhash import xxh3_64_intdigest, xxh32_intdigest

from smetric.app import Application
from smetric.config.settings import (
    Admin,
    InstanceSettings,
    Listen,
    LmcacheSettings,
    LookupSettings,
    PrefixIndexSettings,
    Settings,
    TokenizerSettings,
)
from smetric.fleet.record import DecisionRecord
from smetric.http.listener import address_of, listen, serve_port
from smetric.lab.emulator import instance, prompt
from smetric.lab.emulator.fleet import EmulatedFleet
from smetric.lab.emulator.instance import EmulatedSettings
from smetric.lab.engine import EngineConfig

# The shapes of the recorded sessions that the demo replays: how long, how much, in what rhythm; never what was said.
#
# Where they come from is in `data/README.md`; how a shape becomes requests is in `smetric.demo.dialect`.

_FILE = Path(__file__).parent / "data" / "sessions.jsonl"


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request of a session.

    Args:
        new: tokens the user or a tool adds.
        output: tokens of the reply.
        gap_s: seconds between the reply before and this request.
    """

    new: int
    output: int
    gap_s: float


class Session(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One agent's session.

    Args:
        id: its name in the source.
        tools: tokens of the tool definitions. Sessions with the same number have the same tools.
        system: tokens of the system prompt; the same where both numbers are.
        turns: its requests, the first one included.
    """

    id: str
    tools: int
    system: int
    turns: tuple[Turn, ...]


_DECODER = msgspec.json.Decoder(Session)


def load_sessions() -> list[Session]:
    """All sessions of the extract, in its order."""
    return [_DECODER.decode(line) for line in _FILE.read_bytes().splitlines()]


# How an agent speaks: a session as the bodies of one API, and that API's streamed replies read back.
#
# Texts are filler of the recorded lengths. When requests are sent, and what is measured, is in `smetric.demo.agent`.

#: The name emulated engines answer to.
MODEL = "emulated"
_TOOLS = ("Bash", "Read", "Edit", "Write", "Glob", "Grep", "Task", "WebFetch")


@dataclass(slots=True)
class Reply:
    """What came back so far: the text, and the tokens as the engine counted them in `usage`."""

    text: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    #: The API's own end of stream was seen.
    is_complete: bool = False


class Dialect(Protocol):
    """One API."""

    path: str
    headers: Mapping[str, str]

    def body(self, session: Session, replies: Sequence[str]) -> bytes:
        """The request that follows *replies*, with the whole history as an agent sends it."""

    def read(self, data: bytes, into: Reply) -> None:
        """Take what stands after `data: ` in one line of a streamed reply."""


class Chat:
    """`/v1/chat/completions`."""

    path = "/v1/chat/completions"
    headers: Mapping[str, str] = {"content-type": "application/json", "authorization": "Bearer demo"}

    def body(self, session: Session, replies: Sequence[str]) -> bytes:
        """System prompt first, then what the user and the engine said in turn."""
        messages = [{"role": "system", "content": _system(session)}]
        for number, said in enumerate(_said(session, len(replies))):
            messages.append({"role": "user", "content": said})
            if number < len(replies):
                messages.append({"role": "assistant", "content": replies[number]})
        return orjson.dumps(
            {
                "model": MODEL,
                "messages": messages,
                "tools": [
                    {"type": "function", "function": {"name": name, "description": text, "parameters": _PARAMETERS}}
                    for name, text in _tools(session)
                ],
                "max_tokens": session.turns[len(replies)].output,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )

    def read(self, data: bytes, into: Reply) -> None:
        """A chunk: text, or usage at the end; an error has neither."""
        if data == b"[DONE]":
            into.is_complete = True
            return
        chunk = orjson.loads(data)
        for choice in chunk.get("choices", ()):
            into.text.append(choice["delta"].get("content") or "")
        if usage := chunk.get("usage"):
            into.prompt_tokens = usage["prompt_tokens"]
            into.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


class Messages:
    """`/v1/messages` as Claude Code uses it: a billing header that always changes, cache marks that move."""

    path = "/v1/messages?beta=true"
    headers: Mapping[str, str] = {
        "content-type": "application/json",
        "anthropic-version": "2023-06-01",
        "x-api-key": "demo",
    }

    def body(self, session: Session, replies: Sequence[str]) -> bytes:
        """The mark is on the system prompt and on the last message."""
        mark = {"cache_control": {"type": "ephemeral"}}
        messages: list[dict[str, Any]] = []
        for number, said in enumerate(_said(session, len(replies))):
            last = number == len(replies)
            messages.append({"role": "user", "content": [{"type": "text", "text": said, **(mark if last else {})}]})
            if not last:
                messages.append({"role": "assistant", "content": [{"type": "text", "text": replies[number]}]})
        checksum = xxh32_intdigest(f"{session.id} {len(replies)}".encode()) & 0xFFFFF
        billing = f"x-anthropic-billing-header: cc_version=2.1.0; cch={checksum:05x};"
        return orjson.dumps(
            {
                "model": MODEL,
                "system": [{"type": "text", "text": billing}, {"type": "text", "text": _system(session), **mark}],
                "messages": messages,
                "tools": [
                    {"name": name, "description": text, "input_schema": _PARAMETERS} for name, text in _tools(session)
                ],
                "max_tokens": session.turns[len(replies)].output,
                "ignore_eos": True,
                "stream": True,
            }
        )

    def read(self, data: bytes, into: Reply) -> None:
        """An event: text, usage at the end, or the end."""
        event = orjson.loads(data)
        match event["type"]:
            case "content_block_delta":
                into.text.append(event["delta"]["text"])
            case "message_delta":
                usage = event["usage"]
                cached = usage.get("cache_read_input_tokens") or 0
                created = usage.get("cache_creation_input_tokens") or 0
                into.prompt_tokens = usage["input_tokens"] + created + cached
                into.cached_tokens = cached
            case "message_stop":
                into.is_complete = True


_PARAMETERS = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def _filler(key: str, tokens: int) -> str:
    return instance.text(xxh3_64_intdigest(key.encode()), max(0, tokens))


def _said(session: Session, replies: int) -> list[str]:
    """What the user or a tool said before each reply, and after the last one."""
    turns = session.turns[: replies + 1]
    return [_filler(f"{session.id} {number}", turn.new) for number, turn in enumerate(turns)]


def _system(session: Session) -> str:
    return _filler(f"system {session.tools} {session.system}", session.system)


def _tools(session: Session) -> list[tuple[str, str]]:
    """Names and descriptions, which together with their schemas have about the recorded length."""
    schema = prompt.count(prompt.encode(orjson.dumps(_PARAMETERS).decode())) + 20
    each = session.tools // len(_TOOLS) - schema
    return [(name, _filler(f"tool {name} {session.tools}", each)) for name in _TOOLS]


# One agent: sends a session's requests one after the other, as agents do, and notes what it saw of each.


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """One request as its client saw it; tokens are the engine's own count, times are on the monotonic clock.

    Args:
        session: whose request it was.
        turn: its place in the session, 0 for the first.
        status: HTTP status; 0 when there was none.
        is_whole: it was answered with 200 and its stream reached its end.
        decision: id of the routing decision.
        instance: who answered.
        sent_s: when it was sent.
        first_byte_s: when the first event came; the end for an answer without one.
        ended_s: when the answer ended.
        prompt_tokens: length of the prompt.
        cached_tokens: how much of it the engine had in its cache.
    """

    session: str
    turn: int
    status: int
    is_whole: bool
    decision: str
    instance: str
    sent_s: float
    first_byte_s: float
    ended_s: float
    prompt_tokens: int
    cached_tokens: int

    @property
    def ttft_s(self) -> float:
        """Seconds to the first event."""
        return self.first_byte_s - self.sent_s


async def play(
    session: Session,
    dialect: Dialect,
    client: aiohttp.ClientSession,
    router: str,
    *,
    delay_s: float,
    speed: float,
    answered: Callable[[AgentAnswer], None],
) -> None:
    """Send the requests of *session*, each with the replies so far. A session ends at an answer that is not whole.

    Args:
        session: what is sent.
        dialect: in which API.
        client: opens the connections.
        router: base URL.
        delay_s: seconds until it begins.
        speed: the recorded gaps are divided by this.
        answered: told of every answer.
    """
    replies: list[str] = []
    await asyncio.sleep(delay_s)
    for number, turn in enumerate(session.turns):
        await asyncio.sleep(turn.gap_s / speed)
        reply = Reply()
        answer = await _ask(session, number, dialect.body(session, replies), dialect, client, router, reply)
        answered(answer)
        if not answer.is_whole:
            return
        replies.append("".join(reply.text))


async def _ask(
    session: Session,
    turn: int,
    body: bytes,
    dialect: Dialect,
    client: aiohttp.ClientSession,
    router: str,
    reply: Reply,
) -> AgentAnswer:
    status, decision, instance = 0, "", ""
    sent_s = time.monotonic()
    first_byte_s: float | None = None
    try:
        async with client.post(router + dialect.path, data=body, headers=dialect.headers) as response:
            status = response.status
            decision = response.headers.get("x-smetric-decision-id", "")
            instance = response.headers.get("x-smetric-instance", "")
            async for line in response.content:
                if status == 200 and line.startswith(b"data: "):
                    first_byte_s = first_byte_s or time.monotonic()
                    dialect.read(line[6:].strip(), reply)
    except aiohttp.ClientError:
        # A broken connection is an answer that is not whole; the report counts it.
        reply.is_complete = False
    ended_s = time.monotonic()
    return AgentAnswer(
        session=session.id,
        turn=turn,
        status=status,
        is_whole=status == 200 and reply.is_complete,
        decision=decision,
        instance=instance,
        sent_s=sent_s,
        first_byte_s=first_byte_s or ended_s,
        ended_s=ended_s,
        prompt_tokens=reply.prompt_tokens,
        cached_tokens=reply.cached_tokens,
    )


# What the answers of one play add up to.

#: Imbalance is judged in windows this long, seconds.
WINDOW_S = 1.0


@dataclass(frozen=True, slots=True)
class PlayFigures:
    """Sums over the answers of one policy.

    Args:
        requests: how many were sent.
        failed: how many were not answered wholly.
        hit_rate: cached tokens ÷ prompt tokens, over all of them.
        imbalance: see `imbalance`.
        ttft_p50_s: median time to the first event.
        ttft_p90_s: its 90th percentile.
        followups: requests after the first of their session.
        returned: how many of those went to the instance that had answered before.
    """

    requests: int
    failed: int
    hit_rate: float
    imbalance: float
    ttft_p50_s: float
    ttft_p90_s: float
    followups: int
    returned: int

    @classmethod
    def of(cls, answers: Sequence[AgentAnswer], instances: int) -> PlayFigures:
        """The figures of *answers* on so many *instances*."""
        whole = [answer for answer in answers if answer.is_whole]
        prompt = sum(answer.prompt_tokens for answer in whole)
        waits = sorted(answer.ttft_s for answer in whole)
        followups = [answer for answer in whole if answer.turn > 0]
        return cls(
            requests=len(answers),
            failed=len(answers) - len(whole),
            hit_rate=sum(answer.cached_tokens for answer in whole) / prompt if prompt else 0.0,
            imbalance=imbalance(whole, instances),
            ttft_p50_s=_percentile(waits, 0.5),
            ttft_p90_s=_percentile(waits, 0.9),
            followups=len(followups),
            returned=sum(answer.instance == home for answer, home in with_homes(whole) if home),
        )


def with_homes(answers: Sequence[AgentAnswer]) -> list[tuple[AgentAnswer, str]]:
    """Each answer with the instance that gave its session's answer before; empty for a first turn."""
    at = {(answer.session, answer.turn): answer.instance for answer in answers}
    return [(answer, at.get((answer.session, answer.turn - 1), "")) for answer in answers]


def imbalance(answers: Sequence[AgentAnswer], instances: int) -> float:
    """Requests in flight on the fullest instance ÷ the mean of all, in windows of `WINDOW_S`, weighted by that mean.

    1 is even; the number of instances is everything on one. An empty window weighs nothing.
    """
    if not answers:
        return 1.0
    start = min(answer.sent_s for answer in answers)
    busy: dict[int, dict[str, float]] = {}
    for answer in answers:
        first = int((answer.sent_s - start) / WINDOW_S)
        last = int((answer.ended_s - start) / WINDOW_S)
        for window in range(first, last + 1):
            opens = start + window * WINDOW_S
            share = min(answer.ended_s, opens + WINDOW_S) - max(answer.sent_s, opens)
            seconds = busy.setdefault(window, {})
            seconds[answer.instance] = seconds.get(answer.instance, 0.0) + max(0.0, share)
    total = sum(sum(seconds.values()) for seconds in busy.values())
    fullest = sum(max(seconds.values()) for seconds in busy.values())
    return fullest * instances / total if total else 1.0


def _percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least *share* of *ordered* do not exceed; 0 of none."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


# What the demo runs on: four small emulated engines, LMCache's lookup over them, and a router's settings.

INSTANCES = 4
#: KV blocks of one engine. All sessions end with some 120,000 tokens together: there is room for its share and some
#: more, far from room for all, so that it matters where a session's next request goes.
BLOCKS = 2560
BLOCK_SIZE = 16


def engines(speed: float = 1.0) -> EmulatedFleet:
    """The engines, *speed* times as fast as an H20; they listen while entered."""
    config = EngineConfig(block_size=BLOCK_SIZE, blocks=BLOCKS, max_model_len=BLOCKS * BLOCK_SIZE)
    return EmulatedFleet(INSTANCES, EmulatedSettings(model=MODEL, engine=config, time_scale=speed), lmcache=True)


def settings(
    urls: Sequence[str], policy: str, *, lmcache_url: str = "", port: int = 0, admin_port: int = 0
) -> Settings:
    """A router over the engines at *urls*, everything else as it comes.

    With *lmcache_url* the lookup service there tells what instances hold, instead of the prefix index.
    """
    instances = {f"vllm-{n}": url for n, url in enumerate(urls, 1)}
    told = Settings(
        listen=Listen(port=port),
        admin=Admin(port=admin_port),
        instances=tuple(InstanceSettings(id=id, url=url) for id, url in instances.items()),
        policy=policy,
    )
    if not lmcache_url:
        return told
    ids = {id: url.removeprefix("http://") for id, url in instances.items()}
    return msgspec.structs.replace(
        told,
        prefix_index=PrefixIndexSettings(enabled=False),
        lmcache=LmcacheSettings(url=lmcache_url, instances=ids),
        tokenizer=TokenizerSettings(source="engine"),
        # Engines, tokens and look-ups share this machine: where it is busy, they take longer than they ever would.
        lookup=LookupSettings(deadline_base=1.0, deadline_cap=2.0),
    )


# Plays the sessions through a router by one policy, on engines that hold nothing yet.

#: The sessions begin evenly spread over so many seconds.
BEGIN_WITHIN_S = 6.0
#: What still runs when the agents are done, seconds.
_DRAIN_S = 2.0


@dataclass(frozen=True, slots=True)
class Play:
    """What came of one policy.

    Args:
        policy: as it was given: a shipped name or a file.
        answers: every answer, in the order they ended.
        records: the routing decisions of those answers, by id, as far as the router keeps them.
        figures: their sums.
        took_s: how long it took.
    """

    policy: str
    answers: Sequence[AgentAnswer]
    records: dict[str, DecisionRecord]
    figures: PlayFigures
    took_s: float


async def perform(
    engines: EmulatedFleet,
    policy: str,
    sessions: Sequence[Session],
    *,
    speed: float,
    progress: Callable[[int, int], None],
    by_lmcache: bool = False,
) -> Play:
    """Play *sessions*, all at the same time, through a new router over *engines*, which are restarted before.

    Args:
        engines: they listen already.
        policy: a shipped name or a file.
        sessions: what is played.
        speed: gaps are divided by this, as the engines' own times should be.
        progress: told of every answer: how many there are, and requests in all.
        by_lmcache: LMCache's lookup tells what the engines hold, and not the router's own prefix index.

    Raises:
        ConfigError, PolicyError: the policy cannot be used.
    """
    engines.reset()
    lmcache_url = engines.lmcache_url if by_lmcache else ""
    application = Application(settings(engines.urls, policy, lmcache_url=lmcache_url))
    total = sum(len(session.turns) for session in sessions)
    answers: list[AgentAnswer] = []

    def answered(answer: AgentAnswer) -> None:
        answers.append(answer)
        progress(len(answers), total)

    sock = listen("127.0.0.1", 0)
    stop = asyncio.Event()
    started = time.monotonic()
    async with asyncio.TaskGroup() as group:
        group.create_task(serve_port(application.data_app(), sock, stop=stop.wait, drain_s=_DRAIN_S))
        await _act(sessions, address_of(sock), speed, answered)
        took_s = time.monotonic() - started
        stop.set()
    kept = application.telemetry.decisions
    records = {record.id: record for answer in answers if (record := kept.get(answer.decision)) is not None}
    return Play(policy, answers, records, PlayFigures.of(answers, INSTANCES), took_s)


async def _act(sessions: Sequence[Session], router: str, speed: float, answered: Callable[[AgentAnswer], None]) -> None:
    """All agents at once; every other one speaks the other API."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, trust_env=False) as client, asyncio.TaskGroup() as group:
        for number, session in enumerate(sessions):
            delay_s = BEGIN_WITHIN_S / speed * number / len(sessions)
            dialect = Chat() if number % 2 else Messages()
            begun = play(session, dialect, client, router, delay_s=delay_s, speed=speed, answered=answered)
            group.create_task(begun, name=session.id)
