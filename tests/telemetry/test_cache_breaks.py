from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from smetric import names
from smetric.fleet.instance import Instance
from smetric.request.reader import ReaderSettings, parse
from smetric.request.request import Api, InferenceRequest, TokenRatio
from smetric.telemetry import cache_breaks
from smetric.telemetry.cache_breaks import KINDS, Breaks, CacheBreaks, Cause, client_kind, summary

Body = dict[str, Any]
SESSION = [(b"x-claude-code-session-id", b"s-1")]


def words(topic: str, count: int = 150) -> str:
    return " ".join(f"{topic}{number}" for number in range(count))


def picture(name: str) -> str:
    """About as many bytes as the router takes a picture to stand for."""
    return (name * 4096)[:4096]


def tool(name: str) -> Body:
    return {"name": name, "description": words(name, 60), "input_schema": {"type": "object"}}


def body(turn: int, session: str = "a") -> Body:
    """A request of an agent: tools, two system blocks, and per turn a thought with a tool call, then its result."""
    messages: list[Body] = [{"role": "user", "content": [{"type": "text", "text": words(f"task-{session}")}]}]
    for number in range(turn):
        call = {"type": "tool_use", "id": f"t{number}", "name": "Read", "input": {"path": f"{session}{number}"}}
        thought = {"type": "thinking", "thinking": words(f"thought-{session}{number}", 40), "signature": "x"}
        result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": words(f"file-{session}{number}")}
        image = {"type": "image", "source": {"type": "base64", "data": picture(f"{session}{number}")}}
        reminder = {"type": "text", "text": words(f"reminder-{number}", 30)}
        messages.append({"role": "assistant", "content": [thought, {"type": "text", "text": "so"}, call]})
        messages.append({"role": "user", "content": [result, image, reminder]})
    return {
        "model": "m",
        "max_tokens": 10,
        "tools": [tool("Read"), tool("Bash"), tool("Edit")],
        "system": [{"type": "text", "text": words("you-are", 60)}, {"type": "text", "text": words("rules", 200)}],
        "messages": messages,
    }


class Engine:
    """An engine that renders in its own way and remembers every prompt; and the router's record of what broke."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.breaks = CacheBreaks(lambda part, change: self.told.append((part, change)), clock=lambda: 50.0)
        self.instance = Instance("i", "http://i", models=["m"])
        self._held: list[str] = []

    def ask(self, body: Body, headers: list[tuple[bytes, bytes]] | None = None, *, client: str = "c") -> None:
        self.answer(self.read(body, headers), self.hit_share(body), client)

    def read(self, body: Body, headers: list[tuple[bytes, bytes]] | None = None) -> InferenceRequest:
        api = Api.MESSAGES if "max_tokens" in body else Api.CHAT
        return parse(api, json.dumps(body).encode(), headers or [], TokenRatio(), ReaderSettings())

    def answer(self, request: InferenceRequest, hit_share: float | None, client: str = "c") -> None:
        request.answering()
        self.breaks.answered(request, self.instance, hit_share, client)

    def hit_share(self, body: Body) -> float:
        order = ("cache_salt", "chat_template_kwargs", "tools", "system", "messages")
        text = json.dumps([body.get(name, "") for name in order])
        hit = max((_common(text, other) for other in self._held), default=0)
        self._held.append(text)
        return hit / len(text)

    def causes(self) -> list[tuple[str, str, str]]:
        return [(cause.part, cause.place, cause.change) for cause, _ in self.breaks.causes]


def _common(text: str, other: str) -> int:
    """How many characters both begin with."""
    return next(
        (at for at, pair in enumerate(zip(text, other, strict=False)) if pair[0] != pair[1]), min(len(text), len(other))
    )


def billing(body: Body, turn: int) -> None:
    body["system"].insert(0, {"type": "text", "text": f"x-other-billing-header: cc_version=2; cch={turn:08x};"})


def timestamp(body: Body, turn: int) -> None:
    body["system"][1]["text"] = f"Today is 12:0{turn}. " + body["system"][1]["text"]


def reordered_tools(body: Body, turn: int) -> None:
    body["tools"] = body["tools"][turn % 3 :] + body["tools"][: turn % 3]


def added_tool(body: Body, turn: int) -> None:
    body["tools"] += [tool("Web")] if turn > 1 else []


def removed_tool(body: Body, turn: int) -> None:
    body["tools"] = body["tools"][: 2 if turn > 1 else 3]


def edited_task(body: Body, turn: int) -> None:
    body["messages"][0]["content"][0]["text"] = f"It is 12:0{turn}. " + body["messages"][0]["content"][0]["text"]


def edited_reply(body: Body, turn: int) -> None:
    if turn > 2:
        body["messages"][1]["content"][1]["text"] = "otherwise"


def changed_result(body: Body, turn: int) -> None:
    if turn > 1:
        body["messages"][2]["content"][0]["content"] = "[old tool result cleared]"


def dropped_thinking(body: Body, turn: int) -> None:
    for message in body["messages"][1 : 2 * turn - 1 : 2]:
        del message["content"][0]


def changed_image(body: Body, turn: int) -> None:
    if turn > 1:
        body["messages"][2]["content"][1]["source"]["data"] = picture(f"scaled-{turn}")


def dropped_reminder(body: Body, turn: int) -> None:
    if turn > 2:
        del body["messages"][2]["content"][-1]


def template_arguments(body: Body, turn: int) -> None:
    body["chat_template_kwargs"] = {"today": f"2026-01-0{turn + 1}"}


def salted(body: Body, turn: int) -> None:
    body["cache_salt"] = f"salt-{turn}"


def space_in_system(body: Body, turn: int) -> None:
    body["system"][1]["text"] += " " * turn


def forgotten_beginning(body: Body, turn: int) -> None:
    if turn > 2:
        del body["messages"][1:3]


def swapped_messages(body: Body, turn: int) -> None:
    if turn > 2:
        body["messages"][1:5] = body["messages"][3:5] + body["messages"][1:3]


PLANTED = [
    (billing, "system", "system[0]", "changed"),
    (timestamp, "system", "system[1]", "changed"),
    (space_in_system, "system", "system[1]", "changed"),
    (reordered_tools, "tools", "tools", "reordered"),
    (added_tool, "tools", "tools", "added"),
    (removed_tool, "tools", "tools", "removed"),
    (edited_task, "user", "messages[0]", "changed"),
    (edited_reply, "assistant", "messages[1]", "changed"),
    (changed_result, "tool_result", "messages[2]", "changed"),
    (dropped_thinking, "assistant", "messages[1]", "changed"),
    (changed_image, "user", "messages[2]", "changed"),
    (dropped_reminder, "user", "messages[2]", "changed"),
    (template_arguments, "template", "template arguments", "changed"),
    (salted, "cache_salt", "cache_salt", "changed"),
    (forgotten_beginning, "assistant", "messages[1]", "removed"),
    (swapped_messages, "assistant", "messages[1]", "reordered"),
]


@pytest.mark.parametrize("headers", [SESSION, []], ids=["with a session header", "without one"])
@pytest.mark.parametrize(
    ("plant", "part", "place", "change"), PLANTED, ids=lambda value: getattr(value, "__name__", "")
)
def test_breaks_locate_planted_causes(
    plant: Callable[[Body, int], None], part: str, place: str, change: str, headers: list[tuple[bytes, bytes]]
) -> None:
    engine = Engine()
    for turn in range(5):
        planted = body(turn)
        plant(planted, turn)
        engine.ask(planted, headers)
    assert (part, place, change) in engine.causes()
    assert engine.causes()[0] == (part, place, change), "the first is the costliest"
    assert (part, change) in engine.told
    assert part in names.BROKEN_PARTS
    assert change in names.CHANGES


@pytest.mark.parametrize("headers", [SESSION, []])
def test_breaks_ignore_a_session_that_goes_on(headers: list[tuple[bytes, bytes]]) -> None:
    engine = Engine()
    for turn in range(6):
        engine.ask(body(turn), headers)
    assert engine.causes() == []
    assert (engine.breaks.follow_ups, engine.breaks.short) == (5, 0)


def test_breaks_ignore_fields_that_engines_do_not_render() -> None:
    engine = Engine()
    for turn in range(4):
        agents = body(turn)
        share = engine.hit_share(agents)
        agents["system"].insert(0, {"type": "text", "text": f"x-anthropic-billing-header: cch={turn:08x};"})
        agents["messages"][-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
        engine.answer(engine.read(agents, SESSION), share)
    assert (engine.causes(), engine.breaks.follow_ups, engine.breaks.short) == ([], 3, 0)


def test_breaks_number_places_as_the_client_sent_them() -> None:
    engine = Engine()
    for turn in range(4):
        agents = body(turn)
        timestamp(agents, turn)
        share = engine.hit_share(agents)
        agents["system"].insert(0, {"type": "text", "text": f"x-anthropic-billing-header: cch={turn:08x};"})
        engine.answer(engine.read(agents, SESSION), share)
    assert engine.causes() == [("system", "system[2]", "changed")]


def test_breaks_distinguish_each_request_from_a_single_one() -> None:
    engine = Engine()
    for number, session in enumerate("abcd"):
        for turn in range(5):
            planted = body(turn, session)
            timestamp(planted, 5 * number + turn)
            engine.ask(planted)
    (cause, breaks), *others = engine.breaks.causes
    assert cause == Cause("c", "system", "system[1]", "changed")
    assert (breaks.count, breaks.sessions, breaks.follow_ups, breaks.each_request) == (16, 4, 16, True)
    assert breaks.lost_tokens > 16 * 500
    assert breaks.last_at == 50.0
    assert others == []
    once = Engine()
    for turn in range(5):
        planted = body(turn)
        changed_result(planted, turn)
        once.ask(planted)
    [(_, breaks)] = once.breaks.causes
    assert (breaks.count, breaks.each_request) == (1, False)


def test_breaks_locate_causes_in_chat_completions() -> None:
    engine = Engine()
    for turn in range(4):
        messages: list[Body] = [{"role": "system", "content": f"Now: {turn}. " + words("rules")}]
        messages.append({"role": "user", "content": words("task")})
        for number in range(turn):
            messages.append({"role": "assistant", "content": words(f"reply{number}")})
            messages.append({"role": "user", "content": words(f"more{number}")})
        engine.ask({"model": "m", "messages": messages})
    assert engine.causes() == [("system", "messages[0]", "changed")]


@pytest.mark.parametrize(
    ("hit_share", "plants", "counts"),
    [
        (0.0, False, (3, 3, 3)),  # an eviction
        (0.5, True, (3, 2, 2)),  # the hit goes on far behind the part that differs: it was another conversation's
        (None, True, (0, 0, 0)),
    ],
    ids=["eviction", "hit behind the edit", "unknown hit"],
)
def test_breaks_ignore_causes_beyond_clients(
    hit_share: float | None, plants: bool, counts: tuple[int, int, int]
) -> None:
    engine = Engine()
    for turn in range(4):
        planted = body(turn)
        if plants:
            timestamp(planted, turn)
        engine.answer(engine.read(planted, SESSION), hit_share)
    assert engine.causes() == []
    assert (engine.breaks.follow_ups, engine.breaks.short, engine.breaks.unbroken) == counts


def test_breaks_ignore_restarts_of_the_engine() -> None:
    engine = Engine()
    for turn in range(4):
        planted = body(turn)
        timestamp(planted, turn)
        engine.ask(planted, SESSION)
        engine.instance.restarted()
    assert engine.causes() == []


def test_breaks_separate_parallel_conversations_of_a_session() -> None:
    """An agent and its sub-agents share a session id; so do a main model's title requests."""
    engine = Engine()
    for turn in range(5):
        for session in "abc":
            engine.ask(body(turn, session), SESSION)
        engine.ask({**body(0, f"title-{turn}"), "tools": []}, SESSION)
    assert engine.causes() == []
    assert (engine.breaks.follow_ups, engine.breaks.short) == (12, 0)


def test_breaks_separate_conversations_that_begin_alike() -> None:
    engine = Engine()
    for turn in range(4):
        for session in "ab":
            one = body(turn, session)
            one["messages"][0]["content"] = "hi"
            engine.answer(engine.read(one), 0.95)
    assert engine.causes() == []
    assert engine.breaks.conversations == 2


def test_breaks_ignore_going_back_and_trying_again() -> None:
    engine = Engine()
    for turn in (0, 1, 2, 2, 1, 2, 3):
        engine.ask(body(turn), SESSION)
    assert engine.causes() == []


def test_breaks_bound_conversations_and_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_breaks, "MAX_TRAILS", 5)
    engine = Engine()
    for number in range(20):
        engine.ask(body(1, f"s{number}-"))
    kept = engine.breaks
    assert kept.conversations == 5
    assert kept.parts == 5 * len(engine_parts(body(1)))
    monkeypatch.setattr(cache_breaks, "MAX_PARTS", 20)
    engine.ask(body(1, "last-"))
    assert 0 < kept.conversations < 3
    assert kept.parts <= 20
    monkeypatch.setattr(cache_breaks, "MAX_PARTS", 2)
    engine.ask(body(1, "none-"))
    assert (kept.conversations, kept.parts) == (0, 0)


def engine_parts(asked: Body) -> list[int]:
    request = Engine().read(asked)
    request.answering()
    assert request.parts is not None
    return list(request.parts.hashes)


def test_breaks_bound_conversations_of_one_session() -> None:
    engine = Engine()
    for number in range(50):
        engine.ask(body(1, f"s{number}-"), SESSION)
    assert engine.breaks.conversations == cache_breaks.MAX_ALIKE


def test_breaks_bound_causes_and_forget_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_breaks, "MAX_CAUSES", 2)
    engine = Engine()
    for number, client in enumerate("xyz"):
        for turn in range(3):
            planted = body(turn, client)
            timestamp(planted, turn + 3 * number)
            engine.ask(planted, client=client)
    assert {cause.client for cause, _ in engine.breaks.causes} == {"y", "z"}


def test_breaks_count_far_messages_as_one_place() -> None:
    engine = Engine()
    long = body(40)
    engine.ask(long, SESSION)
    edited = copy.deepcopy(body(41))
    edited["messages"][20]["content"][0]["content"] = "cleared"
    engine.ask(edited, SESSION)
    assert engine.causes() == [("tool_result", f"messages[{cache_breaks.MAX_PLACES}…]", "changed")]


def test_breaks_ignore_requests_without_conversation() -> None:
    engine = Engine()
    completion = parse(Api.COMPLETIONS, b'{"model":"m","prompt":"x"}', [], TokenRatio(), ReaderSettings())
    engine.answer(completion, 0.0)
    engine.answer(engine.read({"model": "m", "messages": []}), 0.0)
    assert engine.breaks.conversations == 0


def test_breaks_of_few_follow_ups_are_not_each_request() -> None:
    assert not Breaks(count=2, follow_ups=2).each_request
    assert Breaks(count=9, follow_ups=10).each_request
    assert not Breaks(count=8, follow_ups=10).each_request


@pytest.mark.parametrize(
    ("cause", "breaks", "line"),
    [
        (Cause("codex", "tools", "tools", "reordered"), Breaks(5, 2, 5), "codex: tools is reordered each request"),
        (Cause("codex", "tools", "tools", "added"), Breaks(1, 1, 4), "codex: tools was added 1 time"),
        (Cause("o", "user", "messages[3]", "changed"), Breaks(2, 2, 9), "o: messages[3] (user) changed 2 times"),
        (Cause("o", "system", "system[0]", "changed"), Breaks(9, 2, 9), "o: system[0] changes each request"),
        (Cause("o", "cache_salt", "cache_salt", "changed"), Breaks(9, 2, 9), "o: cache_salt changes each request"),
    ],
)
def test_summary_of_a_break_is_one_line(cause: Cause, breaks: Breaks, line: str) -> None:
    sessions = "2 sessions" if breaks.sessions == 2 else "1 session"
    assert summary(cause, breaks) == f"{line}, {sessions}"


@pytest.mark.parametrize(
    ("agent", "kind"),
    [
        (b"claude-cli/2.0.1 (external, cli)", "claude-code"),
        (b"codex_cli_rs/0.46.0 (Mac OS 15.6.1; arm64) iTerm", "codex"),
        (b"OpenAI/Python 1.99.0", "openai-sdk"),
        (b"AsyncAnthropic/Python 0.60.0", "anthropic-sdk"),
        (b"curl/8.5.0", "curl"),
        (b"Mozilla/5.0 claude-cli/2", "other"),
        (b"", "other"),
        (b"\xff" * 4000, "other"),
    ],
)
def test_client_kind_is_that_of_the_product(agent: bytes, kind: str) -> None:
    assert client_kind([(b"accept", b"*/*"), (b"user-agent", agent)]) == kind
    assert kind in KINDS
    assert client_kind([]) == "other"
