"""What telemetry costs a request: off, at 1 % and at 100 % of traces, and what decisions come to beside it.

    python benchmarks/telemetry.py [--requests 400] [--rounds 7] [--instances 32]

Prints microseconds of CPU of the whole process, the exporting thread included, per streamed request with one decision
and one attempt: median and least of the rounds, which alternate. Spans go to a collector in a process of its own that
keeps nothing. What tracing costs is the difference to `off`.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from benchmarks.kit.collector import collector
from smetric import names
from smetric.features import VOCABULARY
from smetric.fleet.instance import Instance
from smetric.fleet.record import DecisionRecord
from smetric.policy import Decision, Policy, Snapshot, load
from smetric.request.prompt import Prompt
from smetric.request.request import Api, InferenceRequest, Usage
from smetric.sources.measured import PrefillTime
from smetric.telemetry import logs
from smetric.telemetry.decisions import DecisionLog
from smetric.telemetry.exchange import Telemetry
from smetric.telemetry.metrics import Metrics, ModelLabels
from smetric.telemetry.outcomes import Outcomes, ServiceLevel
from smetric.telemetry.tracing import Tracing

ROUTE = "/v1/chat/completions"
POLICY = Path(__file__).parents[1] / "policies" / "smetric.policy"
#: Arms: how much is sampled, None for no tracing at all.
ARMS: dict[str, float | None] = {"off": None, "1 %": 0.01, "100 %": 1.0}
#: What a prefill takes on each instance.
PREFILL = PrefillTime(0.02, 1 / 20_000)
#: Requests after which what waits is sent, so that none is dropped.
FLUSH_EVERY = 200


def sink(ready: Connection) -> None:
    """The collector's process: prints its address, and ends on request."""
    with collector() as url:
        ready.send(url)
        ready.recv()


def telemetry(url: str, ratio: float | None, instances: list[Instance]) -> Telemetry:
    """A router's telemetry, that samples *ratio*."""
    environ = {}
    if ratio is not None:
        environ = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": url,
            "OTEL_TRACES_SAMPLER": "traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": str(ratio),
        }
    os.environ.update(environ)
    by_id = {instance.id: instance for instance in instances}
    metrics = Metrics()
    return Telemetry(
        tracing=Tracing(environ),
        metrics=metrics,
        decisions=DecisionLog(),
        outcomes=Outcomes(metrics.registry, ServiceLevel(1.0, 0.0001, 0.03), lambda _: PREFILL, by_id.get),
        models=ModelLabels(lambda: ["m"]),
        instances=lambda: instances,
    )


def decisions(policy: Policy, instances: list[Instance], count: int) -> list[tuple[InferenceRequest, Decision]]:
    """Later turns whose prompt some instance holds, none of which is full: they stay."""
    rng = random.Random(1)
    ids = [instance.id for instance in instances]
    made = []
    for _ in range(count):
        hits = [float(rng.choice((0, 512, 1024))) for _ in ids]
        hits[rng.randrange(len(ids))] = 4096.0
        loads = [float(rng.randrange(4, 8)) for _ in ids]
        snapshot = Snapshot(
            ids,
            {"hit_len": hits, "requests": loads},
            {},
            {"requests": [99.5] * len(ids)},
            {"hit_len": ["prefix_index"] * len(ids)},
            100.0,
        )
        request = InferenceRequest(
            turn=3, prompt_len=5000, est_hit=4096, model="m", session="s", api=Api.CHAT, stream=True
        )
        decided = policy.decide(snapshot, request, {}, 7)
        assert isinstance(decided, Decision)
        made.append((request, decided))
    return made


async def run(
    app: Telemetry, made: list[tuple[InferenceRequest, Decision]], by_id: Callable[[str], Instance | None]
) -> float:
    """Microseconds of CPU for each request."""
    headers = [(b"host", b"127.0.0.1:8080"), (b"content-type", b"application/json"), (b"user-agent", b"bench")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": ROUTE,
        "query_string": b"",
        "scheme": "http",
        "http_version": "1.1",
        "client": ("127.0.0.1", 5000),
        "server": ("127.0.0.1", 8080),
        "headers": headers,
    }
    usage = Usage(5000, 60, 4096)
    policy = made[0][1].policy
    started = time.process_time()
    for number, (request, decision) in enumerate(made):
        request.prompt = Prompt([b"hello"], 4.0)
        exchange = app.begin(scope, ROUTE, trusted=True)
        instance = by_id(decision.instance or "")
        exchange.decided(
            DecisionRecord(
                time_ns=time.time_ns(),
                outcome=names.ROUTED,
                request=request,
                policy=policy,
                generation=1,
                decision=decision,
                instance=instance,
                evaluate_s=0.000_01,
            )
        )
        attempt = exchange.attempt(ROUTE)
        attempt.first_output()
        exchange.answering()
        attempt.end(names.OK, status=200, usage=usage, finish_reason="stop")
        exchange.end(200, bytes_out=5000, events=60, usage=usage)
        if number % FLUSH_EVERY == FLUSH_EVERY - 1:
            await app.tracing.flush()
    await app.tracing.flush()
    return (time.process_time() - started) * 1e6 / len(made)


async def measure(url: str, requests: int, rounds: int, count: int) -> dict[str, list[float]]:
    """All rounds of all arms."""
    policy = load(POLICY.read_text(), VOCABULARY, path=str(POLICY))
    instances = [Instance(f"vllm-{i:02}", f"http://10.0.0.{i}:8000", models=["m"]) for i in range(count)]
    by_id = {instance.id: instance for instance in instances}
    made = decisions(policy, instances, requests)
    taken: dict[str, list[float]] = {arm: [] for arm in ARMS}
    apps = {arm: telemetry(url, ratio, instances) for arm, ratio in ARMS.items()}
    for app in apps.values():
        await run(app, made, by_id.get)  # imports, caches
    for number in range(rounds):
        order = list(ARMS) if number % 2 == 0 else list(ARMS)[::-1]
        for arm in order:
            taken[arm].append(await run(apps[arm], made, by_id.get))
    for arm, app in apps.items():
        assert app.tracing.dropped == 0, f"{arm}: spans were dropped"
        await app.tracing.shutdown()
    return taken


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--instances", type=int, default=32)
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=sink, args=(theirs,), daemon=True)
    process.start()
    try:
        url = ours.recv()
        with open(os.devnull, "w") as nowhere:
            logs.configure("info", "json", nowhere)
            taken = asyncio.run(measure(url, given.requests, given.rounds, given.instances))
    finally:
        ours.send(None)
        process.join(5)
    off = median(taken["off"])
    print(f"{'CPU us per request':20}{'median':>9}{'least':>9}{'beside off':>12}")
    for arm, all_of in taken.items():
        print(f"{arm:20}{median(all_of):9.0f}{min(all_of):9.0f}{median(all_of) - off:12.0f}")


if __name__ == "__main__":
    main()
