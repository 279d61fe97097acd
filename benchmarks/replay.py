"""What a record costs: writing a decision down at the end of its request, and making recorded decisions again.

    python benchmarks/replay.py [--decisions 2000] [--instances 32] [--suffix .gz]

Prints microseconds per decision on the event loop (median and 99th percentile), bytes per line, and for every shipped
policy how many recorded decisions a second of CPU time makes again, by the record's own policy: median of three runs.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from smetric import names
from smetric.features import VOCABULARY
from smetric.files import shipped_policies
from smetric.fleet.exchange import Exchanges
from smetric.fleet.instance import Instance
from smetric.fleet.record import DecisionRecord
from smetric.policy import Decision, Kind, Outcome, Policy, Snapshot, load
from smetric.policy.snapshot import Origins
from smetric.policy.vocabulary import Feature
from smetric.records.reader import Reading, packer
from smetric.records.recorder import Recorder, header
from smetric.records.replay import RECORDED, Comparison, Judges, replay
from smetric.records.writer import RotatedFile, Writer
from smetric.request.request import Api, InferenceRequest, Usage
from smetric.routing.policy_files import libraries_beside

ROUNDS = 3
#: Width of the column of names.
_NAME = 26
_OUTCOMES = {
    Outcome.ROUTE: names.ROUTED,
    Outcome.REJECT: names.REJECTED,
    Outcome.HOLD: names.HELD,
    Outcome.NO_CANDIDATE: names.NO_CANDIDATE,
}


def records(policy: Policy, count: int, size: int) -> list[DecisionRecord]:
    """*count* decisions of *policy* on *size* instances, one turn in four a first one."""
    rng = random.Random(7)
    instances = [Instance(f"gpu-{i:02}", f"http://10.0.0.{i}:8000") for i in range(size)]
    ids = [instance.id for instance in instances]
    cursors: dict[str, str] = {}
    made: list[DecisionRecord] = []
    for _ in range(count):
        prompt_len = rng.randint(1_000, 200_000)
        turn = rng.randint(0, 3)
        request = InferenceRequest(
            turn=turn,
            prompt_len=prompt_len,
            est_hit=prompt_len // 2 if turn else 0,
            model="org/model-30b",
            session=f"{rng.getrandbits(128):032x}",
            id=f"{rng.getrandbits(128):032x}",
            api=Api.CHAT,
        )
        decision = policy.decide(snapshot(policy, ids, rng, prompt_len, looked_up=False), request, cursors, 12345)
        if not isinstance(decision, Decision):
            decision = policy.decide(snapshot(policy, ids, rng, prompt_len, looked_up=True), request, cursors, 12345)
        assert isinstance(decision, Decision)
        cursors = {**cursors, **decision.cursors}
        record = DecisionRecord(
            time_ns=1_800_000_000_000_000_000 + len(made),
            outcome=_OUTCOMES[decision.outcome],
            request=request,
            policy=policy,
            generation=1,
            decision=decision,
            instance=instances[decision.index] if decision.index >= 0 else None,
            evaluate_s=1.2e-5,
        )
        record.status, record.ttft_s, record.duration_s = 200, 0.25 + rng.random(), 4 + rng.random()
        record.usage = Usage(prompt_len, 300, prompt_len // 3)
        made.append(record)
    return made


def snapshot(policy: Policy, ids: list[str], rng: random.Random, prompt_len: int, *, looked_up: bool) -> Snapshot:
    """Loads as the router has them, each measured at a time of its own, and hits on a few."""
    now = 1e5 + rng.random()
    columns: dict[str, list[Any]] = {}
    stamps = {}
    origins: dict[str, Origins] = {}
    for name in policy.reads:
        feature = VOCABULARY.features[name]
        if feature.lookup:
            if looked_up:
                columns[name] = [rng.choice([0, 0, 0, rng.randint(0, prompt_len)]) for _ in ids]
                origins[name] = "prefix_index"
        else:
            columns[name] = ids if name == "id" else [cell(feature, rng) for _ in ids]
            stamps[name] = [now - rng.random() for _ in ids]
    return Snapshot(ids, columns, None, stamps, origins, now)


def cell(feature: Feature, rng: random.Random) -> Any:
    """A value that *feature* may have."""
    if feature.kind is Kind.NUMBER:
        return rng.uniform(0, 1) if feature.high == 1 else feature.low + rng.randint(0, 40)
    return rng.random() < 0.9 if feature.kind is Kind.BOOL else feature.default


def written(path: Path, made: list[DecisionRecord]) -> list[int]:
    """Write *made* to *path*; nanoseconds that each one took of the event loop."""
    writer = Writer(
        "decisions",
        RotatedFile(path, max_bytes=1 << 40, keep=1),
        packer(path),
        header,
        max_queued=1 << 40,
        on_lines=lambda result, lines: None,
    )
    recorder = Recorder(writer)
    exchange = Exchanges([]).begin({}, "/v1/chat/completions", trusted=True)
    taken = []
    for record in made:
        started = time.perf_counter_ns()
        recorder.decided(exchange, record)
        recorder.write(record)
        taken.append(time.perf_counter_ns() - started)
    writer.flush()
    return sorted(taken)


def again(path: Path) -> float:
    """Decisions that a second of CPU time makes again."""
    found = Comparison(RECORDED, "")
    started = time.process_time()
    replay(Reading([path]), Judges(None), None, found)
    taken = time.process_time() - started
    assert found.agreement == 1.0, "a decision did not come out as it was recorded"
    return found.compared / taken


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decisions", type=int, default=2_000, help="of each policy (default: %(default)s)")
    parser.add_argument("--instances", type=int, default=32, help="candidates (default: %(default)s)")
    parser.add_argument("--suffix", default=".gz", help="`.gz`, `.zst` or nothing (default: %(default)s)")
    given = parser.parse_args()
    print(f"{'':<{_NAME}}{'write µs p50 / p99':>20}{'bytes / packed':>18}{'again, per CPU s':>20}")
    for name, file in shipped_policies().items():
        policy = load(file.read_text(), VOCABULARY, path=name, libraries=libraries_beside(file))
        made = records(policy, given.decisions, given.instances)
        with tempfile.TemporaryDirectory() as folder:
            plain, packed = Path(folder) / "decisions.jsonl", Path(folder) / f"packed.jsonl{given.suffix}"
            taken = written(plain, made)
            written(packed, made)
            rates = [again(packed) for _ in range(ROUNDS)]
            sizes = [file.stat().st_size // len(made) for file in (plain, packed)]
        p50, p99 = (taken[int(len(taken) * q)] / 1000 for q in (0.5, 0.99))
        rate = statistics.median(rates)
        print(f"{name:<{_NAME}}{f'{p50:.1f} / {p99:.1f}':>20}{f'{sizes[0]} / {sizes[1]}':>18}{rate:>20,.0f}")


if __name__ == "__main__":
    main()
