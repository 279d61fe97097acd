"""Reading of requests from every API, and the top level of bodies."""

from __future__ import annotations

import contextlib
import gzip
import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from smetric.errors import RequestError
from smetric.request.memo import screen
from smetric.request.prompt import IMAGE_BYTES
from smetric.request.reader import (
    MAX_NAMES_BYTES,
    MAX_PROMPTS,
    MAX_STRING,
    TOO_DEEP,
    ReaderSettings,
    members,
    parse,
    patch_model,
    spans,
)
from smetric.request.request import Api, FieldGivenTwice, InferenceRequest, TokenRatio

CAPTURES = Path(__file__).parents[1] / "data" / "requests"
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def read(
    api: Api,
    body: dict[str, Any] | bytes,
    headers: list[tuple[bytes, bytes]] | None = None,
    ratio: TokenRatio | None = None,
    **more: Any,
) -> InferenceRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse(api, raw, headers or [], ratio or TokenRatio(), ReaderSettings(**more))


def chat(**more: Any) -> InferenceRequest:
    return read(Api.CHAT, CHAT | more)


# ── what a real engine accepted ──────────────────────────────────────────────


@pytest.mark.parametrize(
    ("capture", "api", "prompts", "turn"),
    [
        ("chat", Api.CHAT, 1, 0),
        ("chat_cache_salt", Api.CHAT, 1, 0),
        ("chat_logprobs_n2", Api.CHAT, 2, 0),
        ("chat_nomodel", Api.CHAT, 1, 0),
        ("chat_priority", Api.CHAT, 1, 0),
        ("chat_toolmsgs", Api.CHAT, 1, 1),
        ("chat_tools_auto", Api.CHAT, 1, 0),
        ("chat_unknown_field", Api.CHAT, 1, 0),
        ("compl_text", Api.COMPLETIONS, 1, 0),
        ("compl_batch", Api.COMPLETIONS, 2, 0),
        ("compl_tokids", Api.COMPLETIONS, 1, 0),
        ("compl_batch_tokids", Api.COMPLETIONS, 2, 0),
        ("messages", Api.MESSAGES, 1, 0),
        ("messages_cached", Api.MESSAGES, 1, 0),
        ("responses", Api.RESPONSES, 1, 0),
        ("responses_cached", Api.RESPONSES, 1, 0),
    ],
)
def test_parse_reads_bodies_that_vllm_accepts(capture: str, api: Api, prompts: int, turn: int) -> None:
    request = read(api, (CAPTURES / f"{capture}.json").read_bytes())
    assert request.model == ("" if capture == "chat_nomodel" else "tiny")
    assert (request.prompts, request.turn) == (prompts, turn)
    assert request.prompt is not None
    assert request.prompt_len >= request.prompt.length >= 1


def test_parse_counts_token_ids_exactly() -> None:
    assert read(Api.COMPLETIONS, (CAPTURES / "compl_tokids.json").read_bytes()).prompt_len == 70
    assert read(Api.COMPLETIONS, (CAPTURES / "compl_batch_tokids.json").read_bytes()).prompt_len == 110


def test_parse_negates_vllm_priority() -> None:
    assert read(Api.CHAT, (CAPTURES / "chat_priority.json").read_bytes()).priority == 5.0
    assert chat(priority="3").priority == -3.0
    assert chat(priority=None).priority == 0.0
    assert read(Api.CHAT, CHAT, [(b"x-vllm-priority", b" 2 ")]).priority == -2.0


# ── turn, history and length ─────────────────────────────────────────────────


def test_parse_uses_ratio_and_block_size() -> None:
    ratio = TokenRatio()
    ratio.learn("m", 2000, 1000)
    history = [{"role": "user", "content": "q" * 987}, {"role": "assistant", "content": "a" * 987}]
    body = CHAT | {"messages": [*history, {"role": "user", "content": "n" * 992}]}
    plain, learned = read(Api.CHAT, body), read(Api.CHAT, body, ratio=ratio)
    rendered_history = 987 + len("<|user|>") + 987 + len("<|assistant|>")
    assert plain.prompt_len == (rendered_history + 1000) // 4
    assert plain.est_hit == rendered_history // 4 // 16 * 16
    assert learned.prompt_len == (rendered_history + 1000) // 2
    assert read(Api.CHAT, body, block_size=128).est_hit == rendered_history // 4 // 128 * 128


@given(
    st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), max_size=12),
    st.integers(0, 400),
    st.sampled_from([1, 16, 128]),
)
def test_parse_expects_hit_of_whole_blocks_except_on_first_turn(roles: list[str], length: int, block_size: int) -> None:
    body = {"messages": [{"role": role, "content": "x" * length} for role in roles]}
    request = read(Api.CHAT, body, block_size=block_size)
    assert request.est_hit is not None
    assert 0 <= request.est_hit <= request.prompt_len
    assert request.est_hit % block_size == 0
    if request.turn == 0:
        assert request.est_hit == 0


def test_parse_reads_responses_string_as_user_message() -> None:
    assert (
        read(Api.RESPONSES, {"input": "hi", "instructions": "be kind"}).prompt_len
        == read(Api.RESPONSES, {"input": [{"role": "user", "content": "hi"}], "instructions": "be kind"}).prompt_len
    )


@pytest.mark.parametrize(
    ("fields", "pinned_to"),
    [
        ({"previous_response_id": "resp_1"}, "resp_1"),
        ({"conversation": "conv_1"}, "conv_1"),
        ({"conversation": {"id": "conv_1"}}, "conv_1"),
        ({"previous_response_id": None, "conversation": None}, ""),
    ],
)
def test_parse_pins_stored_response_with_unknown_history(fields: dict[str, Any], pinned_to: str) -> None:
    request = read(Api.RESPONSES, {"input": "next"} | fields)
    assert request.pinned_to == pinned_to
    assert (request.turn, request.est_hit) == ((None, None) if pinned_to else (0, 0))


# ── completions ──────────────────────────────────────────────────────────────


def test_parse_counts_prompts_and_lengths_of_batch() -> None:
    request = read(Api.COMPLETIONS, {"prompt": ["x" * 400, "y" * 80], "n": 3})
    assert request.prompts == 6
    assert request.prompt_len == 120
    assert request.prompt is not None
    assert request.prompt.length == 100


@pytest.mark.parametrize(
    ("name", "read_as"),
    [
        ("model", "model"),
        ("cache_salt", "cache_salt"),
        ("previous_response_id", "pinned_to"),
        ("conversation", "pinned_to"),
    ],
)
def test_parse_bounds_what_is_kept_of_a_request(name: str, read_as: str) -> None:
    """A name, an id or a salt is kept with the last decisions, or by model: megabytes of it would add up."""
    longest = "x" * (MAX_STRING - 2)
    assert getattr(read(Api.RESPONSES, {"input": "a", name: longest}), read_as) == longest
    with pytest.raises(RequestError, match=f"`{name}` takes more than {MAX_STRING} bytes") as refused:
        read(Api.RESPONSES, {"input": "a", name: longest + "x"})
    assert refused.value.param == name


def test_parse_bounds_salt_of_any_type() -> None:
    with pytest.raises(RequestError, match="`cache_salt` takes more than"):
        chat(cache_salt=["x" * MAX_STRING])


def test_parse_counts_prompt_alone_as_in_batch() -> None:
    ratio = TokenRatio()
    ratio.learn("m", 900, 700)  # 9 / (9 / 7) is less than 7
    one, two = (read(Api.COMPLETIONS, {"model": "m", "prompt": ["x" * 9] * n}, ratio=ratio) for n in (1, 2))
    assert one.prompt is not None
    assert (one.prompt.length, one.prompt_len, two.prompt_len) == (7, 7, 14)


@pytest.mark.parametrize("spaces", [b"", b" ", b"\n" * 99])
def test_parse_ignores_spaces_before_first_prompt(spaces: bytes) -> None:
    assert read(Api.COMPLETIONS, b'{"prompt":[%b"%b"]}' % (spaces, b"x" * 400)).prompt_len == 100
    assert read(Api.COMPLETIONS, b'{"prompt":[%b[1,2],[3]]}' % spaces).prompts == 2


@pytest.mark.parametrize("prompt", [["x", 1], ["x", [1]], ["x", None], [[1], 1], [[1], "x"], [[1], None]])
def test_parse_refuses_prompts_of_several_kinds(prompt: list[Any]) -> None:
    with pytest.raises(RequestError, match="strings only, or of lists of token ids only"):
        read(Api.COMPLETIONS, {"prompt": prompt})


@pytest.mark.parametrize("prompt", [None, [], ""])
def test_parse_accepts_missing_or_empty_prompt(prompt: Any) -> None:
    assert read(Api.COMPLETIONS, {"prompt": prompt}).prompt_len == 1
    assert read(Api.COMPLETIONS, {"prompt_embeds": "AAAA"}).prompt is None


def test_parse_bounds_number_of_sequences() -> None:
    assert chat(n=1e12).prompts == MAX_PROMPTS
    assert chat(n=0).prompts == chat(n=-4).prompts == chat(n=None).prompts == 1


# ── headers ──────────────────────────────────────────────────────────────────


def test_parse_reads_session_from_best_agent_header() -> None:
    headers = [(b"x-session-id", b"b"), (b"x-claude-code-session-id", b" a "), (b"session-id", b"c")]
    assert read(Api.CHAT, CHAT, headers).session == "a"
    assert read(Api.CHAT, CHAT, [(b"x-dynamo-session-id", b"x" * 9999)]).session == "x" * 256


def test_parse_reads_turn_header_only_if_trusted() -> None:
    headers = [(b"x-session-turn", b"3")]
    assert read(Api.COMPLETIONS, {"prompt": "x"}, headers).turn == 0
    assert read(Api.COMPLETIONS, {"prompt": "x"}, headers, trust_session_headers=True).turn == 3
    later = CHAT | {"messages": [{"role": "user"}, {"role": "assistant", "content": "a" * 900}, {"role": "user"}]}
    assert read(Api.CHAT, later, [(b"x-session-turn", b"0")], trust_session_headers=True).est_hit == 0
    with pytest.raises(RequestError, match="X-Session-Turn"):
        read(Api.CHAT, CHAT, [(b"x-session-turn", b"many")], trust_session_headers=True)


@pytest.mark.parametrize("name", [b"x-team", b"x-vllm-priority", b"x-session-turn"])
def test_parse_refuses_header_that_policies_read_given_twice(name: bytes) -> None:
    with pytest.raises(FieldGivenTwice):
        read(Api.OTHER, CHAT, [(name, b"1"), (name, b"1")], tenant_header="x-team", trust_session_headers=True)
    assert read(Api.CHAT, CHAT, [(b"x-team", b"1"), (b"x-team", b"1"), (b"x-request-id", b"r")] * 2).id == "r"


def test_parse_reads_tenant_and_request_id_headers() -> None:
    headers = [(b"x-team", b"blue"), (b"x-request-id", b"r1")]
    request = read(Api.CHAT, CHAT, headers, tenant_header="x-team")
    assert (request.tenant, request.id) == ("blue", "r1")
    assert read(Api.CHAT, CHAT, headers).tenant == ""


# ── fields ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("sent", "read_as"), [(True, True), ("true", True), (1, True), (False, False), (None, False)])
def test_parse_reads_stream_as_leniently_as_engines(sent: Any, read_as: bool) -> None:
    assert chat(stream=sent).stream is read_as


@pytest.mark.parametrize(
    ("api", "name", "values"),
    [
        (Api.CHAT, "reasoning_effort", ("low", "high")),
        (Api.CHAT, "chat_template_kwargs", ({}, {"today": "Monday"})),
        (Api.MESSAGES, "output_config", ({"effort": "low"}, {"effort": "high"})),
        (Api.MESSAGES, "thinking", ({"type": "disabled"}, {"type": "adaptive"})),
        (Api.RESPONSES, "reasoning", ({"effort": "low"}, {"effort": "high"})),
    ],
)
def test_parse_separates_template_arguments(api: Api, name: str, values: tuple[Any, Any]) -> None:
    one, other = (read(api, CHAT | {"input": "x", name: value}).template_args for value in values)
    assert one != other


def test_parse_uses_ratio_and_key_of_aliased_model() -> None:
    ratio = TokenRatio()
    ratio.learn("m", 2000, 1000)
    long = CHAT | {"messages": [{"role": "user", "content": "x" * 3000}]}
    direct = read(Api.CHAT, long, ratio=ratio)
    alias = read(Api.CHAT, long | {"model": "alias"}, ratio=ratio, aliases={"alias": "m"})
    assert (alias.model, alias.served, direct.served) == ("alias", "m", "m")
    assert alias.prompt_len == direct.prompt_len
    assert alias.prompt is not None
    assert direct.prompt is not None
    assert alias.prompt.hashes.blocks == direct.prompt.hashes.blocks


def test_parse_separates_equal_prompts_by_model_and_salt() -> None:
    text = {"messages": [{"role": "user", "content": "x" * 3000}]}
    keys = [chat(**text, **more).prompt for more in ({}, {"model": "n"}, {"cache_salt": "s"})]
    assert len({tuple(prompt.hashes.blocks) for prompt in keys if prompt}) == 3
    assert [chat(**more).cache_salt for more in ({}, {"cache_salt": "s"}, {"cache_salt": 7})] == ["", "s", ""]


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params", "bootstrap_host", "bootstrap_room"])
def test_parse_refuses_internal_fields(name: str) -> None:
    for api in Api:
        with pytest.raises(RequestError, match="never by clients"):
            read(api, CHAT | {"input": "x", "prompt": "x", name: {"do_remote_prefill": True}})
        for place in ({"vllm_xargs": {name: "x"}}, {"sampling_params": {"extra_args": {name: {"a": 1}}}}):
            with pytest.raises(RequestError, match="never by clients"):
                read(api, CHAT | {"input": "x", "prompt": "x"} | place)
    assert chat(**{name: None}).model == "m"
    assert chat(vllm_xargs={"other": 1}, sampling_params=[1]).model == "m"


@pytest.mark.parametrize("api", Api)
def test_parse_looks_for_internal_fields_no_deeper_than_engines_merge_them(api: Api) -> None:
    nested: dict[str, Any] = {"kv_transfer_params": {"a": 1}}
    for _ in range(100):
        nested = {"extra_args": nested}
    body = CHAT | {"input": "x", "prompt": "x", "sampling_params": nested, "vllm_xargs": nested}
    assert read(api, body).model == "m"


@pytest.mark.parametrize(
    ("params", "passes"),
    [
        ({}, True),
        ({"lmcache.tag.user": "a", "lmcache.skip_save": True}, True),
        ({"lmcache.tag.user": "a", "do_remote_prefill": True}, False),
        ({"lmcache.tag.user": {"a": 1}}, False),
        ({"lmcache.other": 1}, False),
        ("lmcache.tag.user", False),
    ],
)
def test_parse_passes_settings_of_lmcache_for_clients(params: Any, passes: bool) -> None:
    for api in Api:
        body = CHAT | {"input": "x", "prompt": "x", "kv_transfer_params": params}
        if passes:
            assert read(api, body).model == "m"
        else:
            with pytest.raises(RequestError, match="never by clients"):
                read(api, body)


@pytest.mark.parametrize(
    ("api", "body", "param"),
    [
        (Api.CHAT, {"model": 5, "messages": []}, "model"),
        (Api.CHAT, {"model": "m"}, "messages"),
        (Api.MESSAGES, {"model": "m"}, "messages"),
        (Api.CHAT, {"messages": "hello canary"}, "messages"),
        (Api.CHAT, {"messages": ["hello canary"]}, "messages"),
        (Api.RESPONSES, {"input": 5}, "input"),
        (Api.RESPONSES, {"input": "x", "previous_response_id": 5}, "previous_response_id"),
        (Api.RESPONSES, {"input": "x", "conversation": 5}, "conversation"),
        (Api.COMPLETIONS, {"prompt": {"canary": 1}}, "prompt"),
        (Api.COMPLETIONS, {"prompt": ["canary", 5]}, "prompt"),
    ],
)
def test_parse_names_field_of_wrong_type_without_quoting_it(api: Api, body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(api, body)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert f"`{param}`" in str(caught.value)
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize("value", ["soon", [], {}, True, "9" * 4000, 1e300])
def test_parse_refuses_priority_without_number(value: Any) -> None:
    with pytest.raises(RequestError, match="`priority` must be a number"):
        chat(priority=value)


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (Api.CHAT, b'{"messages":[{"role":"user","content":%b}]}'),
        (Api.MESSAGES, b'{"messages":[{"role":"user","content":"x"}],"system":[{"text":"x","more":%b}]}'),
        (Api.RESPONSES, b'{"input":[{"role":"user","content":"x","more":%b}]}'),
    ],
)
def test_parse_refuses_too_deep_parts(api: Api, body: bytes) -> None:
    """A body may fit the stack as a whole, and its parts may not, because they are decoded deeper."""
    refused = set()
    for depth in (*range(sys.getrecursionlimit() - 100, sys.getrecursionlimit()), 30_000):
        try:
            read(api, body % (b"[" * depth + b"]" * depth))
        except RequestError as error:
            refused.add(str(error))
    assert refused == {TOO_DEEP}


def test_parse_takes_little_memory_for_thousands_of_images() -> None:
    """Waiting requests are bounded by the bytes of their bodies."""
    part = b'{"image_url":1,"source":1,"file":1,"audio_url":1,"video_url":1,"input_audio":1}'
    body = b'{"messages":[{"role":"user","content":[%b]}]}' % b",".join([part] * 1000)
    tracemalloc.start()
    try:
        request = read(Api.CHAT, body)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert request.prompt_len > 6000 * IMAGE_BYTES / 4
    assert held < 64 * len(body)


@pytest.mark.parametrize(
    "body",
    [
        b"--boundary\r\n\xff",
        b"",
        b'{"a":NaN}',
        b'\xef\xbb\xbf{"model":"m"}',
        b"\x1f\x8b\x08",
        '{"model":"m"}'.encode("utf-16"),
    ],
)
def test_parse_leaves_bodies_of_other_apis_unread(body: bytes) -> None:
    request = read(Api.OTHER, body)
    assert request.model == ""
    assert request.unread


def test_parse_reads_model_and_stream_of_other_apis() -> None:
    request = read(Api.OTHER, {"model": "m", "input": ["x"], "stream": True})
    assert (request.model, request.stream, request.unread) == ("m", True, "")


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"a","model":"a"}',
        b'{"model":"a","model":"longer"}',
        b'{"model":"longer","stream":true,"model":"a"}',
        b'{"mod\\u0065l":"a","model":"b"}',
        b'{"stream":true,"model":"a","stream":false}',
        b'{"cache_salt":"a","x":{},"cache_salt":"b"}',
    ],
)
@pytest.mark.parametrize("api", Api)
def test_parse_refuses_field_given_twice_in_every_api(api: Api, body: bytes) -> None:
    with pytest.raises(FieldGivenTwice, match="twice"):
        read(api, body)


@pytest.mark.slow
@settings(max_examples=300)
@given(st.sampled_from(list(Api)), st.binary(max_size=60))
def test_parse_raises_only_request_errors_for_bytes(api: Api, body: bytes) -> None:
    with contextlib.suppress(RequestError):
        assert read(api, body).prompt_len >= 1


FIELDS = ["model", "messages", "prompt", "input", "system", "instructions", "tools", "n", "priority", "stream"]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from(["", "assistant"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "output", "id"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.mark.slow
@settings(max_examples=300)
@given(st.sampled_from(list(Api)), st.dictionaries(st.sampled_from(FIELDS), ANYTHING))
def test_parse_raises_only_request_errors_for_json(api: Api, body: dict[str, Any]) -> None:
    with contextlib.suppress(RequestError):
        request = read(api, body)
        assert request.prompts >= 1
        assert request.prompt_len >= 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
TOP = st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), JSON, max_size=6)


def top_of(body: bytes) -> dict[str, Raw]:
    return members(screen(body).body)


@given(TOP, st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_spans_find_each_value(top: dict[str, Any], ascii_only: bool, indent: int | str | None) -> None:
    body = json.dumps(top, ensure_ascii=ascii_only, indent=indent).encode()
    found = top_of(body)
    walked = {name: json.loads(body[start:end]) for name, start, end in spans(body, found)}
    assert walked == top
    assert list(walked) == list(top)


@given(TOP, st.text(st.characters(exclude_categories=["Cs"])), st.text(st.characters(exclude_categories=["Cs"])))
def test_patch_model_changes_only_the_model(top: dict[str, Any], old: str, new: str) -> None:
    top = top | {"model": old, "tools": [{"model": old}], "note": '"model":"x"'}
    body = json.dumps(top).encode()
    (start, end) = next((start, end) for name, start, end in spans(body, top_of(body)) if name == "model")
    patched = patch_model(body, new)
    assert json.loads(patched) == top | {"model": new}
    assert patched.startswith(body[:start])
    assert patched.endswith(body[end:])


def test_members_accept_equal_names_below_top_level() -> None:
    assert set(top_of(b'{"model":"a","tools":[{"model":1,"stream":2}],"meta":{"model":"b"}}')) == {
        "model",
        "tools",
        "meta",
    }


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"[1]", "JSON object"),
        (b'"text"', "JSON object"),
        (b"null", "JSON object"),
        (b'{"a":1} trailing', "not valid JSON"),
        (b'{"a":', "not valid JSON"),
        (b'{"a":NaN}', "NaN"),
        (b'{"a":-Infinity}', "Infinity"),
        (b'{"a":"line\nbreak"}', "not valid JSON"),
        (b'\xef\xbb\xbf{"a":1}', "byte order mark"),
        (gzip.compress(b'{"a":1}', mtime=0), "compressed"),
        ('{"a":1}'.encode("utf-16"), "UTF-16"),
        ('{"a":1}'.encode("utf-16-le"), "UTF-16"),
        ('{"a":1}'.encode("utf-32-be"), "UTF-32"),
        (b'{"\xff":1}', "UTF-8"),
        (b'{"a":"\\ud800"}', "surrogate"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "more than 65536"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{bytes(value[:12])!r}",
)
def test_members_refuse_invalid_json_and_name_the_rule(body: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        top_of(body)
    assert caught.value.status == 400


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_members_refuse_too_deep_body(opening: bytes, closing: bytes) -> None:
    deep = opening * 30_000 + b"1" + closing * 30_000
    if sys.version_info >= (3, 14):  # as deep as the stack is, which the bound on values keeps from its end
        assert bytes(top_of(b'{"a":' + deep + b"}")["a"]) == deep
        return
    with pytest.raises(RequestError, match="nests") as caught:
        top_of(b'{"a":' + deep + b"}")
    assert caught.value.status == 400


def test_members_refuse_too_many_fields() -> None:
    with pytest.raises(RequestError, match="top-level fields"):
        top_of(json.dumps({f"k{i}": i for i in range(2000)}).encode())


def test_members_refuse_too_long_names() -> None:
    assert len(members(b'{"%b":1}' % (b"k" * MAX_NAMES_BYTES))) == 1
    with pytest.raises(RequestError, match="names of the body's top-level fields take more than 16384 bytes"):
        members(b'{"%b":1,"b":2}' % (b"k" * MAX_NAMES_BYTES))


def test_members_accept_huge_numbers() -> None:
    body = b'{"a":1e400,"b":' + b"9" * 4000 + b"}"
    assert bytes(top_of(body)["b"]) == b"9" * 4000


def test_members_errors_quote_nothing() -> None:
    with pytest.raises(RequestError) as caught:
        top_of(b'{"secret canary": "secret canary" "secret canary"}')
    assert "canary" not in str(caught.value)


def test_members_keep_no_way_back_through_a_long_name() -> None:
    # The walk by lengths lands at the end of a string, from where white space looks like a name.
    body = b'{"a":1,"a":"y,    "' + b" " * 1_000_000 + b',"b":2}'
    tracemalloc.start()
    try:
        with pytest.raises(FieldGivenTwice):
            members(body)
        assert tracemalloc.get_traced_memory()[1] < len(body)
    finally:
        tracemalloc.stop()


@given(
    st.lists(st.tuples(st.text(st.characters(exclude_categories=["Cs"]), max_size=3), JSON), max_size=6),
    st.sampled_from([(",", ":"), (", ", ": "), (",", ": "), (", ", ":")]),
    st.booleans(),
)
def test_members_find_field_given_twice_in_any_spelling(
    given_members: list[tuple[str, Any]], separators: tuple[str, str], escaped: bool
) -> None:
    texts = [separators[1].join(json.dumps(one, ensure_ascii=escaped) for one in pair) for pair in given_members]
    body = ("{" + separators[0].join(texts) + "}").encode()
    if len(dict(given_members)) == len(given_members):
        assert {name: json.loads(bytes(value)) for name, value in top_of(body).items()} == dict(given_members)
    else:
        with pytest.raises(RequestError, match="twice"):
            top_of(body)
