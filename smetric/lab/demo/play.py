"""Plays of recorded agent sessions through a router over emulated engines.

Texts are filler of the recorded lengths; `data/README.md` names the source of the lengths and gaps.
"""

from __future__ import annotations

import asyncio
import math
import re
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
from smetric.config.values import ParamValue
from smetric.fleet.record import DecisionRecord
from smetric.http.listener import address_of, listen, serve_port
from smetric.lab.emulator import instance, prompt
from smetric.lab.emulator.fleet import EmulatedFleet
from smetric.lab.emulator.instance import EmulatedSettings
from smetric.lab.engine import EngineConfig

_FILE = Path(__file__).parent / "data" / "sessions.jsonl"
#: Model name of the emulated engines.
MODEL = "emulated"
_TOOLS = ("Bash", "Read", "Edit", "Write", "Glob", "Grep", "Task", "WebFetch")
_PARAMETERS = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
#: Window of the imbalance, seconds.
WINDOW_S = 1.0
#: Number of engines.
INSTANCES = 4
#: KV blocks of one engine. All sessions together end with some 120,000 tokens. One engine has room for more than its
#: share but far from all of them, so that the routing of a session's next request matters.
BLOCKS = 2560
BLOCK_SIZE = 16
#: The sessions begin evenly spread over this time, seconds.
BEGIN_WITHIN_S = 6.0
#: Time for open requests after the agents have ended, seconds.
_DRAIN_S = 2.0


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request of a session.

    Args:
        new: tokens that the user or a tool adds.
        output: tokens of the reply.
        gap_s: seconds between the previous reply and this request.
    """

    new: int
    output: int
    gap_s: float


class Session(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Session of one agent.

    Args:
        id: its name in the source.
        tools: tokens of the tool definitions; equal numbers mean equal tools.
        system: tokens of the system prompt; it is equal where both numbers are.
        turns: its requests, the first one included.
    """

    id: str
    tools: int
    system: int
    turns: tuple[Turn, ...]


def load_sessions() -> list[Session]:
    """Return all recorded sessions in the order of the file."""
    return [msgspec.json.decode(line, type=Session) for line in _FILE.read_bytes().splitlines()]


@dataclass(slots=True)
class Reply:
    """Reply so far.

    Args:
        text: pieces of text.
        prompt_tokens: from the engine's `usage`.
        cached_tokens: from the engine's `usage`.
        is_complete: the stream reached the end that its API defines.
    """

    text: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    is_complete: bool = False


class Dialect(Protocol):
    """Form of requests and streamed replies in one API."""

    path: str
    headers: Mapping[str, str]

    def body(self, session: Session, replies: Sequence[str]) -> bytes:
        """Return the request after *replies*, with the whole history."""

    def read(self, data: bytes, into: Reply) -> None:
        """Add the payload of one `data: ` line of a streamed reply to *into*."""


class Chat:
    """OpenAI chat: `/v1/chat/completions`."""

    path = "/v1/chat/completions"
    headers: Mapping[str, str] = {"content-type": "application/json", "authorization": "Bearer demo"}

    def body(self, session: Session, replies: Sequence[str]) -> bytes:
        """Return the request: system prompt, then turns and replies alternately."""
        messages = [{"role": "system", "content": _system(session)}]
        for number, text in enumerate(_turn_texts(session, len(replies))):
            messages.append({"role": "user", "content": text})
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
        """Add a chunk: text, or usage at the end; an error has neither."""
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
    """Anthropic Messages as Claude Code uses it: the billing header always changes, and cache marks move."""

    path = "/v1/messages?beta=true"
    headers: Mapping[str, str] = {
        "content-type": "application/json",
        "anthropic-version": "2023-06-01",
        "x-api-key": "demo",
    }

    def body(self, session: Session, replies: Sequence[str]) -> bytes:
        """Return the request; the system prompt and the last message carry the cache mark."""
        mark = {"cache_control": {"type": "ephemeral"}}
        messages: list[dict[str, Any]] = []
        for number, text in enumerate(_turn_texts(session, len(replies))):
            last = number == len(replies)
            messages.append({"role": "user", "content": [{"type": "text", "text": text, **(mark if last else {})}]})
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
        """Add an event: text, usage at the end, or the end."""
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


def _filler(key: str, tokens: int) -> str:
    return instance.text(xxh3_64_intdigest(key.encode()), max(0, tokens))


def _turn_texts(session: Session, replies: int) -> list[str]:
    """Return the text of each turn up to the one after *replies* replies."""
    turns = session.turns[: replies + 1]
    return [_filler(f"{session.id} {number}", turn.new) for number, turn in enumerate(turns)]


def _system(session: Session) -> str:
    return _filler(f"system {session.tools} {session.system}", session.system)


def _tools(session: Session) -> list[tuple[str, str]]:
    """Return names and descriptions; with their schemas they have about the recorded length."""
    schema = prompt.count(prompt.encode(orjson.dumps(_PARAMETERS).decode())) + 20
    each = session.tools // len(_TOOLS) - schema
    return [(name, _filler(f"tool {name} {session.tools}", each)) for name in _TOOLS]


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """Answer as the client saw it; token counts are the engine's own, times are seconds of the monotonic clock.

    Args:
        session: id of the session.
        turn: its place in the session, starting at 0.
        status: HTTP status; 0 without an answer.
        is_whole: its status is 200 and its stream reached the end.
        decision: id of the routing decision.
        instance: id of the instance that answered.
        sent_s: time of the request.
        first_byte_s: time of the first event; without events, the end.
        ended_s: time of the end.
        prompt_tokens: length of the prompt.
        cached_tokens: cached part of the prompt.
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
        """Seconds from the request to the first event."""
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
    """Send the requests of *session*, each with the replies so far; stop at the first answer that is not whole.

    Args:
        session: the requests.
        dialect: the API.
        client: opens the connections.
        router: base URL.
        delay_s: seconds before the first request.
        speed: divides the recorded gaps.
        answered: receives every answer.
    """
    replies: list[str] = []
    await asyncio.sleep(delay_s)
    for number, turn in enumerate(session.turns):
        await asyncio.sleep(turn.gap_s / speed)
        answer, text = await _ask(session, number, dialect, dialect.body(session, replies), client, router)
        answered(answer)
        if not answer.is_whole:
            return
        replies.append(text)


async def _ask(
    session: Session, turn: int, dialect: Dialect, body: bytes, client: aiohttp.ClientSession, router: str
) -> tuple[AgentAnswer, str]:
    """Send one request; return the answer and its text."""
    reply, status = Reply(), 0
    headers: Mapping[str, str] = {}
    sent_s, first_byte_s = time.monotonic(), None
    try:
        async with client.post(router + dialect.path, data=body, headers=dialect.headers) as response:
            status, headers = response.status, response.headers
            async for line in response.content:
                if status == 200 and line.startswith(b"data: "):
                    first_byte_s = first_byte_s or time.monotonic()
                    dialect.read(line[6:].strip(), reply)
    except aiohttp.ClientError:
        # The report counts a broken connection as an answer that is not whole.
        reply.is_complete = False
    ended_s = time.monotonic()
    answer = AgentAnswer(
        session=session.id,
        turn=turn,
        status=status,
        is_whole=status == 200 and reply.is_complete,
        decision=headers.get("x-smetric-decision-id", ""),
        instance=headers.get("x-smetric-instance", ""),
        sent_s=sent_s,
        first_byte_s=first_byte_s or ended_s,
        ended_s=ended_s,
        prompt_tokens=reply.prompt_tokens,
        cached_tokens=reply.cached_tokens,
    )
    return answer, "".join(reply.text)


@dataclass(frozen=True, slots=True)
class PlayFigures:
    """Sums over the answers of one policy.

    Args:
        requests: sent requests.
        failed: answers that are not whole.
        hit_rate: cached tokens ÷ prompt tokens, over all answers.
        imbalance: see `imbalance`.
        ttft_p50_s: median time to the first event.
        ttft_p90_s: its 90th percentile.
        followups: whole answers after the first of their session.
        returned: followups that went to the instance of the previous answer.
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
        """Return the figures of *answers* on *instances* instances."""
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
    """Return each answer with the instance of its session's previous answer; empty for a first turn."""
    at = {(answer.session, answer.turn): answer.instance for answer in answers}
    return [(answer, at.get((answer.session, answer.turn - 1), "")) for answer in answers]


def imbalance(answers: Sequence[AgentAnswer], instances: int) -> float:
    """Return requests in flight on the fullest instance ÷ their mean, weighted by that mean over windows of `WINDOW_S`.

    1 is even; the number of instances means that one instance has all requests. An empty window has no weight.
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
    """Return the smallest value that at least *share* of *ordered* does not exceed; 0 for none."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def engines(speed: float = 1.0) -> EmulatedFleet:
    """Return the emulated engines, *speed* times as fast as an H20; they listen inside `async with`."""
    config = EngineConfig(block_size=BLOCK_SIZE, blocks=BLOCKS, max_model_len=BLOCKS * BLOCK_SIZE)
    return EmulatedFleet(INSTANCES, EmulatedSettings(model=MODEL, engine=config, time_scale=speed), lmcache=True)


def policy_and_params(policy: str) -> tuple[str, Mapping[str, ParamValue]]:
    """Return the name or file of a policy such as `smetric FLOOR=2`, and its parameters."""
    name, *params = re.split(r" (?=\w+=)", policy)
    return name, dict(param.split("=", 1) for param in params)


def settings(
    urls: Sequence[str], policy: str, *, lmcache_url: str = "", port: int = 0, admin_port: int = 0
) -> Settings:
    """Return the settings of a router over the engines at *urls*; all others are defaults.

    With *lmcache_url* that lookup service replaces the prefix index.
    """
    instances = {f"vllm-{n}": url for n, url in enumerate(urls, 1)}
    name, params = policy_and_params(policy)
    made = Settings(
        listen=Listen(port=port),
        admin=Admin(port=admin_port),
        instances=tuple(InstanceSettings(id=id, url=url) for id, url in instances.items()),
        policy=name,
        params=params,
    )
    if not lmcache_url:
        return made
    ids = {id: url.removeprefix("http://") for id, url in instances.items()}
    return msgspec.structs.replace(
        made,
        prefix_index=PrefixIndexSettings(enabled=False),
        lmcache=LmcacheSettings(url=lmcache_url, instances=ids),
        tokenizer=TokenizerSettings(source="engine"),
        # Engines, tokenizing and look-ups share this machine, so that they take longer than in production.
        lookup=LookupSettings(deadline_base=1.0, deadline_cap=2.0),
    )


@dataclass(frozen=True, slots=True)
class Play:
    """Result of one policy.

    Args:
        policy: a shipped name or a file, with parameters, as given.
        answers: every answer, in the order of their ends.
        records: decision records of those answers by id, as far as the router keeps them.
        figures: sums over the answers.
        took_s: duration in seconds.
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
    """Play *sessions* concurrently through a new router over *engines*, which are restarted before.

    Args:
        engines: they listen already.
        policy: a shipped name or a file, with parameters: `smetric FLOOR=2`.
        sessions: the sessions to play.
        speed: divides the gaps; the engines' own times should be divided by the same.
        progress: receives the number of answers, and of all requests, after every answer.
        by_lmcache: use LMCache's lookup instead of the router's prefix index.

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
    """Run all agents concurrently; they alternate between the two APIs."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, trust_env=False) as client, asyncio.TaskGroup() as group:
        for number, session in enumerate(sessions):
            delay_s = BEGIN_WITHIN_S / speed * number / len(sessions)
            dialect = Chat() if number % 2 else Messages()
            begun = play(session, dialect, client, router, delay_s=delay_s, speed=speed, answered=answered)
            group.create_task(begun, name=session.id)
