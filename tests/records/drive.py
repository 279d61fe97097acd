"""Decision records of any policy on random snapshots, written as a router writes them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from smetric import names
from smetric.features import ON_DEMAND, VOCABULARY
from smetric.files import shipped_policies
from smetric.fleet.instance import Instance
from smetric.fleet.record import DecisionRecord
from smetric.policy import Decision, Kind, Need, Outcome, Policy, Snapshot, load
from smetric.policy.snapshot import Origins
from smetric.records.reader import packer
from smetric.records.recorder import Recorder, header
from smetric.records.writer import RotatedFile, Writer
from smetric.request.request import Api, InferenceRequest, Usage
from smetric.routing.policy_files import libraries_beside
from tests.fakes import exchange_of

_OUTCOMES = {
    Outcome.ROUTE: names.ROUTED,
    Outcome.REJECT: names.REJECTED,
    Outcome.HOLD: names.HELD,
    Outcome.NO_CANDIDATE: names.NO_CANDIDATE,
}


@functools.cache
def policy(text: str, **settings: float | str) -> Policy:
    """The policy *text*, with the libraries that ship."""
    libraries = libraries_beside(shipped_policies()["smetric"])
    return load(text, VOCABULARY, path="/etc/smetric/test.policy", settings=settings, libraries=libraries)


def instances(count: int) -> list[Instance]:
    return [Instance(f"gpu-{i}", f"http://10.0.0.{i}:8000") for i in range(count)]


class Fleet:
    """Random snapshots of instances; look-ups are made on demand, as by the router."""

    def __init__(self, rng: random.Random, count: int) -> None:
        self.rng = rng
        self.instances = instances(count)
        self.cursors: dict[str, str] = {}

    def request(self, **fields: Any) -> InferenceRequest:
        rng = self.rng
        turn = rng.choice([None, 0, 0, 1, 5])
        prompt_len = rng.randint(1, 200_000)
        given = {
            "turn": turn,
            "prompt_len": prompt_len,
            "est_hit": None if turn is None else rng.randint(0, prompt_len) if turn else 0,
            "priority": float(rng.randint(-2, 2)),
            "model": rng.choice(["m", "org/model-7b"]),
            "tenant": rng.choice(["", "blue", "red"]),
            "session": rng.choice(["", f"session-{rng.random()}"]),
            "lora": rng.choice(["", "green", "org/model-7b"]),
            "id": f"request-{rng.random()}",
            "held": rng.choice([0.0, 0.25]),
        }
        return InferenceRequest(api=Api.CHAT, **(given | fields))

    def decide(self, acting: Policy, request: InferenceRequest | None = None, generation: int = 1) -> DecisionRecord:
        """Decide as the router does; return the record."""
        request = request or self.request()
        request.is_described |= not ON_DEMAND.isdisjoint(acting.fields)
        seed = self.rng.getrandbits(63)
        chosen = [i for i in self.instances if self.rng.random() < 0.9] or self.instances[:1]
        looked_up: dict[str, list[Any]] = {}
        plain = {name: self.cells(name, chosen, request) for name in acting.reads if name not in acting.lookups}
        for name in acting.lookups_always:
            looked_up[name] = self.cells(name, chosen, request)
        while True:
            snapshot = self.snapshot(chosen, plain | looked_up)
            decided = acting.decide(snapshot, request, self.cursors, seed)
            if isinstance(decided, Decision):
                break
            assert isinstance(decided, Need)
            for name in decided.features:
                looked_up[name] = self.cells(name, chosen, request)
        if decided.index >= 0:
            self.cursors = {**self.cursors, **decided.cursors}
        return DecisionRecord(
            time_ns=self.rng.randrange(1_700_000_000_000_000_000, 1_800_000_000_000_000_000),
            outcome=_OUTCOMES[decided.outcome],
            request=request,
            policy=acting,
            generation=generation,
            decision=decided,
            instance=chosen[decided.index] if decided.index >= 0 else None,
            evaluate_s=2e-5,
        )

    def cells(self, name: str, chosen: Sequence[Instance], request: InferenceRequest) -> list[Any]:
        """Random cells, None where unknown."""
        feature, rng = VOCABULARY.features[name], self.rng
        if name == "id":
            return [instance.id for instance in chosen]
        if feature.kind is Kind.BOOL:
            return [rng.random() < 0.8 for _ in chosen]
        if feature.kind is Kind.STRING:
            return [rng.choice(["", "a", "blue"]) for _ in chosen]
        if feature.kind is Kind.SET:
            return [frozenset(rng.sample(["blue", "green", "org/model-7b"], rng.randint(0, 3))) for _ in chosen]
        unknown = rng.choice([0.0, 0.0, 0.2, 1.0])
        high = request.prompt_len if feature.at_most else min(feature.high, 9)
        step = rng.choice([0, 1, high / 3])  # few values that tie, or many
        cells = [
            None if rng.random() < unknown else min(high, rng.randint(0, 9) * step) if step else rng.random() * high
            for _ in chosen
        ]
        return [None if cell is None else max(feature.low, cell) for cell in cells]

    def snapshot(self, chosen: Sequence[Instance], cells: Mapping[str, list[Any]]) -> Snapshot:
        columns, known, stamps = {}, {}, {}
        origins: dict[str, Origins] = {}
        now = 1e5 + self.rng.random()
        measured = [None if self.rng.random() < 0.1 else now - 40 * self.rng.random() for _ in chosen]
        for name, column in cells.items():
            columns[name], known[name] = VOCABULARY.features[name].fill(column)
            if VOCABULARY.features[name].lookup:
                origins[name] = ["" if cell is None else self.rng.choice(["index", "lmcache"]) for cell in column]
            elif name in ("requests", "running", "waiting", "kv_usage"):
                stamps[name] = measured
        return Snapshot([instance.id for instance in chosen], columns, known, stamps, origins, now)


def settle(record: DecisionRecord) -> DecisionRecord:
    """Complete *record* as an ended exchange does."""
    decision = record.decision
    if record.status is None:
        record.status = 200 if record.instance is not None or decision is None else decision.status
    record.duration_s = 1.5
    record.usage = Usage(100, 20, 64)
    return record


def write(path: Path, records: Iterable[DecisionRecord], observed: Sequence[Policy] = ()) -> dict[str, int]:
    """Write *records* to *path*; return the numbers of lines by result."""
    results: dict[str, int] = {}
    writer = make_writer(path, results)
    recorder = Recorder(writer, observed)
    for record in records:
        recorder.decided(exchange_of(record), record)
        recorder.write(settle(record))
    writer.flush()
    return results


def make_writer(
    path: Path,
    results: dict[str, int],
    *,
    max_bytes: int = 1 << 30,
    keep: int = 4,
    max_queued: int = 1 << 30,
    first_line: Callable[[], bytes] = header,
) -> Writer:
    """Return a writer whose thread is not started; *results* counts lines by result."""

    def count(result: str, lines: int) -> None:
        results[result] = results.get(result, 0) + lines

    file = RotatedFile(path, max_bytes=max_bytes, keep=keep)
    return Writer("decisions", file, packer(path), first_line, max_queued=max_queued, on_lines=count)
