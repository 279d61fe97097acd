"""Traces of traffic."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from smetric.errors import ConfigError
from smetric.lab.engine import Engine, EngineConfig, SequenceRequest
from smetric.lab.traces import BLOCK_TOKENS, arrivals


def line(at_ms: int, prompt: int, blocks: list[int], **fields: Any) -> dict[str, Any]:
    return {"timestamp": at_ms, "input_length": prompt, "output_length": 20, "hash_ids": blocks, **fields}


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def test_traces_public_file_keeps_arrival_order_and_full_blocks(tmp_path: Path) -> None:
    path = write(tmp_path / "mooncake.jsonl", line(3000, 1030, [1, 2, 3]), line(1000, 500, [1]))
    first, second = arrivals([path])
    assert (first.at_s, first.sequence.prompt_len, first.sequence.output_len, first.sequence.keys) == (0, 500, 20, [])
    assert (second.at_s, second.sequence.keys) == (2.0, [1, 2])
    assert (first.id, first.parent, first.session) == ("", "", "")


def test_traces_own_file_names_parents_and_joins_several_runs(tmp_path: Path) -> None:
    early = write(
        tmp_path / "early.jsonl",
        line(0, 600, [7], unix_ms=1_000_000, status=200, chat_id="A", session="s", parent_chat_id=None),
        line(50, 600, [7], unix_ms=1_000_050, status=503, chat_id="B", session="s", parent_chat_id="A"),
        {**line(60, 600, [7], unix_ms=1_000_060, status=200, error_type="upstream_closed"), "output_length": None},
    )
    late = tmp_path / "late.jsonl.gz"
    text = json.dumps(line(0, 600, [7], unix_ms=1_500_000, status=200, chat_id="C", session="s", parent_chat_id="A"))
    late.write_bytes(gzip.compress(text.encode() + b"\n"))
    assert [(each.at_s, each.id, each.parent, each.session) for each in arrivals([late, early])] == [
        *((0.0, "A", "", "s"), (500.0, "C", "A", "s")),
    ]


def test_traces_replayed_on_engine_hit_repeated_prefixes(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", line(0, 1100, [1, 2]), line(9000, 2100, [1, 2, 3, 4]))
    engine = Engine(EngineConfig(block_size=BLOCK_TOKENS, blocks=64, max_model_len=8192))
    now = 0.0
    ran: list[SequenceRequest] = []
    for arrival in arrivals([path]):
        now = max(now, arrival.at_s)
        engine.submit(arrival.sequence, now)
        while (duration := engine.start(now)) is not None:
            now += duration
            engine.finish(now)
        ran.append(arrival.sequence)
    assert [each.hit_len for each in ran] == [0, 2 * BLOCK_TOKENS]
    assert all(each.emitted == 20 for each in ran)


def test_traces_unknown_output_length_must_be_given(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", line(0, 10, []), line(1, 10, []) | {"output_length": None})
    with pytest.raises(ConfigError, match=r"trace\.jsonl:2: output_length is unknown, .*`stream_options`"):
        arrivals([path])
    assert [each.sequence.output_len for each in arrivals([path], unknown_output=300)] == [20, 300]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "contains no answered request"),
        (b'{"kind":"header","version":1}\n', r"trace\.jsonl:1: not a line of a trace"),
        (b"\xff\n", r"trace\.jsonl:1: not a line of a trace"),
        (b'{"timestamp":0,"input_length":0,"output_length":1,"hash_ids":[]}\n', "input_length is 0"),
    ],
)
def test_traces_reject_other_files(text: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=said):
        arrivals([path])
