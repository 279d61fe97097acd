"""Model of one engine."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.lab.engine import (
    Engine,
    EngineConfig,
    QueueFullError,
    SequenceRequest,
    SequenceState,
    StepTime,
    TooLongError,
)


def test_step_time_defaults_match_measured_h20() -> None:
    step = StepTime()
    prefill = step(4096, 4096 * 2048, 0, 0)
    assert 4096 / prefill == pytest.approx(16_594, rel=0.1)
    decode = step(0, 0, 100, 100 * 5000)
    assert decode == pytest.approx(0.038, rel=0.1)


def test_step_time_adds_every_part_of_batch() -> None:
    step = StepTime(fixed_s=1, prefill_s=10, attention_s=100, decode_s=1000, context_s=10_000)
    assert step(2, 3, 4, 5) == 1 + 20 + 300 + 4000 + 50_000


EVENTS = Path(__file__).parents[1] / "data" / "kv_events" / "kv_int_hash.jsonl"
FLAT = StepTime(fixed_s=1.0, prefill_s=0.0, attention_s=0.0, decode_s=0.0, context_s=0.0)


def engine(**changes: int) -> Engine:
    values = {"block_size": 4, "blocks": 64, "max_model_len": 128, "max_batched_tokens": 32, **changes}
    return Engine(EngineConfig(step_time=FLAT, **values))


def keys(name: int, tokens: int) -> list[int]:
    return [name * 1000 + index for index in range(tokens // 4)]


def run(model: Engine, now: float = 0.0) -> float:
    """Run until the engine is idle; return the time."""
    for _ in range(10_000):
        duration = model.start(now)
        if duration is None:
            return now
        now += duration
        model.finish(now)
    raise AssertionError("it does not end")


def test_engine_emits_first_token_after_prefill_then_one_a_step() -> None:
    model = engine()
    sequence = SequenceRequest(prompt_len=10, output_len=3)
    model.submit(sequence, 0.0)
    assert run(model) == 3.0
    assert (sequence.first_token_s, sequence.ended_s, sequence.emitted) == (1.0, 3.0, 3)
    assert sequence.state is SequenceState.FINISHED


def test_engine_prefills_long_prompt_in_chunks_while_others_decode() -> None:
    model = engine()
    short = SequenceRequest(prompt_len=4, output_len=6)
    model.submit(short, 0.0)
    model.start(0.0)
    model.finish(1.0)
    long = SequenceRequest(prompt_len=70, output_len=1)
    model.submit(long, 1.0)
    run(model, 1.0)
    # A step has room for one decode token and 31 prompt tokens: 70 take three steps.
    assert long.first_token_s == 4.0
    assert short.ended_s == 6.0


def test_engine_later_turn_hits_history_but_computes_last_token() -> None:
    model = engine()
    first = SequenceRequest(prompt_len=16, output_len=9, keys=keys(1, 24))
    model.submit(first, 0.0)
    now = run(model)
    again = SequenceRequest(prompt_len=16, output_len=1, keys=keys(1, 16))
    later = SequenceRequest(prompt_len=40, output_len=1, keys=keys(1, 24) + keys(2, 16))
    for sequence in (again, later):
        model.submit(sequence, now)
    run(model, now)
    assert (first.hit_len, again.hit_len, later.hit_len) == (0, 12, 24)
    assert (model.totals.queries, model.totals.hits) == (72, 36)


def test_engine_blocks_can_be_hit_after_their_step() -> None:
    model = engine()
    first = SequenceRequest(prompt_len=9, output_len=1, keys=keys(1, 8))
    second = SequenceRequest(prompt_len=9, output_len=1, keys=keys(1, 8))
    model.submit(first, 0.0)
    model.submit(second, 0.0)
    model.start(0.0)
    assert model.hit_length(keys(1, 8)) == 0
    model.finish(1.0)
    assert model.hit_length(keys(1, 8)) == 8
    assert second.hit_len == 0


@pytest.mark.parametrize(
    ("sizes", "prompt_len", "running"),
    [({"max_running": 2}, 4, 2), ({"blocks": 8, "max_model_len": 32, "max_batched_tokens": 64}, 20, 1)],
    ids=["batch", "KV blocks"],
)
def test_engine_queues_while_it_is_full(sizes: dict[str, int], prompt_len: int, running: int) -> None:
    model = engine(**sizes)
    for _ in range(running + 1):
        model.submit(SequenceRequest(prompt_len=prompt_len, output_len=2), 0.0)
    model.start(0.0)
    assert (len(model.running), len(model.waiting)) == (running, 1)
    model.finish(1.0)
    run(model, 1.0)
    assert model.totals.generated == 2 * (running + 1)


def test_engine_preempts_last_admitted_when_decoding_needs_blocks() -> None:
    model = engine(blocks=8, max_model_len=32)
    first = SequenceRequest(prompt_len=15, output_len=17, keys=keys(1, 32))
    second = SequenceRequest(prompt_len=15, output_len=17, keys=keys(2, 32))
    model.submit(first, 0.0)
    model.submit(second, 0.0)
    run(model)
    assert (first.preemptions, first.emitted) == (0, 17)
    assert second.preemptions >= 1
    assert (second.emitted, second.state) == (17, SequenceState.FINISHED)
    assert model.totals.generated == 34


def test_engine_abort_frees_blocks_at_once_also_during_step() -> None:
    model = engine()
    running = SequenceRequest(prompt_len=20, output_len=50)
    other = SequenceRequest(prompt_len=4, output_len=1)
    model.submit(running, 0.0)
    model.submit(other, 0.0)
    model.start(0.0)
    waiting = SequenceRequest(prompt_len=4, output_len=1)
    model.submit(waiting, 0.5)
    model.abort(running, 0.5)
    model.abort(waiting, 0.5)
    model.abort(running, 0.6)
    assert (running.state, running.ended_s, model.cache.used) == (SequenceState.ABORTED, 0.5, 1)
    result = model.finish(1.0)
    assert (result.finished, result.decoded, running.emitted) == ([other], 1, 0)
    assert not model.busy
    assert model.start(1.0) is None


def test_engine_evicts_what_a_real_engine_evicted() -> None:
    """Eight prompts in a cache of 199 blocks (vLLM reserves one of its 200); the last one evicts 60."""
    # This engine computes a lone prompt of 2,000 tokens in one step.
    real = Engine(EngineConfig(block_size=32, blocks=199, max_model_len=2048, step_time=FLAT))
    chains: dict[int, list[int]] = {}
    removed: set[int] = set()
    now = 0.0
    for line in EVENTS.read_bytes().splitlines():
        for event in orjson.loads(line)["payload"][1]:
            if event["type"] == "BlockRemoved":
                removed.update(event["block_hashes"])
            elif event["type"] == "BlockStored":
                chain = chains.pop(event["parent_block_hash"], []) + event["block_hashes"]
                chains[chain[-1]] = chain
                # The last block of each prompt is partial.
                real.submit(SequenceRequest(32 * len(chain) + 16, 1, chain), now)
                now = run(real, now)
    assert (len(chains), len(removed)) == (7, 60)
    for chain in chains.values():
        kept = next((at for at, block in enumerate(chain) if block in removed), len(chain))
        assert removed.issuperset(chain[kept:])
        assert real.hit_length(chain) == 32 * kept


def test_engine_full_queue_rejects_and_counts() -> None:
    model = engine(max_running=1, max_waiting=1)
    model.submit(SequenceRequest(prompt_len=4, output_len=9), 0.0)
    model.start(0.0)
    model.submit(SequenceRequest(prompt_len=4, output_len=9), 0.1)
    with pytest.raises(QueueFullError):
        model.submit(SequenceRequest(prompt_len=4, output_len=9), 0.2)
    assert model.totals.refused == 1


def test_engine_rejects_sequence_that_can_never_fit() -> None:
    with pytest.raises(TooLongError, match="120 prompt and 9 output tokens exceed max_model_len 128"):
        engine().submit(SequenceRequest(prompt_len=120, output_len=9), 0.0)
    with pytest.raises(ValueError, match="max_model_len is 500"):
        engine(max_model_len=500)
    with pytest.raises(ValueError, match="must be at least 1"):
        engine().submit(SequenceRequest(prompt_len=0, output_len=1), 0.0)


def test_engine_steps_begin_and_end_in_turn() -> None:
    model = engine()
    with pytest.raises(RuntimeError, match="no step is under way"):
        model.finish(0.0)
    model.submit(SequenceRequest(prompt_len=4, output_len=1), 0.0)
    model.start(0.0)
    with pytest.raises(RuntimeError, match="a step is under way"):
        model.start(0.0)


requests = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 24), st.integers(1, 3), st.integers(0, 30), st.booleans()),
    min_size=1,
    max_size=25,
)


@given(requests)
def test_engine_every_sequence_ends_and_every_block_is_freed(
    arrivals: list[tuple[int, int, int, int, bool]],
) -> None:
    model = engine(blocks=18, max_model_len=64, max_running=4)
    sequences = []
    left = sorted(arrivals, key=lambda arrival: arrival[3])
    now = 0.0
    for _ in range(5000):
        while left and left[0][3] <= now:
            prompt_len, output_len, prefix, _, leaves = left.pop(0)
            sequence = SequenceRequest(prompt_len, output_len, keys(prefix, prompt_len + output_len))
            model.submit(sequence, now)
            sequences.append((sequence, leaves))
        duration = model.start(now)
        if duration is None:
            if not left:
                break
            now = float(left[0][3])
            continue
        assert 0 < model.cache.used <= 18
        assert len(model.running) <= 4
        now += duration
        for sequence, leaves in sequences:
            if leaves and sequence.emitted >= 3:
                model.abort(sequence, now)
        model.finish(now)
    assert all(sequence.ended for sequence, _ in sequences)
    for sequence, _ in sequences:
        if sequence.state is SequenceState.FINISHED:
            assert sequence.emitted == sequence.output_len
    totals = model.totals
    assert totals.generated == sum(sequence.emitted for sequence, _ in sequences)
    admitted = [sequence for sequence, _ in sequences if sequence.hit_len is not None]
    begun = [sequence for sequence in admitted if sequence.first_token_s is not None]
    for of, prompts, found in ((admitted, totals.queries, totals.hits), (begun, totals.prompt, totals.cached)):
        assert prompts == sum(sequence.prompt_len for sequence in of)
        assert found == sum(sequence.hit_len or 0 for sequence in of) <= prompts
    assert (model.cache.used, model.busy) == (0, False)
