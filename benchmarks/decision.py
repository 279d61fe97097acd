"""Cost of a decision: every shipped policy at 8, 32, 128 and 1024 instances, with its Decision object.

    python benchmarks/decision.py [--calls 2000] [--save FILE]

Prints microseconds per call, median and 99th percentile of single calls, without the cost of reading the clock, as
`smetric bench` does. `figure 13 by hand` is the same rule in plain Python, without counts of guards and without a
Decision: the difference is the cost of the language.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smetric.features import VOCABULARY
from smetric.files import shipped_policies
from smetric.policy import Policy, Snapshot, load
from smetric.request.request import InferenceRequest
from smetric.routing.policy_files import libraries_beside
from smetric.tools.bench import REQUESTS, SIZES, costs, fleet, id_of

FIRST, LATER, LOST = REQUESTS.values()


def policies() -> dict[str, Policy]:
    """The shipped policies by name."""
    return {
        name: load(path.read_text(), VOCABULARY, path=str(path), libraries=libraries_beside(path))
        for name, path in shipped_policies().items()
    }


def by_hand(snapshot: Snapshot, request: InferenceRequest) -> int:
    """Figure 13 in plain Python; the first of equals."""
    c, l = snapshot.columns["hit_len"], snapshot.columns["requests"]  # noqa: E741 - the paper's letter
    if request.turn:
        s = c.index(max(c))
        if l[s] <= 2.0 * (sum(l) / len(l)) and c[s] > 0.5 * (request.est_hit or 0):
            return s
    return l.index(min(l))


def cells(size: int, shipped: dict[str, Policy]) -> dict[str, Callable[[], Any]]:
    """The calls to measure at one size."""
    features = [VOCABULARY.features[name] for name in frozenset[str]().union(*(p.reads for p in shipped.values()))]
    spread, equal = fleet(size, features), fleet(size, features, equal=True)
    cursors = {key: id_of(3) for policy in shipped.values() for key in policy.plan.keys}

    def run(name: str, snapshot: Snapshot, request: InferenceRequest) -> Callable[[], Any]:
        decide = shipped[name].decide
        return lambda: decide(snapshot, request, cursors, 12345)

    without = Snapshot(spread.ids, {name: cells for name, cells in spread.columns.items() if name != "hit_len"})
    found: dict[str, Callable[[], Any]] = {
        "figure 13 by hand, sticks": lambda: by_hand(spread, LATER),
        "smetric, sticks": run("smetric", spread, LATER),
        "figure 13 by hand, balances": lambda: by_hand(spread, LOST),
        "smetric, balances": run("smetric", spread, LOST),
        "smetric, balances, all loads equal": run("smetric", equal, LOST),
        "smetric, first turn": run("smetric", spread, FIRST),
        "smetric, needs a look-up": run("smetric", without, LATER),
    }
    for name in shipped:
        if name != "smetric":
            found[name] = run(name, spread, LATER)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000, help="calls per cell (default: %(default)s)")
    parser.add_argument("--save", type=Path, help="file for the medians, as JSON")
    options = parser.parse_args()
    shipped = policies()
    columns: dict[str, dict[int, str]] = {}
    medians: dict[str, dict[int, float]] = {}
    for size in SIZES:
        for name, cost in costs(cells(size, shipped), options.calls).items():
            columns.setdefault(name, {})[size] = f"{cost.p50:.1f} / {cost.p99:.1f}"
            medians.setdefault(name, {})[size] = round(cost.p50, 1)
    width = max(map(len, columns))
    print(f"{'µs, p50 / p99':<{width}}" + "".join(f"{size:>16}" for size in SIZES))
    for name, by_size in columns.items():
        print(f"{name:<{width}}" + "".join(f"{by_size[size]:>16}" for size in SIZES))
    if options.save:
        options.save.write_text(json.dumps(medians, indent=1) + "\n")


if __name__ == "__main__":
    main()
