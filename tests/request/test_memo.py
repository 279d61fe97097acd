"""Memory of earlier bodies: a request is read as if nothing had been known."""

from __future__ import annotations

import copy
import gc
import json
import random
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smetric.errors import RequestError
from smetric.request import conversation, memo, prompt, reader
from smetric.request.memo import MAX_VALUES, MOST_PLACES, STRIDE, UNCOUNTED_BYTES, BodyScreen, PrefixMemo
from smetric.request.reader import ReaderSettings, parse
from smetric.request.request import Api, InferenceRequest, TokenRatio
from tests.request.outcome import all_of, outcome

PIECE = st.sampled_from(
    [
        b"a",
        "ü".encode(),
        "模".encode(),
        "🙂".encode(),
        b"\\\\",
        b"\\n",
        b"\\u00fc",
        b"\\/",
        b"/",
        b"u",
        b"\xff",
        b"\xc3",
        b"\xa9",
    ]
)


def found(screen: BodyScreen, body: bytes) -> bool | str:
    """Return whether all is plain, or the refusal."""
    try:
        return screen(body).is_plain
    except RequestError as error:
        return str(error)


@given(st.lists(st.tuples(st.integers(0, 6), st.lists(PIECE, max_size=6)), min_size=1, max_size=6))
def test_screen_finds_the_same_with_and_without_memory(bodies: list[tuple[int, list[bytes]]]) -> None:
    one = BodyScreen()
    for distance, pieces in bodies:
        # All begin alike, and part around the places up to which findings are remembered.
        tail = b"".join(pieces)
        for length in (STRIDE - distance, 2 * STRIDE - distance):
            body = b"x" * length + tail + b"y" * (length % 7) * 100
            assert found(one, body) == found(BodyScreen(), body)
            assert found(one, body + b"z" * STRIDE) == found(BodyScreen(), body + b"z" * STRIDE)


@pytest.mark.parametrize(
    ("text", "is_plain"),
    [
        ('plain: ü 模 🙂 \\n \\t \\" \\\\ / u', True),
        ("\\u00fc", False),
        ("\\u001b", False),
        ("\\/", False),
        ("\\\\users", False),
    ],
)
@pytest.mark.parametrize("before", [0, STRIDE - 1, STRIDE, 3 * STRIDE - 1])
def test_screen_finds_escapes_that_are_a_matter_of_choice(text: str, is_plain: bool, before: int) -> None:
    body = b"x" * before + text.encode()
    assert BodyScreen()(body).is_plain is is_plain


@pytest.mark.parametrize("before", ["", "x" * (STRIDE - 1), "x" * (STRIDE - 2) + "ü", "模" * STRIDE])
@pytest.mark.parametrize("wrong", [b"\xff", b"\xc3", b"\xe6\xa8", b"\xed\xa0\x80", b"\xc0\xaf"])
def test_screen_refuses_other_encodings(before: str, wrong: bytes) -> None:
    screen = BodyScreen()
    assert screen(before.encode() + b'"').is_plain
    with pytest.raises(RequestError, match="UTF-8"):
        screen(before.encode() + wrong + b'"')


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":[' + b"[]," * 3_300_000 + b"1]}",
        b'{"messages":[' + b"{}," * 200_000 + b"{}]}",
        b"{" + b",".join(b'"k%d":1' % i for i in range(900_000)) + b"}",
        b'{"a":[' + b'"\\\\",' * 200_000 + b"1]}",
    ],
    ids=["lists", "objects", "members", "strings"],
)
def test_screen_refuses_too_many_values_each_time(body: bytes) -> None:
    screen = BodyScreen()
    for more in (b"", b"", b" " * STRIDE):
        with pytest.raises(RequestError, match=str(MAX_VALUES)) as caught:
            screen(body + more)
        assert caught.value.status == 400


def test_screen_counts_values_over_growing_bodies() -> None:
    screen = BodyScreen()
    body = b'{"a":['
    while len(body) < 8 * MAX_VALUES:
        body += b"{}," * 4000
        is_refused = isinstance(found(screen, body), str)
        assert is_refused is (len(body) > UNCOUNTED_BYTES and body.count(b"{") + 1 > MAX_VALUES)


def test_screen_ignores_brackets_and_quotes_inside_strings() -> None:
    code = json.dumps({"a": '{"[' * MAX_VALUES + "\\" + '"'}).encode()
    assert len(code) > UNCOUNTED_BYTES / 2
    body = code[:-1] + b',"b":"' + b"x" * UNCOUNTED_BYTES + b'"}'
    assert BodyScreen()(body).is_plain


def test_screen_memory_is_bounded_and_has_no_text() -> None:
    screen = BodyScreen()
    for number in range(MOST_PLACES // 1000 + 2):
        screen(b"%03d" % number + b"x" * 1000 * STRIDE)
    assert len(screen._seen) == MOST_PLACES
    assert all(type(each) is int for item in screen._seen.items() for each in item)


Body = dict[str, Any]
MARK = {"cache_control": {"type": "ephemeral"}}
LONG = 'a tale \n of a "tub" ' * (STRIDE // 16)


class Reader:
    """Reads bodies with a memory of its own, and each once more without one."""

    def __init__(self, most_bytes: int = 1 << 25) -> None:
        self.memory = PrefixMemo(most_bytes, STRIDE)

    def read(self, api: Api, body: bytes, memory: PrefixMemo) -> InferenceRequest:
        kept, reader.memo = reader.memo, memory
        try:
            return parse(api, body, [], TokenRatio(), ReaderSettings())
        finally:
            reader.memo = kept

    def answered(self, api: Api, body: bytes) -> int:
        """Read *body* and let its answer begin; returns how many of its messages were not read anew."""
        request = self.read(api, body, self.memory)
        prompt = request.prompt
        assert prompt is not None
        remember = prompt._remember
        whole = all_of(self.read(api, body, PrefixMemo()))
        assert all_of(request) == whole
        entry = remember.args[3] if isinstance(remember, partial) else None
        return entry.position.messages if entry is not None else 0


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
def test_memo_reads_only_last_messages_of_follow_ups(session: str, write: Callable[[Body], bytes]) -> None:
    reader = Reader()
    api, body = SESSIONS[session]
    field = "input" if api is Api.RESPONSES else "messages"
    for turns in range(6):
        known = reader.answered(api, write(body(turns)))
        if turns > 0:
            assert len(body(turns)[field]) - known <= 6


def test_memo_reads_repeated_body_and_prefill_whole() -> None:
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
    "two messages of the user": lambda body: body["messages"].append({"role": "user", "content": "and?"}),
    "template arguments": lambda body: body.update(chat_template_kwargs={"x": 1}),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("turns", [2, 3])
def test_memo_reads_changed_body_correctly(change: str, turns: int) -> None:
    reader = Reader()
    reader.answered(Api.CHAT, packed(chat(2)))
    body = chat(turns)
    CHANGES[change](body)
    reader.answered(Api.CHAT, packed(body))


@pytest.mark.parametrize(
    "after", [b",]}", b"", b"]", b",{}", b",null]}", b',{"role":5}]}', b'],"messages":[]}', b'],"model":"x"}', b"] ,x}"]
)
def test_memo_gives_same_errors_after_known_messages(after: bytes) -> None:
    reader = Reader()
    body = {"model": "m", "messages": chat(2)["messages"]}
    reader.answered(Api.CHAT, packed(body))
    wrong = packed(body).removesuffix(b"]}") + after
    with pytest.raises(RequestError) as whole:
        reader.read(Api.CHAT, wrong, PrefixMemo())
    with pytest.raises(RequestError) as short:
        reader.read(Api.CHAT, wrong, reader.memory)
    assert str(short.value) == str(whole.value)


# ── bounds ───────────────────────────────────────────────────────────────────


def bodies(count: int) -> Iterator[bytes]:
    for number in range(count):
        yield packed({"model": "m", "messages": [{"role": "user", "content": f"{number} {LONG}"}]})


def test_memo_is_bounded_and_evicts_least_recently_used() -> None:
    reader = Reader(20_000)
    for body in bodies(40):
        reader.answered(Api.CHAT, body)
        assert 0 < reader.memory.bytes <= 20_000
    remembered = list(reader.memory._bodies)
    assert sum(body.size for body in remembered) == reader.memory.bytes
    assert len(reader.memory._bodies.by_place) == len(remembered)


def test_memo_keeps_one_body_per_session() -> None:
    reader = Reader()
    for turns in range(20):
        reader.answered(Api.MESSAGES, packed(claude(turns)))
    # The first body is of no use to the second, where its mark has moved.
    assert len(reader.memory._bodies) == 2


def test_memo_ignores_small_bodies() -> None:
    reader = Reader()
    small = {"messages": [{"role": "user", "content": "x" * (STRIDE // 2)}]}
    reader.answered(Api.CHAT, packed(small))
    assert reader.memory.bytes == 0


@pytest.mark.parametrize(("between", "is_remembered"), [(100_000, True), (2_000_000, False)])
def test_memo_bounds_search_for_end_of_text(between: int, is_remembered: bool) -> None:
    reader = Reader()
    last = {"role": "user", "content": "so it ends " * 70, "more": "z" * between}
    body = packed({"messages": [{"role": "user", "content": LONG}, last]})
    reader.answered(Api.CHAT, body)
    assert (reader.memory.bytes > 0) is is_remembered
    reader.answered(Api.CHAT, body)


@pytest.mark.parametrize("spaces", [1, 1000, STRIDE, 5 * STRIDE])
@pytest.mark.parametrize("place", [b"}%b,{", b"},%b{", b"}%b]"])
def test_memo_bounds_white_space_between_messages(spaces: int, place: bytes) -> None:
    reader, messages = Reader(), packed(chat(3)).partition(b',"tools"')
    plain = place.replace(b"%b", b"")
    body = (place % (b" " * spaces)).join(messages[0].rsplit(plain, 1)) + b"".join(messages[1:])
    assert json.loads(body) == chat(3)
    reader.answered(Api.CHAT, body)
    assert (reader.memory.bytes > 0) is (spaces < STRIDE or plain != b"}]")
    reader.answered(Api.CHAT, body)


def test_memo_keeps_no_text() -> None:
    reader = Reader()
    reader.answered(Api.CHAT, packed({"messages": [{"role": "user", "content": "canary " * STRIDE}]}))
    (remembered,) = reader.memory._bodies
    for _, entry in remembered.entries:
        assert b"canary" not in b"".join(piece for piece in entry.rest if isinstance(piece, bytes))
        assert {piece for piece in entry.rest if isinstance(piece, bytes)} <= {b"<|", b"|>"}


@pytest.mark.parametrize("turns", [1, 30])
@pytest.mark.parametrize("session", ["chat", "claude"])
def test_memo_bound_counts_real_memory(session: str, turns: int) -> None:
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


def test_memo_ignores_messages_too_deep_where_answer_begins() -> None:
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


#: Bytes of a block, and between two places in a body, so that short bodies have many.
SMALL_BLOCK, SMALL_STRIDE = 16, 64
WORDS = ["a", "tale ", '"', "\\", "/", "\n", "ü", "🙂", "<|user|>", "{", "}]", ",", '},{"role":"user"', "assistant"]
ROLES = ["user", "user", "assistant", "assistant", "tool", "system", "odd"]


class Author:
    """Writes bodies, and edits what it wrote.

    Args:
        rng: decides.
        api: whose.
    """

    def __init__(self, rng: random.Random, api: Api) -> None:
        self.rng = rng
        self.list_of = "input" if api is Api.RESPONSES else "messages"
        self.space = rng.choice(["", "", " ", "\n "])
        self.comma = rng.choice([",", ", ", " ,\n"])
        #: As JSON text: the messages, and the other members by name, in their order.
        self.messages = [self.message() for _ in range(rng.randint(1, 4))]
        lead = "instructions" if api is Api.RESPONSES else "system"
        self.members = [
            ("model", '"m"'),
            (lead, self.text()),
            ("tools", self.json([{"name": "f"}])),
            (self.list_of, ""),
        ]
        rng.shuffle(self.members)

    def said(self) -> str:
        return "".join(self.rng.choices(WORDS, k=self.rng.choice([0, 1, 3, 9, 30])))

    def json(self, value: Any) -> str:
        """*value*, with a choice of escapes and spaces."""
        text = json.dumps(value, ensure_ascii=self.rng.random() < 0.15, separators=(self.comma, f":{self.space}"))
        return text.replace("/", "\\/") if self.rng.random() < 0.1 else text

    def text(self) -> str:
        return self.json(self.said())

    def part(self) -> Any:
        rng, said = self.rng, self.said()
        part: Any = rng.choice(
            [
                {"type": "text", "text": said},
                {"type": "thinking", "thinking": said},
                {"type": "tool_use", "name": "f", "input": {"role": said}},
                {"type": "tool_result", "content": rng.choice([said, [{"type": "text", "text": said}], None])},
                {"type": "image", "source": {"data": said}},
            ]
        )
        return rng.choice([part, part, part | MARK, said])

    def message(self) -> str:
        rng = self.rng
        content = rng.choice([self.said(), self.said(), None, 5, [self.part() for _ in range(rng.randint(0, 3))]])
        message: dict[str, Any] = {"role": rng.choice(ROLES), "content": content}
        match rng.randrange(12):
            case 0:
                message["tool_calls"] = [{"role": self.said()}]
            case 1:
                message = {"type": "function_call", "name": "f", "arguments": self.said()}
            case 2:
                message = {"type": "function_call_output", "output": self.said()}
            case 3:
                message = {"type": "reasoning", "summary": [{"type": "summary_text", "text": self.said()}]}
            case 4:
                message = {"content": content, "role": rng.choice(ROLES)}
        return self.json(message)

    def edit(self) -> None:
        """Mostly say more; or change, drop, move or spoil something, or nothing."""
        rng, messages, members = self.rng, self.messages, self.members
        at = rng.randrange(len(messages)) if messages else 0
        match rng.randrange(24):
            case 0 if messages:
                messages[at] = self.message()
            case 1 if messages:
                del messages[at]
            case 2:
                messages.insert(at, self.message())
            case 3 if messages:
                messages[at] = messages[at].replace('"ephemeral"', '"persistent"')
            case 4 if messages:
                messages[at] = messages[at].replace("a", "\\u0061", 1)
            case 5 if messages:
                messages[at] += rng.choice([" 5", "{}", ",null", self.comma + '"s"'])
            case 6:
                name = rng.choice([self.list_of, "\\u006dessages", "model", "tools", "cache_salt", "chat_template"])
                members.append((name, rng.choice(["[]", '"x"', "5", "null"])))
            case 7 if len(members) > 2:
                del members[rng.randrange(len(members))]
            case 8:
                rng.shuffle(members)
            case 9:
                rng.shuffle(messages)
            case 10 | 11:
                pass  # it is sent again
            case _:
                messages += [self.message() for _ in range(rng.randint(1, 3))]

    def body(self) -> bytes:
        listed = f"[{self.comma.join(self.messages)}]"
        written = [f'"{name}":{self.space}{value or listed}' for name, value in self.members]
        return ("{" + self.comma.join(written) + "}" + self.rng.choice(["", "", "", "", "\n", "}"])).encode()


def read(api: Api, body: bytes, memory: PrefixMemo, screen: BodyScreen) -> Any:
    """All that is read of *body*, or why it is refused."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reader, "memo", memory)
        patched.setattr(reader, "screen", screen)
        return outcome(api, body)


@settings(max_examples=150)
@given(
    st.integers(0, 2**32), st.sampled_from([Api.CHAT, Api.MESSAGES, Api.RESPONSES]), st.sampled_from([6000, 1 << 20])
)
def test_memo_changes_no_reading_of_any_edited_body(seed: int, api: Api, most_bytes: int) -> None:
    rng = random.Random(seed)
    author = Author(rng, api)
    with pytest.MonkeyPatch.context() as patched:
        for module, name, value in (
            (memo, "STRIDE", SMALL_STRIDE),
            (memo, "BLOCK_BYTES", SMALL_BLOCK),
            (prompt, "BLOCK_BYTES", SMALL_BLOCK),
            (prompt, "CHUNK_BYTES", 4 * SMALL_BLOCK),
            (prompt, "_CUTS", [slice(at, at + SMALL_BLOCK) for at in range(0, 4 * SMALL_BLOCK, SMALL_BLOCK)]),
            (reader, "LEAST_BYTES", 0),
            (conversation, "LONG", 20),
            (conversation, "HEAD", 6),
        ):
            patched.setattr(module, name, value)
        memory, screen = PrefixMemo(most_bytes, SMALL_STRIDE), BodyScreen()
        for _ in range(8):
            body = author.body()
            assert read(api, body, memory, screen) == read(
                api, body, PrefixMemo(most_bytes, SMALL_STRIDE), BodyScreen()
            )
            assert memory.bytes <= most_bytes
            author.edit()
