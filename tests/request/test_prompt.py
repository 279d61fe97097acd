"""Prompt: length, block hashes, parts, and keys of token blocks."""

from __future__ import annotations

import json
import string
from array import array
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from smetric.request.conversation import render
from smetric.request.prompt import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    IMAGE_BYTES,
    BlockKeys,
    Outline,
    PartChange,
    PartKind,
    Parts,
    Prompt,
    divergence,
    image,
    parts_of,
)

TEXT = st.lists(st.binary(max_size=700), max_size=12)


def _common(left: Prompt, right: Prompt) -> int:
    count = 0
    for a, b in zip(left.hashes.blocks, right.hashes.blocks, strict=False):
        if a != b:
            break
        count += 1
    return count


@given(TEXT, st.integers(1, 500))
def test_prompt_blocks_do_not_depend_on_pieces(pieces: list[bytes], cut: int) -> None:
    text = b"".join(pieces)
    recut = [text[at : at + cut] for at in range(0, len(text), cut)]
    assert Prompt(pieces, 4.0).hashes.blocks == Prompt(recut, 4.0).hashes.blocks
    assert len(Prompt(pieces, 4.0).hashes.blocks) == len(text) // BLOCK_BYTES


@given(st.binary(min_size=1, max_size=5000), st.binary(max_size=3000), st.binary(max_size=3000))
def test_prompts_share_blocks_of_common_prefix_only(prefix: bytes, one: bytes, other: bytes) -> None:
    left, right = prefix + b"\0" + one, prefix + b"\1" + other
    assert _common(Prompt([left], 4.0), Prompt([right], 4.0)) == len(prefix) // BLOCK_BYTES


def test_prompts_with_other_key_share_no_blocks() -> None:
    text = [b"x" * 8 * BLOCK_BYTES]
    assert _common(Prompt(text, 4.0, key=b"m"), Prompt(text, 4.0, key=b"adapter")) == 0


@given(st.binary(min_size=1, max_size=3000), st.binary(min_size=1, max_size=3000))
def test_prompt_question_is_whole_of_request_before(prompt: bytes, reply: bytes) -> None:
    first, follow_up = Prompt([prompt], 4.0), Prompt([prompt, reply], 4.0, question_bytes=len(prompt))
    assert follow_up.hashes.question == first.hashes.whole
    assert follow_up.hashes.whole != first.hashes.whole
    assert first.hashes.question == 0
    assert Prompt([prompt, reply], 4.0, question_bytes=len(prompt), key=b"m").hashes.question != first.hashes.whole


@given(
    st.lists(
        st.sampled_from([0, 1, 900, BLOCK_BYTES, 5000, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1]), max_size=8
    ),
    st.integers(0, 8),
)
def test_prompt_hashes_large_pieces_as_their_text(sizes: list[int], asked: int) -> None:
    pieces = [bytes([number]) * size for number, size in enumerate(sizes)]
    question = sum(sizes[:asked])
    text = b"".join(pieces)
    recut = [text[at : at + 3000] for at in range(0, len(text), 3000)]
    assert Prompt(pieces, 4.0, question_bytes=question).hashes == Prompt(recut, 4.0, question_bytes=question).hashes
    if question:
        assert (
            Prompt(pieces, 4.0, question_bytes=question).hashes.question == Prompt([text[:question]], 4.0).hashes.whole
        )


def test_prompt_block_hash_covers_everything_before() -> None:
    same = b"s" * BLOCK_BYTES
    left = Prompt([b"a" * BLOCK_BYTES, same], 4.0)
    right = Prompt([b"b" * BLOCK_BYTES, same], 4.0)
    assert left.hashes.blocks[1] != right.hashes.blocks[1]


def test_prompt_length_is_whole_tokens_above_zero() -> None:
    assert Prompt([b"x" * 4000], 4.0).length == 1000
    assert Prompt([b"x" * 4003], 4.0).length == 1000
    assert Prompt([], 4.0).length == 1


@given(st.integers(1, 10**6), st.integers(1, 10**7))
def test_prompt_keeps_exact_count(count: int, size: int) -> None:
    prompt = Prompt([], size / count)
    assert prompt.tokens(size) == count


@given(st.integers(0, 10**5), st.integers(1, 10**6))
def test_prompt_count_sets_length(size: int, count: int) -> None:
    prompt = Prompt([b"x" * size], 4.0, history_bytes=size // 2)
    prompt.count(count)
    assert prompt.counted
    if size:
        assert prompt.length == count
    assert prompt.tokens(prompt.history_bytes) <= count


def test_image_counts_its_tokens_and_separates_images() -> None:
    assert sum(map(len, image(b"data:image/png;base64,AAAA"))) == IMAGE_BYTES
    assert image(b"one") != image(b"two")
    assert image(b"one") == image(b"one")


def test_prompt_summarise_keeps_hashes_and_returns_parts() -> None:
    pieces = [b"<|user|>", b"x" * 3000]
    prompt = Prompt(pieces, 4.0, outline=Outline("messages", [(0, PartKind.USER, 0)], 0))
    blocks = prompt.hashes.blocks
    parts = prompt.summarise(salt=1, template=2)
    assert parts is not None
    assert (len(parts.hashes), parts.size, parts.salt, parts.template) == (1, 3008, 1, 2)
    assert (prompt.hashes.blocks, prompt.length) == (blocks, 752)
    assert Prompt(pieces, 4.0).summarise(salt=0, template=0) is None
    small = Prompt([b"<|user|>", b"x" * 1000], 4.0, outline=Outline("messages", [(0, PartKind.USER, 0)], 0))
    assert small.summarise(salt=0, template=0) is None


def test_prompts_with_equal_first_block_share_beginning() -> None:
    system = b"s" * BLOCK_BYTES
    assert Prompt([system, b"one"], 4.0).beginning == Prompt([system, b"two" * 900], 4.0).beginning
    assert Prompt([system], 4.0).beginning != Prompt([b"t" * BLOCK_BYTES], 4.0).beginning
    assert Prompt([system], 4.0, key=b"adapter").beginning != Prompt([system], 4.0).beginning
    assert Prompt([b"short"], 4.0).beginning not in (0, Prompt([b"other"], 4.0).beginning)


def test_prompt_beginning_is_zero_after_summarise() -> None:
    prompt = Prompt([b"x" * 3000], 4.0)
    prompt.summarise(salt=0, template=0)
    assert prompt.beginning == 0


CANARY = "canary-text"


def parts(messages: list[Any], **more: Any) -> Parts:
    raws = {name: Raw(json.dumps(value).encode()) for name, value in more.items()}
    conversation = render(
        "messages", Raw(json.dumps(messages).encode()), tools=raws.get("tools"), system=raws.get("system")
    )
    made = parts_of(conversation.pieces, conversation.outline)
    assert made.size == sum(map(len, conversation.pieces))
    return made


def user(*texts: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}


def result(text: str) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t", "content": text}


def places(made: Parts) -> list[str]:
    return [made.place(at) for at in range(len(made.hashes))]


def test_parts_are_tools_system_blocks_messages_and_results() -> None:
    made = parts(
        [user("one"), {"role": "assistant", "content": "two"}, {"role": "user", "content": [result("r"), result("s")]}],
        tools=[{"name": "a"}, {"name": "b"}],
        system=[{"type": "text", "text": "rules"}, {"type": "text", "text": "more"}],
    )
    assert places(made) == [
        *("tools", "tools", "system[0]", "system[1]", "messages[0]", "messages[1]", "messages[2]", "messages[2]"),
    ]
    assert list(made.ends) == sorted(made.ends)
    assert made.ends[-1] == made.size


def test_parts_separate_text_beside_tool_results() -> None:
    made = parts([{"role": "user", "content": [result("r"), {"type": "text", "text": "go on"}, result("s")]}])
    assert [made.kinds[at] for at in range(3)] == [4, 2, 4]
    other = parts([{"role": "user", "content": [result("r"), {"type": "text", "text": "stop"}, result("s")]}])
    found = divergence(made, other)
    assert found is not None
    assert (found.part, found.place, found.change) == ("user", "messages[0]", PartChange.CHANGED)


def test_parts_have_kinds_by_role_or_type() -> None:
    chat = parts(
        [
            {"role": "system", "content": "rules"},
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a"},
            {"role": "tool", "tool_call_id": "t", "content": "r"},
        ]
    )
    assert list(chat.kinds) == [1, 2, 3, 4]
    assert places(chat) == [f"messages[{number}]" for number in range(4)]
    items = parts([{"type": "function_call", "name": "f", "arguments": "{}"}, {"type": "function_call_output"}])
    assert list(items.kinds) == [3, 4]


def test_parts_include_unknown_messages_and_odd_tools() -> None:
    messages = [{"role": "user", "content": {"unknown": 1}}, {"role": "user", "content": "x"}]
    for tools in ({"odd": 1}, [1, 2], [{"name": "a"}, None]):
        assert places(parts(messages, tools=tools)) == ["tools", "messages[0]", "messages[1]"]


def test_parts_of_empty_conversation_are_none() -> None:
    made = parts([])
    assert (list(made.hashes), made.size, made.messages_from) == ([], 0, 0)
    assert divergence(made, parts([user("x")])) is None


def test_parts_keep_no_text() -> None:
    made = parts([user(CANARY)], tools=[{"name": CANARY}], system=CANARY)
    assert CANARY not in repr(made)
    assert CANARY.encode() not in made.hashes.tobytes()


def test_divergence_names_change_of_tools() -> None:
    a, b, c = ({"name": name} for name in "abc")
    for tools, change in (
        ([b, a], PartChange.REORDERED),
        ([a, b, c], PartChange.ADDED),
        ([c, a, b], PartChange.ADDED),
        ([a], PartChange.REMOVED),
        ([a, c], PartChange.CHANGED),
    ):
        found = divergence(parts([user("x")], tools=[a, b]), parts([user("x")], tools=tools))
        assert found is not None
        assert (found.part, found.place, found.change) == ("tools", "tools", change)


def test_divergence_ignores_message_that_recurs_by_chance() -> None:
    before = parts([user("one"), user("two"), user("ok"), user("three")])
    after = parts([user("one"), user("ok"), user("four"), user("five")])
    found = divergence(before, after)
    assert found is not None
    assert (found.place, found.change) == ("messages[1]", PartChange.CHANGED)


TEXTS = st.lists(st.text(string.ascii_lowercase, min_size=1, max_size=3), min_size=1, max_size=12)


@given(TEXTS, TEXTS)
def test_divergence_is_none_between_beginning_and_continuation(texts: list[str], more: list[str]) -> None:
    short, long = parts([user(text) for text in texts]), parts([user(text) for text in texts + more])
    assert divergence(short, long) is None
    assert divergence(long, short) is None
    assert short.shared_with(long) == len(texts)


@given(st.lists(st.text(string.ascii_lowercase, max_size=3), min_size=1, max_size=12, unique=True), st.data())
def test_divergence_names_first_edited_message(texts: list[str], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(texts) - 1))
    edited = [*texts[:at], texts[at] + "!", *texts[at + 1 :]]
    before, after = parts([user(text) for text in texts]), parts([user(text) for text in edited])
    found = divergence(before, after)
    assert found is not None
    assert (found.part, found.place) == ("user", f"messages[{at}]")
    assert found.change is PartChange.CHANGED
    assert found.reach_bytes == after.ends[at]


TOKENS = st.lists(st.integers(0, 3), max_size=24)


def keys_of(tokens: list[int], size: int, adapter: str = "", salt: str = "") -> list[int]:
    return BlockKeys(tokens, size, adapter, salt).upto(100)


@given(TOKENS, TOKENS, st.sampled_from([1, 2, 5]))
def test_block_keys_are_shared_by_common_blocks_only(a: list[int], b: list[int], size: int) -> None:
    common = 0
    while common < min(len(a), len(b)) and a[common] == b[common]:
        common += 1
    shared = [one == other for one, other in zip(keys_of(a, size), keys_of(b, size), strict=False)]
    assert shared == [True] * (common // size) + [False] * (len(shared) - common // size)
    assert len(keys_of(a, size)) == len(a) // size


def test_block_keys_are_computed_as_far_as_needed() -> None:
    prompt = BlockKeys(range(1000), 10)
    assert len(prompt.upto(3)) == 3
    assert len(prompt.upto(1)) == 3
    assert prompt.upto(1000) == BlockKeys(array("I", range(1000)), 10).upto(100)


def test_block_keys_separate_adapters_and_salts() -> None:
    tokens = list(range(12))
    kinds = [keys_of(tokens, 4, adapter, salt) for adapter in ("", "a", "b") for salt in ("", "s", "t")]
    assert len({keys[0] for keys in kinds}) == len(kinds)
    assert len({keys[-1] for keys in kinds}) == len(kinds)


def test_block_keys_differ_by_block_size() -> None:
    assert not set(keys_of(list(range(12)), 4)) & set(keys_of(list(range(12)), 3))
