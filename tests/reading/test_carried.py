"""Whatever of a body is known from an earlier one, a request comes out as if all of it had been read."""

from __future__ import annotations

import copy
import gc
import json
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smetric.errors import RequestError
from smetric.request import reader
from smetric.request.body import STRIDE
from smetric.request.memo import Memory
from smetric.request.prompt import BLOCK_BYTES
from smetric.request.reader import Reading, parse
from smetric.request.request import Api, InferenceRequest, TokenRatio

Body = dict[str, Any]
MARK = {"cache_control": {"type": "ephemeral"}}
LONG = 'a tale \n of a "tub" ' * (STRIDE // 16)


class Reader:
    """Reads bodies with a memory of its own, and each once more without one."""

    def __init__(self, most_bytes: int = 1 << 25) -> None:
        self.memory = Memory(BLOCK_BYTES, most_bytes, STRIDE)

    def read(self, api: Api, body: bytes, memory: Memory) -> InferenceRequest:
        kept, reader.memory = reader.memory, memory
        try:
            return parse(api, body, [], TokenRatio(), Reading())
        finally:
            reader.memory = kept

    def answered(self, api: Api, body: bytes) -> int:
        """Read *body* and let its answer begin; returns how many of its messages were not read anew."""
        request = self.read(api, body, self.memory)
        prompt = request.prompt
        assert prompt is not None
        carried = prompt._carrying.carried if prompt._carrying is not None else None
        whole = told(self.read(api, body, Memory(BLOCK_BYTES)))
        assert told(request) == whole
        return carried.mark.messages if carried is not None else 0


def told(request: InferenceRequest) -> Any:
    """All that a request says of its conversation; its answer begins with that."""
    prompt = request.prompt
    assert prompt is not None
    lengths, last = (prompt.size, prompt.history_bytes, prompt.question_bytes), prompt.last_message()
    hashes = prompt.hashes
    request.answering()
    return (
        request.turn,
        request.prompt_len,
        request.est_hit,
        request.template_args,
        lengths,
        last,
        hashes,
        request.parts,
    )


def packed(body: Body) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def spaced(body: Body) -> bytes:
    return json.dumps(body).encode()


def spread(body: Body) -> bytes:
    return json.dumps(body, indent=1).encode()


# ── sessions ─────────────────────────────────────────────────────────────────


def chat(turns: int) -> Body:
    messages: list[Body] = [{"role": "system", "content": LONG}, {"role": "user", "content": "begin"}]
    for n in range(turns):
        call = [{"id": f"c{n}", "type": "function", "function": {"name": "read", "arguments": f'{{"n":{n}}}'}}]
        messages += [
            {"role": "assistant", "content": None, "tool_calls": call},
            {"role": "tool", "tool_call_id": f"c{n}", "content": f"result {n} " * 300},
        ]
    return {"model": "m", "messages": messages, "tools": [{"name": "read"}], "temperature": 0}


def claude(turns: int, marked: int = 2) -> Body:
    """As Claude Code sends it: messages first, marks on the last ones, a header that changes each time."""
    messages: list[Body] = [{"role": "user", "content": [{"type": "text", "text": LONG}]}]
    for n in range(turns):
        use = {"type": "tool_use", "id": f"t{n}", "name": "Read", "input": {"path": f"/src/{n}.py"}}
        thought = {"type": "thinking", "thinking": f"hm {n}", "signature": "s"}
        result = {"type": "tool_result", "tool_use_id": f"t{n}", "content": f"line \u001b[31m{n} " * 200}
        messages += [{"role": "assistant", "content": [thought, use]}, {"role": "user", "content": [result]}]
    messages = copy.deepcopy(messages)
    for message in messages[-marked:]:
        message["content"][-1] |= MARK
    system = [
        {"type": "text", "text": f"x-anthropic-billing-header: cc={turns}"},
        {"type": "text", "text": "You are. " * 3000, **MARK},
    ]
    return {"model": "m", "messages": messages, "system": system, "tools": [{"name": "Read"}], "max_tokens": 9}


def responses(turns: int) -> Body:
    items: list[Body] = [{"type": "message", "role": "user", "content": LONG}]
    for n in range(turns):
        items += [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": f"hm {n}"}]},
            {"type": "function_call", "call_id": f"c{n}", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": f"c{n}", "output": f"result {n} " * 200},
        ]
    return {"model": "m", "instructions": "be kind", "input": items}


SESSIONS: dict[str, tuple[Api, Callable[[int], Body]]] = {
    "chat": (Api.CHAT, chat),
    "claude": (Api.MESSAGES, claude),
    "responses": (Api.RESPONSES, responses),
}


@pytest.mark.parametrize("write", [packed, spaced, spread])
@pytest.mark.parametrize("session", SESSIONS)
def test_follow_ups_read_their_last_messages_only_and_come_out_as_if_all_were_read(
    session: str, write: Callable[[Body], bytes]
) -> None:
    reader = Reader()
    api, body = SESSIONS[session]
    field = "input" if api is Api.RESPONSES else "messages"
    for turns in range(6):
        known = reader.answered(api, write(body(turns)))
        if turns > 0:
            assert len(body(turns)[field]) - known <= 6


def test_a_body_sent_again_and_a_trailing_answer_are_read_whole() -> None:
    reader = Reader()
    reader.answered(Api.CHAT, packed(chat(2)))
    reader.answered(Api.CHAT, packed(chat(2)))
    prefill = chat(3)
    prefill["messages"].append({"role": "assistant", "content": "I begin"})
    assert reader.answered(Api.CHAT, packed(prefill)) == 0
    assert reader.answered(Api.CHAT, packed(chat(4))) > 0


CHANGES: dict[str, Callable[[Body], object]] = {
    "other tools": lambda body: body["tools"].append({"name": "write"}),
    "another model": lambda body: body.update(model="n"),
    "a salt": lambda body: body.update(cache_salt="s"),
    "an edited message": lambda body: body["messages"][1].update(content="began"),
    "an edited answer": lambda body: body["messages"][-2].update(content="no"),
    "a message less": lambda body: body["messages"].pop(2),
    "no messages but one": lambda body: body.update(messages=body["messages"][:1]),
    "more of the last message": lambda body: body["messages"][-1].update(content="more"),
    "a user who speaks twice": lambda body: body["messages"].append({"role": "user", "content": "and?"}),
    "template arguments": lambda body: body.update(chat_template_kwargs={"x": 1}),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("turns", [2, 3])
def test_a_body_that_goes_on_otherwise_is_read_as_what_it_is(change: str, turns: int) -> None:
    reader = Reader()
    reader.answered(Api.CHAT, packed(chat(2)))
    body = chat(turns)
    CHANGES[change](body)
    reader.answered(Api.CHAT, packed(body))


@pytest.mark.parametrize(
    "after", [b",]}", b"", b"]", b",{}", b",null]}", b',{"role":5}]}', b'],"messages":[]}', b'],"model":"x"}', b"] ,x}"]
)
def test_what_is_wrong_behind_known_messages_is_told_as_of_the_whole_body(after: bytes) -> None:
    reader = Reader()
    body = {"model": "m", "messages": chat(2)["messages"]}
    reader.answered(Api.CHAT, packed(body))
    wrong = packed(body).removesuffix(b"]}") + after
    with pytest.raises(RequestError) as whole:
        reader.read(Api.CHAT, wrong, Memory(BLOCK_BYTES))
    with pytest.raises(RequestError) as short:
        reader.read(Api.CHAT, wrong, reader.memory)
    assert str(short.value) == str(whole.value)


TEXT = st.text(st.sampled_from('aü🙂"\\/\n\x1b<|>{}[],:'), max_size=40)
LENGTHS = st.sampled_from([1, 30, 2000])
SAID = st.builds(lambda text, times: text * times, TEXT, LENGTHS)
CONTENT = st.one_of(
    SAID,
    st.none(),
    st.lists(
        st.one_of(
            st.builds(lambda text: {"type": "text", "text": text}, SAID),
            st.builds(lambda text: {"type": "tool_result", "content": text}, SAID),
            st.builds(lambda text: {"type": "tool_use", "name": "f", "input": {"role": text}}, SAID),
            st.just({"type": "image", "source": {"data": "x"}}),
            SAID,
        ),
        max_size=3,
    ),
)
MESSAGE = st.builds(
    lambda role, content, extra: {"role": role, "content": content} | extra,
    st.sampled_from(["user", "user", "assistant", "tool", "system", "odd"]),
    CONTENT,
    st.sampled_from([{}, {}, {"name": "n"}, {"type": "message"}, {"tool_calls": [{"role": "x"}]}]),
)


@settings(max_examples=60)
@given(
    st.lists(st.lists(MESSAGE, min_size=1, max_size=3), min_size=2, max_size=5),
    st.sampled_from([packed, spaced, spread]),
    st.sampled_from([Api.CHAT, Api.MESSAGES, Api.RESPONSES]),
    st.booleans(),
)
def test_no_session_is_read_otherwise_for_what_is_known_of_it(
    steps: list[list[Body]], write: Callable[[Body], bytes], api: Api, first: bool
) -> None:
    reader = Reader()
    field, lead = ("input", "instructions") if api is Api.RESPONSES else ("messages", "system")
    messages: list[Body] = [{"role": "user", "content": LONG}]
    for step in steps:
        messages = messages + step
        rest = {lead: "s" * 3000, "tools": [{"name": "f"}]}
        reader.answered(api, write({field: messages} | rest if first else rest | {field: messages}))


# ── bounds ───────────────────────────────────────────────────────────────────


def bodies(count: int) -> Iterator[bytes]:
    for number in range(count):
        yield packed({"model": "m", "messages": [{"role": "user", "content": f"{number} {LONG}"}]})


def test_what_is_remembered_is_bounded_and_what_was_used_longest_ago_goes_first() -> None:
    reader = Reader(20_000)
    for body in bodies(40):
        reader.answered(Api.CHAT, body)
        assert 0 < reader.memory.bytes <= 20_000
    families = list(reader.memory._families)
    assert sum(family.size for family in families) == reader.memory.bytes
    assert len(reader.memory._by_place) == len(families)


def test_a_session_takes_the_room_of_one_body_however_long_it_goes_on() -> None:
    reader = Reader()
    for turns in range(20):
        reader.answered(Api.MESSAGES, packed(claude(turns)))
    # The first body is of no use to the second, where its mark has moved.
    assert len(reader.memory._families) == 2


def test_of_small_bodies_nothing_is_remembered() -> None:
    reader = Reader()
    small = {"messages": [{"role": "user", "content": "x" * (STRIDE // 2)}]}
    reader.answered(Api.CHAT, packed(small))
    assert reader.memory.bytes == 0


@pytest.mark.parametrize(("between", "is_remembered"), [(100_000, True), (2_000_000, False)])
def test_the_end_of_the_text_is_not_looked_for_through_megabytes(between: int, is_remembered: bool) -> None:
    reader = Reader()
    last = {"role": "user", "content": "so it ends " * 70, "more": "z" * between}
    body = packed({"messages": [{"role": "user", "content": LONG}, last]})
    reader.answered(Api.CHAT, body)
    assert (reader.memory.bytes > 0) is is_remembered
    reader.answered(Api.CHAT, body)


@pytest.mark.parametrize("spaces", [1, 1000, STRIDE, 5 * STRIDE])
@pytest.mark.parametrize("place", [b"}%b,{", b"},%b{", b"}%b]"])
def test_white_space_between_messages_is_looked_through_within_bounds(spaces: int, place: bytes) -> None:
    reader, messages = Reader(), packed(chat(3)).partition(b',"tools"')
    plain = place.replace(b"%b", b"")
    body = (place % (b" " * spaces)).join(messages[0].rsplit(plain, 1)) + b"".join(messages[1:])
    assert json.loads(body) == chat(3)
    reader.answered(Api.CHAT, body)
    assert (reader.memory.bytes > 0) is (spaces < STRIDE or plain != b"}]")
    reader.answered(Api.CHAT, body)


def test_no_text_is_remembered() -> None:
    reader = Reader()
    reader.answered(Api.CHAT, packed({"messages": [{"role": "user", "content": "canary " * STRIDE}]}))
    (family,) = reader.memory._families
    for _, carried in family.ends:
        assert b"canary" not in b"".join(piece for piece in carried.rest if isinstance(piece, bytes))
        assert {piece for piece in carried.rest if isinstance(piece, bytes)} <= {b"<|", b"|>"}


@pytest.mark.parametrize("turns", [1, 30])
@pytest.mark.parametrize("session", ["chat", "claude"])
def test_the_bound_counts_real_bytes(session: str, turns: int) -> None:
    reader = Reader()
    api, body = SESSIONS[session]
    first = reader.read(api, packed(body(turns)), reader.memory)
    assert first.prompt is not None
    raw = [packed(body(turns) | {"model": str(number)}) for number in range(30)]
    for one in raw:
        reader.read(api, one, reader.memory)  # so that it has been screened
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for one in raw:
            request = reader.read(api, one, reader.memory)
            assert request.prompt is not None
            _ = request.prompt.hashes
            request.answering()
        del request
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert reader.memory.bytes / 2 < taken <= reader.memory.bytes


def test_messages_that_nest_too_deeply_where_an_answer_begins_are_not_remembered() -> None:
    """The stack is higher there than where the body was read."""
    before = Reader()
    for depth in range(sys.getrecursionlimit() - 150, sys.getrecursionlimit() - 50, 10):
        message = b'{"role":"user","content":"x","more":%b}' % (b"[" * depth + b"]" * depth)
        body = b'{"messages":[{"role":"user","content":"%b"},%b]}' % (b"x" * 2 * STRIDE, message)
        try:
            request = before.read(Api.CHAT, body, before.memory)
        except RequestError:
            continue
        assert request.prompt is not None
        assert request.prompt.hashes.blocks
        higher(100, request.answering)
        assert request.parts is not None


def higher(frames: int, call: Callable[[], None]) -> None:
    if frames:
        higher(frames - 1, call)
    else:
        call()
