"""Rendering: turns, history, shared prefixes, and excerpts of large bodies."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import Raw

from smetric.errors import RequestError
from smetric.request import conversation, reader
from smetric.request.conversation import HEAD, LONG, MOST_ALIKE, Conversation, render
from smetric.request.memo import screen
from smetric.request.prompt import BLOCK_BYTES, IMAGE_BYTES, Prompt
from smetric.request.reader import members
from smetric.request.request import Api
from tests.request.outcome import outcome

USER = {"role": "user", "content": "question"}
ASSISTANT = {"role": "assistant", "content": "answer"}
SYSTEM = {"role": "system", "content": "rules"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f"}}]}
TOOL = {"role": "tool", "tool_call_id": "c", "content": "result"}
THOUGHT = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
FUNCTION_CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
FUNCTION_OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "result"}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "answer"}]}


def rendered(messages: list[Any], **more: Any) -> Conversation:
    raws = {name: Raw(json.dumps(value).encode()) for name, value in more.items()}
    return render("messages", Raw(json.dumps(messages).encode()), tools=raws.get("tools"), system=raws.get("system"))


def text(conversation: Conversation) -> bytes:
    return b"".join(conversation.pieces)


@pytest.mark.parametrize(
    ("messages", "turn", "question", "history"),
    [
        ([USER], 0, 0, 0),
        ([], 0, 0, 0),
        ([SYSTEM, {"role": "developer", "content": "more"}, USER, USER], 0, 0, 0),
        ([USER, ASSISTANT, USER], 1, 1, 2),
        ([SYSTEM, USER, ASSISTANT, USER, ASSISTANT, USER, USER], 2, 4, 5),
        ([USER, CALL, TOOL], 1, 1, 2),
        ([SYSTEM, USER, CALL, TOOL, TOOL, CALL, TOOL], 2, 5, 6),
        ([USER, ASSISTANT], 0, 0, 0),
        ([USER, ASSISTANT, USER, ASSISTANT], 1, 1, 2),
        ([TOOL, USER], 1, 0, 1),
        ([USER, TOOL, TOOL], 1, 1, 2),
        ([USER, THOUGHT, FUNCTION_CALL, FUNCTION_OUTPUT], 1, 1, 3),
        ([USER, THOUGHT, FUNCTION_CALL, FUNCTION_OUTPUT, THOUGHT, SAID, USER], 2, 4, 6),
        ([USER, SAID, USER], 1, 1, 2),
        ([USER, SAID], 0, 0, 0),
        ([FUNCTION_OUTPUT, USER], 1, 0, 1),
    ],
)
@pytest.mark.parametrize("more", [{}, {"tools": [{"name": "f"}], "system": "rules"}], ids=["alone", "after a preamble"])
def test_render_counts_turns_and_ends_question_and_history_with_last(
    messages: list[Any], turn: int, question: int, history: int, more: dict[str, Any]
) -> None:
    conversation = rendered(messages, **more)
    assert conversation.turn == turn
    for count, size in ((question, conversation.question_bytes), (history, conversation.history_bytes)):
        assert text(conversation)[:size] == (text(rendered(messages[:count], **more)) if turn else b"")


def test_render_puts_tools_and_system_first() -> None:
    conversation = rendered([USER, ASSISTANT, USER], tools=[{"name": "f"}], system="rules")
    order = [text(conversation).index(word) for word in (b'"f"', b"rules", b"question", b"answer")]
    assert order == sorted(order)
    assert conversation.history_bytes > order[-1]


@pytest.mark.parametrize("type_", ["text", "input_text", "output_text"])
def test_render_treats_string_as_text_part(type_: str) -> None:
    part = [{"type": type_, "text": "question", "cache_control": {"type": "ephemeral"}}]
    assert rendered([{"role": "user", "content": part}]) == rendered([USER])
    assert rendered([USER], system=part) == rendered([USER], system="question")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (CALL, [b'"f"']),
        ({"role": "assistant", "content": None}, [b"<|assistant|>"]),
        ({"role": "assistant"}, [b"<|assistant|>"]),
        ({"role": "assistant", "reasoning_content": "hm", "content": "so"}, [b"hm", b"so"]),
        ({"role": "user", "content": ["one", {"type": "text", "text": "two"}]}, [b"one", b"two"]),
        (
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "tool_use", "id": "t", "name": "Read", "input": {"path": "p"}},
                ],
            },
            [b"hm", b"Read", b'{"path": "p"}'],
        ),
        (
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "file"}]},
            [b"<|user|>", b"file"],
        ),
        (
            {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "text", "text": "file"}]}]},
            [b"file"],
        ),
        (FUNCTION_CALL, [b"f", b"{}"]),
        (FUNCTION_OUTPUT, [b"result"]),
        ({"type": "custom_tool_call", "name": "patch", "input": "*** Begin"}, [b"patch", b"*** Begin"]),
        (THOUGHT, [b"hm"]),
        ({"role": "user", "content": "x", "invented": {"deep": [1]}}, [b"x"]),
        ({"role": "user", "content": {"shape": "unknown to APIs"}}, [b"unknown to APIs"]),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, [b"5"]),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, [b"<|user|>"]),
        ({"role": "alien", "content": "x"}, [b"<|alien|>", b"x"]),
        ({"content": "x"}, [b"<|user|>x"]),
    ],
)
def test_render_keeps_order_of_any_content(message: dict[str, Any], words: list[bytes]) -> None:
    at = [text(rendered([message])).index(word) for word in words]
    assert at == sorted(at)


def test_render_counts_turns_among_unknown_content() -> None:
    assert rendered([{"role": "user", "content": {"odd": 1}}, ASSISTANT, USER]).turn == 1


def test_render_counts_and_separates_images() -> None:
    def with_image(data: str) -> bytes:
        url = {"type": "image_url", "image_url": {"url": data}}
        return text(rendered([{"role": "user", "content": [{"type": "text", "text": "see"}, url]}]))

    assert IMAGE_BYTES < len(with_image("data:A")) < IMAGE_BYTES + 64
    assert with_image("data:A") != with_image("data:B")
    source = {"type": "image", "source": {"type": "base64", "data": "A"}}
    assert len(text(rendered([{"role": "user", "content": [source]}]))) > IMAGE_BYTES


SPELLED = [
    '[{"role":"user","content":"é/\\n\\u001b\\\\u00e9\\""}]'.encode(),
    b'[{"role":"user","content":"\\u00e9\\/\\u000a\\u001B\\u005cu00e9\\u0022"}]',
    b'[{"role":"user","content":[{"type":"text","text":"\\u00E9\\/\\n\\u001b\\\\u00e9\\""}]}]',
    b'[{"role":"user","content":["\\u00E9\\/\\n\\u001b\\\\u00e9\\""]}]',
]


@pytest.mark.parametrize("spelled", SPELLED)
def test_render_ignores_choice_of_escapes(spelled: bytes) -> None:
    assert text(render("messages", Raw(spelled))) == text(render("messages", Raw(SPELLED[0])))


@given(st.text(st.characters(exclude_categories=["Cs"])), st.booleans())
def test_render_slices_plain_text_from_body(said: str, ascii_only: bool) -> None:
    body = json.dumps([{"role": "user", "content": said}], ensure_ascii=ascii_only).encode()
    usual = text(render("messages", Raw(body)))
    if screen(body).is_plain:
        assert text(render("messages", Raw(body), is_plain=True)) == usual
        assert usual in body.replace(b'[{"role": "user", "content": "', b"<|user|>")
    assert json.loads(b'"%b"' % usual.removeprefix(b"<|user|>")) == said


@pytest.mark.parametrize("depth", [10, 400, 900, 960, 990])
def test_render_bounds_nested_results(depth: int) -> None:
    result = '{"type":"tool_result","content":['
    nested = f'[{{"role":"user","content":[{result * (depth // 2)}"deep"{"]}" * (depth // 2)}]}}]'
    body = f'{{"messages":{nested}}}'.encode()
    try:
        found = members(screen(body).body)
    except RequestError:
        assert depth > 900
    else:
        assert b"deep" in text(render("messages", found["messages"]))


@pytest.mark.parametrize(
    "messages", [b"5", b"null", b'"text"', b"[1]", b'["text"]', b'[{"role":5}]', b'[{"role":"user"},null]', b"{}"]
)
def test_render_refuses_other_than_list_of_messages(messages: bytes) -> None:
    with pytest.raises(RequestError, match="`input` must be a list of objects") as caught:
        render("input", Raw(messages))
    assert caught.value.param == "input"


# ── Claude Code ──────────────────────────────────────────────────────────────


class ClaudeCode:
    """A session as Claude Code sends it, request by request."""

    def __init__(self) -> None:
        self.number = 0
        self.messages: list[dict[str, Any]] = [self._user("<system-reminder>context</system-reminder>", "fix the bug")]

    @staticmethod
    def _user(*texts: str) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "text", "text": text * 40} for text in texts]}

    def body(self) -> dict[str, Any]:
        """The next request: cache marks that move, and a billing header that never repeats."""
        self.number += 1
        mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
        billing = f"x-anthropic-billing-header: cc_version=2.1.{self.number}; cc_entrypoint=cli; cch={self.number:05x};"
        messages = json.loads(json.dumps(self.messages))
        for message in messages[-2:]:
            message["content"][-1] |= mark
        schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
        tools: list[Any] = [
            {"name": f"Tool{i}", "description": "does " * 90, "input_schema": schema} for i in range(12)
        ]
        tools[-1] |= mark
        if self.number % 2:
            tools[3] = {"name": "Tool3", "cache_control": None} | tools[3]
        return {
            "tools": tools,
            "system": [
                {"type": "text", "text": billing},
                {"type": "text", "text": "You are Claude Code, an agent.", **mark},
                {"type": "text", "text": "Rules. " * 900, **mark},
            ],
            "messages": messages,
        }

    def answer(self) -> None:
        """The model thinks, says something and calls two tools, which answer in two ways; at times the user speaks."""
        n = self.number
        self.messages.append(
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": f"let me see {n} " * 30, "signature": f"sig{n}" * 20},
                    {"type": "text", "text": f"I look at file {n}. " * 10},
                    {"type": "tool_use", "id": f"toolu_{n}a", "name": "Tool1", "input": {"path": f"/src/{n}.py"}},
                    {"type": "tool_use", "id": f"toolu_{n}b", "name": "Tool2", "input": {"path": "x", "lines": [1, n]}},
                ],
            }
        )
        listed = [{"type": "text", "text": f"line {n} of the file " * 50}]
        results: list[dict[str, Any]] = [
            {"type": "tool_result", "tool_use_id": f"toolu_{n}a", "content": listed},
            {"type": "tool_result", "tool_use_id": f"toolu_{n}b", "content": f"exit code {n}", "is_error": True},
        ]
        if n % 3 == 0:
            results.append({"type": "text", "text": "<system-reminder>The todo list is empty.</system-reminder>"})
        self.messages.append({"role": "user", "content": results})


def test_render_continues_previous_request_through_claude_code_session() -> None:
    session = ClaudeCode()
    before: Prompt | None = None
    for _ in range(12):
        conversation = rendered(**session.body())
        prompt = Prompt(
            conversation.pieces,
            4.0,
            history_bytes=conversation.history_bytes,
            question_bytes=conversation.question_bytes,
        )
        if before is not None:
            shared = [a == b for a, b in zip(before.hashes.blocks, prompt.hashes.blocks, strict=False)]
            assert all(shared)
            assert len(before.hashes.blocks) * BLOCK_BYTES >= 0.95 * before.size
            assert prompt.hashes.question == before.hashes.whole
        before = prompt
        session.answer()


def test_render_drops_billing_header_and_cache_marks() -> None:
    whole = text(rendered(**ClaudeCode().body()))
    assert b"billing" not in whole
    assert b"cache_control" not in whole
    assert b"You are Claude Code" in whole


def same(monkeypatch: pytest.MonkeyPatch, api: Api, body: bytes, long: int = 3, head: int = 2) -> None:
    """*body* comes out the same in short, with texts of *long* bytes left out, as whole."""
    with monkeypatch.context() as patched:
        patched.setattr(reader, "LEAST_BYTES", len(body) + 1)
        whole = outcome(api, body)
        patched.setattr(reader, "LEAST_BYTES", 0)
        patched.setattr(conversation, "LONG", long)
        patched.setattr(conversation, "HEAD", head)
        assert outcome(api, body) == whole


TEXT = st.text(st.sampled_from('a:,"\\{}[]\n'), max_size=6)
VALUE = st.recursive(
    st.one_of(TEXT, st.integers(0, 1), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=2)),
    max_leaves=4,
)
MESSAGE = st.dictionaries(
    st.sampled_from(["role", "content", "content", "output", "type", "x", "tool_calls"]),
    st.one_of(TEXT, VALUE),
    max_size=4,
)
MEMBER = st.one_of(
    st.tuples(st.sampled_from(["messages", "input"]), st.lists(MESSAGE, max_size=4)),
    st.tuples(st.sampled_from(["messages", "input"]), st.lists(MESSAGE, max_size=4)),
    st.tuples(st.sampled_from(["model", "cache_salt", "user"]), TEXT),
    st.tuples(st.sampled_from(["tools", "metadata", "system", "n", "messages"]), VALUE),
    st.tuples(TEXT, VALUE),
)


@pytest.mark.slow
@settings(max_examples=400)
@given(
    st.lists(MEMBER, min_size=1, max_size=5),
    st.sampled_from([Api.CHAT, Api.MESSAGES, Api.RESPONSES]),
    st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " : ")]),
    st.sampled_from(["", "}", ",", '"']),
)
@example([("messages", [{"content": 'aaa"'}, {"content": "aaa"}])], Api.CHAT, (",", ":"), "")
@example([("messages", [{"x": "a:", "content": ",1,", "y": "b"}])], Api.CHAT, (",", ":"), "")
@example([("user", "aaa"), ("messages", [{"content": "aaa"}]), ("user", "aaa")], Api.CHAT, (",", ":"), "")
@example([("messages", [{"content": "aaa"}]), ("tools", ["aaa"]), ("messages", [])], Api.CHAT, (",", ":"), "")
def test_excerpt_is_read_as_whole_body(
    members: list[tuple[str, Any]], api: Api, marks: tuple[str, str], after: str
) -> None:
    between, colon = marks
    texts = [f"{json.dumps(name)}{colon}{json.dumps(value, separators=marks)}" for name, value in members]
    with pytest.MonkeyPatch.context() as monkeypatch:
        same(monkeypatch, api, f"{{{between.join(texts)}}}{after}".encode())


def test_excerpt_is_no_json_after_false_match() -> None:
    numbers = ",1" * LONG + ","
    body = f'{{"messages":[{{"content":[":"{numbers}"x"]}},{{"content":"{numbers}"}}]}}'.encode()
    json.loads(body)
    brief = conversation.excerpt(body, "messages")
    assert brief is not None
    assert b'":"","x"' not in brief.body
    with pytest.raises(RequestError):
        members(brief.body)
    with pytest.MonkeyPatch.context() as monkeypatch:
        same(monkeypatch, Api.CHAT, body, LONG, 64)


def test_excerpt_leaves_out_long_texts() -> None:
    long = 'a tale \n of a "tub" ' * LONG
    messages = [
        {"role": "system", "content": long},
        {"role": "user", "content": "hi"},
        {"role": "user", "content": long},
    ]
    body = json.dumps({"model": "m", "messages": messages, "n": 1}).encode()
    brief = conversation.excerpt(body, "messages")
    assert brief is not None
    assert len(brief.body) < 200
    assert [bytes(message.content) for message in brief.messages] == [
        json.dumps(one["content"]).encode() for one in messages
    ]
    assert body[brief.begin - 1 :].startswith(b'[{"role": "system"')


@pytest.mark.parametrize(("before", "is_tried"), [(MOST_ALIKE - 1, True), (MOST_ALIKE, False)])
def test_excerpt_gives_up_after_many_similar_texts(
    monkeypatch: pytest.MonkeyPatch, before: int, is_tried: bool
) -> None:
    """Each of them may cost as much as the text is long: a body of them alone would take minutes."""
    text = b"x" * HEAD + b'\\"'
    body = b'{"messages":[{"role":"user","more":"%b","content":"%b"}]}' % (
        (text * (LONG // len(text) + before)),
        text * (LONG // len(text) + before) + b"end",
    )
    assert (conversation.excerpt(body, "messages") is not None) is is_tried
    same(monkeypatch, Api.CHAT, body, LONG, HEAD)


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[{"content":"%b"}],"model":"m","model":"n"}',
        b'{"messages":[{"content":"%b"}],"messages":[]}',
        b'{"messages":[{"content":"%b"}],"user":"%b","user":"x"}',
        b'{"messages":[{"content":"%b"}],"kv_transfer_params":{}}',
        b'{"messages":[{"content":"%b"}]',
        b'{"messages":[{"content":"%b"},5]}',
    ],
)
def test_excerpt_gives_same_errors_as_whole_body(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    same(monkeypatch, Api.CHAT, body.replace(b"%b", b"tale " * LONG), LONG, 64)
