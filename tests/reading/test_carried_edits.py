"""Bodies edited anywhere, in any spelling, come out as if nothing had been known of those before."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smetric.request import body as screening
from smetric.request import conversation, memo, prompt, reader
from smetric.request.body import Screen
from smetric.request.memo import Memory
from smetric.request.request import Api
from tests.reading.outcome import outcome

#: Bytes of a block, and between two places in a body, so that short bodies have many.
BLOCK, STRIDE = 16, 64
WORDS = ["a", "tale ", '"', "\\", "/", "\n", "ü", "🙂", "<|user|>", "{", "}]", ",", '},{"role":"user"', "assistant"]
ROLES = ["user", "user", "assistant", "assistant", "tool", "system", "odd"]
MARK = {"cache_control": {"type": "ephemeral"}}


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


def read(api: Api, body: bytes, memory: Memory, screen: Screen) -> Any:
    """All that is read of *body*, or why it is refused."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reader, "memory", memory)
        patched.setattr(reader, "screen", screen)
        return outcome(api, body)


@settings(max_examples=150)
@given(
    st.integers(0, 2**32), st.sampled_from([Api.CHAT, Api.MESSAGES, Api.RESPONSES]), st.sampled_from([6000, 1 << 20])
)
def test_whatever_was_edited_a_body_is_read_as_what_it_is(seed: int, api: Api, most_bytes: int) -> None:
    rng = random.Random(seed)
    author = Author(rng, api)
    with pytest.MonkeyPatch.context() as patched:
        for module, name, value in (
            (memo, "STRIDE", STRIDE),
            (screening, "STRIDE", STRIDE),
            (prompt, "BLOCK_BYTES", BLOCK),
            (prompt, "CHUNK_BYTES", 4 * BLOCK),
            (prompt, "_CUTS", [slice(at, at + BLOCK) for at in range(0, 4 * BLOCK, BLOCK)]),
            (reader, "LEAST_BYTES", 0),
            (conversation, "LONG", 20),
            (conversation, "HEAD", 6),
        ):
            patched.setattr(module, name, value)
        memory, screen = Memory(BLOCK, most_bytes, STRIDE), Screen()
        for _ in range(8):
            body = author.body()
            assert read(api, body, memory, screen) == read(api, body, Memory(BLOCK, most_bytes, STRIDE), Screen())
            assert memory.bytes <= most_bytes
            author.edit()
