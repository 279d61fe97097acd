"""Reading `/metrics` pages: captures of real ones, old names, and hostile ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.fleet.instance import PrefixTokens
from smetric.sources.vllm import MAX_SERIES, Page, parse_page

CAPTURES = Path(__file__).parents[1] / "data" / "vllm"
LOAD = b"vllm:num_requests_running 4.0\nvllm:num_requests_waiting 6.0\n"


def capture(name: str) -> bytes:
    response = (CAPTURES / f"{name}.http").read_bytes().split(b"===== RESPONSE =====", 1)[1]
    return response.split(b"\r\n\r\n", 1)[1]


@pytest.mark.parametrize(
    ("name", "running", "waiting", "usage", "block_size", "blocks"),
    [
        ("metrics_idle", 0, 0, 0.0, "32", "200"),
        ("metrics_load", 4, 6, 0.40201005025125625, "32", "200"),
        ("b_metrics_idle", 0, 0, 0.0, "128", "64"),
        ("dp2_metrics_load", 8, 2, (0.12698412698412698 + 0.06349206349206349) / 2, "128", "128"),
    ],
)
def test_real_pages_are_read(
    name: str, running: float, waiting: float, usage: float, block_size: str, blocks: str
) -> None:
    page = parse_page(capture(name))
    assert (page.running, page.waiting, page.kv_usage, page.refused) == (running, waiting, usage, 0)
    assert page.cache["block_size"] == block_size
    assert page.cache["num_gpu_blocks"] == blocks
    assert page.cache["enable_prefix_caching"] == "True"
    # Several API servers behind one port export no start time.
    assert (page.started_at is None) == (name == "dp2_metrics_load")
    assert set(page.counters) == {
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:external_prefix_cache_hits_total",
    }


def test_counters_are_summed_over_engines() -> None:
    assert parse_page(capture("dp2_metrics_load")).counters["vllm:prompt_tokens_total"] == 1212 + 612


def test_old_names_are_read_and_the_new_one_wins() -> None:
    old = b"vllm:gpu_cache_usage_perc 0.5\nvllm:gpu_prefix_cache_queries_total 7\n"
    page = parse_page(LOAD + old)
    assert page.kv_usage == 0.5
    assert page.counters == {"vllm:gpu_prefix_cache_queries_total": 7.0}
    assert parse_page(LOAD + old + b"vllm:kv_cache_usage_perc 0.25\n").kv_usage == 0.25


def test_a_time_stamp_after_the_value_is_no_part_of_it() -> None:
    assert parse_page(b'vllm:num_requests_running{engine="0"} 3 1700000000000\n').running == 3.0


def test_labels_may_hold_anything() -> None:
    line = b'vllm:num_requests_running{model_name="a} 9 \\"x\\" {b",engine="0"} 2.0\n'
    assert parse_page(line).running == 2.0


def test_a_series_given_twice_counts_once() -> None:
    line = b'vllm:num_requests_running{engine="0"} 2.0\n'
    assert parse_page(line + line).running == 2.0


@pytest.mark.parametrize("value", [b"NaN", b"+Inf", b"-Inf", b"-1", b"1e308", b"words", b"0x10", b"1_0_"])
def test_an_insane_value_is_unknown_and_noted(value: bytes) -> None:
    page = parse_page(b"vllm:num_requests_running %b\nvllm:num_requests_waiting 1\n" % value)
    assert (page.running, page.waiting, page.refused) == (None, 1.0, 1)


def test_one_insane_engine_makes_the_sum_unknown() -> None:
    page = parse_page(b'vllm:num_requests_running{engine="0"} 4\nvllm:num_requests_running{engine="1"} NaN\n')
    assert page.running is None


@pytest.mark.parametrize(("value", "usage"), [(b"1.0000001", 1.0), (b"1", 1.0), (b"1.5", None), (b"40.2", None)])
def test_usage_is_a_share(value: bytes, usage: float | None) -> None:
    assert parse_page(b"vllm:kv_cache_usage_perc " + value + b"\n").kv_usage == usage


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"<html>404</html>",
        b"\x1f\x8b\x08\x00garbage",
        b"other:num_requests_running 4\n",
        b"vllm:num_requests_running_max 4\n",
        b"# HELP vllm:num_requests_running 4\n",
        b"x vllm:num_requests_running 4\n",
        b'vllm:num_requests_waiting_by_reason{reason="capacity"} 4\n',
    ],
)
def test_a_page_of_anything_else_says_nothing(text: bytes) -> None:
    assert parse_page(text) == Page()


def test_a_number_that_was_cut_off_is_not_read() -> None:
    whole = capture("metrics_load")
    at = whole.index(b"\nvllm:num_requests_waiting{")
    end = whole.index(b"\n", at + 1)
    assert parse_page(whole[: end + 1]).waiting == 6.0
    for cut in range(at, end):
        assert parse_page(whole[:cut]).waiting is None


def test_a_series_on_the_border_of_two_stretches_is_read() -> None:
    for padding in range(65480, 65560):
        text = b"#" * padding + b"\n" + LOAD + b"y 1\n" * 20000
        assert parse_page(text).running == 4.0
        assert parse_page(text).waiting == 6.0


@pytest.mark.parametrize(
    "text",
    [
        b"vllm:num_requests_running{" + b"}" * 500_000 + b" 4\n",
        b'vllm:num_requests_running{a="' + b"x" * 500_000 + b'"} 4\n',
        b"vllm:num_requests_running " + b"9" * 500_000 + b"\n",
    ],
)
def test_a_hostile_line_is_passed_over(text: bytes) -> None:
    page = parse_page(text + b"vllm:num_requests_waiting 1\n")
    assert (page.running, page.waiting) == (None, 1.0)


def test_a_page_of_too_many_series_says_nothing() -> None:
    lines = [b'vllm:num_requests_running{engine="%d"} 1\n' % i for i in range(MAX_SERIES + 1)]
    assert parse_page(b"".join(lines)) == Page(refused=MAX_SERIES + 1)
    assert parse_page(b"".join(lines[1:])).running == MAX_SERIES


LINES = st.lists(
    st.one_of(
        st.binary(max_size=40),
        st.builds(
            lambda name, labels, value: name + labels + b" " + value,
            st.sampled_from([b"vllm:num_requests_running", b"vllm:kv_cache_usage_perc", b"process_start_time_seconds"]),
            st.sampled_from([b"", b"{}", b'{engine="0"}', b'{engine="1"}', b"{"]),
            st.sampled_from([b"1", b"0.5", b"nan", b"-3", b"1e400", b""]),
        ),
    )
)


@given(LINES)
def test_whatever_a_page_holds_what_is_read_is_sane(lines: list[bytes]) -> None:
    page = parse_page(b"\n".join(lines))
    for value in (page.running, page.waiting, page.started_at, *page.counters.values()):
        assert value is None or 0 <= value <= 1e15 * MAX_SERIES
    assert page.kv_usage is None or 0 <= page.kv_usage <= 1


def test_tokens_found_in_caches_are_read_from_real_pages_and_under_their_old_names() -> None:
    assert parse_page(capture("metrics_load")).prefix_tokens == PrefixTokens(local=2272, external=0, missed=2427)
    old = b"vllm:gpu_prefix_cache_queries_total 100.0\nvllm:gpu_prefix_cache_hits_total 60.0\n"
    assert parse_page(old).prefix_tokens == PrefixTokens(local=60, external=0, missed=40)
    connected = (
        b"vllm:prefix_cache_queries_total 100.0\nvllm:prefix_cache_hits_total 60.0\n"
        b"vllm:external_prefix_cache_hits_total 30.0\n"
    )
    assert parse_page(connected).prefix_tokens == PrefixTokens(local=60, external=30, missed=10)


def test_a_page_that_names_only_half_of_it_says_nothing_of_tokens_found() -> None:
    assert parse_page(b"vllm:prefix_cache_hits_total 60.0\n").prefix_tokens is None
    assert parse_page(b"vllm:prefix_cache_queries_total 60.0\n").prefix_tokens is None


def lora(value: float, running: str, waiting: str = "", most: str = "4") -> bytes:
    labels = b'max_lora="%b",running_lora_adapters="%b",waiting_lora_adapters="%b"'
    return b"vllm:lora_requests_info{%b} %f\n" % (
        labels % (most.encode(), running.encode(), waiting.encode()),
        value,
    )


def test_adapters_in_use_are_those_of_the_newest_series() -> None:
    page = parse_page(LOAD + lora(1.7e9 + 2, "sql,law", "law, tax") + lora(1.7e9, "old"))
    assert (page.loras, page.lora_room) == (frozenset({"sql", "law", "tax"}), True)


def test_however_many_sets_of_adapters_were_in_use_the_page_says_what_it_says() -> None:
    before = b"".join(lora(1.7e9 + at, f"a{at}") for at in range(MAX_SERIES))
    page = parse_page(LOAD + before + lora(1.7e9 + MAX_SERIES, "sql"))
    assert (page.running, page.loras) == (4.0, frozenset({"sql"}))


@pytest.mark.parametrize(("running", "room"), [("a,b,c,d", False), ("", True)])
def test_there_is_room_for_an_adapter_below_the_most(running: str, room: bool) -> None:
    assert parse_page(LOAD + lora(1.7e9, running)).lora_room is room


def test_an_engine_without_adapters_says_nothing_of_them() -> None:
    page = parse_page(LOAD)
    assert (page.loras, page.lora_room) == (None, None)
    assert parse_page(LOAD + lora(1.7e9, "sql", most="many")).lora_room is None
