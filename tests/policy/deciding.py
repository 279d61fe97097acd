"""Three instances, and the decisions of policies on them."""

from __future__ import annotations

import types
from typing import Any

from smetric.features import VOCABULARY
from smetric.policy import Decision, Need, Policy, Snapshot, load

COLUMNS: dict[str, list[Any]] = {
    "requests": [4, 1, 3],
    "running": [2, 1, 3],
    "waiting": [2, 0, 0],
    "hit_len": [600, 0, 300],
    "unprefilled": [100, 0, 700],
    "kv_usage": [0.5, 0.25, 0.75],
    "healthy": [True, True, False],
    "draining": [False, False, False],
    "role": ["both", "decode", "prefill"],
    "zone": ["x", "y", "x"],
}


def snapshot(without: tuple[str, ...] = (), **columns: list[Any]) -> Snapshot:
    present = {name: list(cells) for name, cells in {**COLUMNS, **columns}.items() if name not in without}
    return Snapshot(["a", "b", "c"], present)


def request(**fields: Any) -> Any:
    defaults = {name: field.default for name, field in VOCABULARY.request.items()}
    return types.SimpleNamespace(**{**defaults, "prompt_len": 1000, **fields})


def policy(body: str, **settings: Any) -> Policy:
    return load(f"policy p\n{body}\n", VOCABULARY, settings=settings)


def decide(
    body: Policy | str, snap: Snapshot | None = None, *, seed: int = 1, last: str = "", **fields: Any
) -> Decision:
    loaded = policy(body) if isinstance(body, str) else body
    cursors = dict.fromkeys(loaded.plan.keys, last) if last else {}
    decision = loaded.decide(snap or snapshot(), request(**fields), cursors, seed)
    assert isinstance(decision, Decision)
    return decision


def asked(body: str, **fields: Any) -> frozenset[str]:
    """The look-ups that are asked for if none was fetched."""
    decision = policy(body).decide(snapshot(without=("hit_len",)), request(**fields), {}, 1)
    return decision.features if isinstance(decision, Need) else frozenset()
