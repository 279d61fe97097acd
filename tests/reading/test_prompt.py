"""A prompt's length and the chained hashes of its blocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from smetric.request.parts import Kind, Outline
from smetric.request.prompt import BLOCK_BYTES, CHUNK_BYTES, IMAGE_BYTES, Prompt, image

TEXT = st.lists(st.binary(max_size=700), max_size=12)


def _common(left: Prompt, right: Prompt) -> int:
    count = 0
    for a, b in zip(left.hashes.blocks, right.hashes.blocks, strict=False):
        if a != b:
            break
        count += 1
    return count


@given(TEXT, st.integers(1, 500))
def test_blocks_depend_on_the_text_and_not_on_how_it_is_cut_into_pieces(pieces: list[bytes], cut: int) -> None:
    text = b"".join(pieces)
    recut = [text[at : at + cut] for at in range(0, len(text), cut)]
    assert Prompt(pieces, 4.0).hashes.blocks == Prompt(recut, 4.0).hashes.blocks
    assert len(Prompt(pieces, 4.0).hashes.blocks) == len(text) // BLOCK_BYTES


@given(st.binary(min_size=1, max_size=5000), st.binary(max_size=3000), st.binary(max_size=3000))
def test_two_prompts_share_the_blocks_of_their_common_prefix_and_no_others(
    prefix: bytes, one: bytes, other: bytes
) -> None:
    left, right = prefix + b"\0" + one, prefix + b"\1" + other
    assert _common(Prompt([left], 4.0), Prompt([right], 4.0)) == len(prefix) // BLOCK_BYTES


def test_equal_text_under_another_key_shares_nothing() -> None:
    text = [b"x" * 8 * BLOCK_BYTES]
    assert _common(Prompt(text, 4.0, key=b"m"), Prompt(text, 4.0, key=b"adapter")) == 0


@given(st.binary(min_size=1, max_size=3000), st.binary(min_size=1, max_size=3000))
def test_the_question_of_a_follow_up_is_the_whole_of_the_request_before(prompt: bytes, reply: bytes) -> None:
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
def test_large_pieces_are_hashed_as_their_text(sizes: list[int], asked: int) -> None:
    pieces = [bytes([number]) * size for number, size in enumerate(sizes)]
    question = sum(sizes[:asked])
    text = b"".join(pieces)
    recut = [text[at : at + 3000] for at in range(0, len(text), 3000)]
    assert Prompt(pieces, 4.0, question_bytes=question).hashes == Prompt(recut, 4.0, question_bytes=question).hashes
    if question:
        assert (
            Prompt(pieces, 4.0, question_bytes=question).hashes.question == Prompt([text[:question]], 4.0).hashes.whole
        )


def test_a_block_hash_covers_everything_before_it() -> None:
    same = b"s" * BLOCK_BYTES
    left = Prompt([b"a" * BLOCK_BYTES, same], 4.0)
    right = Prompt([b"b" * BLOCK_BYTES, same], 4.0)
    assert left.hashes.blocks[1] != right.hashes.blocks[1]


def test_lengths_are_in_whole_tokens_and_never_zero() -> None:
    assert Prompt([b"x" * 4000], 4.0).length == 1000
    assert Prompt([b"x" * 4003], 4.0).length == 1000
    assert Prompt([], 4.0).length == 1


@given(st.integers(1, 10**6), st.integers(1, 10**7))
def test_a_counted_prompt_keeps_its_count(count: int, size: int) -> None:
    prompt = Prompt([], size / count)
    assert prompt.tokens(size) == count


@given(st.integers(0, 10**5), st.integers(1, 10**6))
def test_a_prompt_whose_tokens_become_known_has_that_many(size: int, count: int) -> None:
    prompt = Prompt([b"x" * size], 4.0, history_bytes=size // 2)
    prompt.count(count)
    assert prompt.counted
    if size:
        assert prompt.length == count
    assert prompt.tokens(prompt.history_bytes) <= count


def test_an_image_stands_for_its_tokens_and_tells_images_apart() -> None:
    assert sum(map(len, image(b"data:image/png;base64,AAAA"))) == IMAGE_BYTES
    assert image(b"one") != image(b"two")
    assert image(b"one") == image(b"one")


def test_letting_the_text_go_keeps_the_hashes_and_gives_those_of_the_parts() -> None:
    pieces = [b"<|user|>", b"x" * 3000]
    prompt = Prompt(pieces, 4.0, outline=Outline("messages", [(0, Kind.USER, 0)], 0))
    blocks = prompt.hashes.blocks
    parts = prompt.summarise(salt=1, template=2)
    assert parts is not None
    assert (len(parts.hashes), parts.size, parts.salt, parts.template) == (1, 3008, 1, 2)
    assert (prompt.hashes.blocks, prompt.length) == (blocks, 752)
    assert Prompt(pieces, 4.0).summarise(salt=0, template=0) is None
    small = Prompt([b"<|user|>", b"x" * 1000], 4.0, outline=Outline("messages", [(0, Kind.USER, 0)], 0))
    assert small.summarise(salt=0, template=0) is None


def test_prompts_that_begin_alike_have_one_beginning() -> None:
    system = b"s" * BLOCK_BYTES
    assert Prompt([system, b"one"], 4.0).beginning == Prompt([system, b"two" * 900], 4.0).beginning
    assert Prompt([system], 4.0).beginning != Prompt([b"t" * BLOCK_BYTES], 4.0).beginning
    assert Prompt([system], 4.0, key=b"adapter").beginning != Prompt([system], 4.0).beginning
    assert Prompt([b"short"], 4.0).beginning not in (0, Prompt([b"other"], 4.0).beginning)


def test_nobody_asks_for_a_beginning_after_the_text_was_let_go() -> None:
    prompt = Prompt([b"x" * 3000], 4.0)
    prompt.summarise(salt=0, template=0)
    assert prompt.beginning == 0
