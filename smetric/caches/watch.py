"""What every answer says about caches, put together: predictions against reports, and what breaks prefixes.

`report` is what `/admin/cache` shows and the doctor reads; what it is made of is in `smetric.caches.truth` and
`smetric.caches.breaks`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from smetric.caches.breaks import Breaks, CacheBreaks, Cause
from smetric.caches.client_kind import client_kind
from smetric.caches.truth import Agreement, HitTruth
from smetric.fleet.instance import Instance
from smetric.telemetry.record import DecisionRecord
from smetric.usage import Usage


class CacheWatch:
    """Hands each answer to those who learn from it, after its last byte has gone out.

    Args:
        truth: compares predicted hits with reported ones.
        breaks: finds what broke a prefix.
        instances: all instances.
        clock: monotonic seconds, that of *breaks*.
    """

    def __init__(
        self,
        truth: HitTruth,
        breaks: CacheBreaks,
        instances: Callable[[], Sequence[Instance]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._truth = truth
        self._breaks = breaks
        self._instances = instances
        self._clock = clock

    def answered(self, record: DecisionRecord, usage: Usage | None, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """An instance has answered the request of *record*, which came with *headers*, with status 200 to the end."""
        self._truth.answered(record, usage)
        if record.instance is not None and record.request.parts is not None:
            share = _hit_share(record, usage)
            self._breaks.answered(record.request, record.instance, share, client_kind(headers))

    def disagreements(self) -> dict[tuple[str, str], bool]:
        """By instance id and source, whether predictions and reports disagree; may be called from any thread."""
        return {key: agreement.disagrees for key, agreement in self._truth.agreements.copy().items()}

    def report(self) -> dict[str, Any]:
        """All of it as JSON values. `breaks` are the costliest first; their `summary` is a sentence for people."""
        now = self._clock()
        return {
            "instances": [_tokens(instance) for instance in self._instances()],
            "predictions": [
                {"instance": id, "source": source, **_agreement(agreement)}
                for (id, source), agreement in self._truth.agreements.items()
            ],
            "follow_ups": {
                "compared": self._breaks.follow_ups,
                "short": self._breaks.short,
                "short_though_unbroken": self._breaks.unbroken,
            },
            "breaks": [_break(cause, breaks, now) for cause, breaks in self._breaks.causes],
        }


def _hit_share(record: DecisionRecord, usage: Usage | None) -> float | None:
    """Share of the prompt that was cached, or would have been on the best instance, as far as either is known."""
    known: list[float] = []
    if usage is not None and usage.cached_tokens is not None and usage.prompt_tokens:
        known.append(usage.cached_tokens / usage.prompt_tokens)
    best = record.best_hit
    if best is not None:
        known.append(best / max(1, record.request.prompt_len))
    return max(known, default=None)


def _tokens(instance: Instance) -> dict[str, Any]:
    tokens = instance.prefix_tokens
    if tokens is None:
        return {"id": instance.id, "local": None, "external": None, "missed": None}
    return {"id": instance.id, "local": tokens.local, "external": tokens.external, "missed": tokens.missed}


def _agreement(agreement: Agreement) -> dict[str, Any]:
    total, latest = agreement.all, agreement.latest
    return {
        "answers": total.answers,
        "within_a_block": total.exact,
        "prompt_tokens": total.prompt,
        "predicted_tokens": total.predicted,
        "actual_tokens": total.actual,
        "wrong_tokens": total.wrong,
        "disagrees": agreement.disagrees,
        "latest": {
            "answers": latest.answers,
            "prompt_tokens": latest.prompt,
            "predicted_tokens": latest.predicted,
            "actual_tokens": latest.actual,
            "wrong_tokens": latest.wrong,
        },
    }


def _break(cause: Cause, breaks: Breaks, now: float) -> dict[str, Any]:
    return {
        "summary": summary(cause, breaks),
        "client": cause.client,
        "part": cause.part,
        "place": cause.place,
        "change": cause.change,
        "count": breaks.count,
        "follow_ups": breaks.follow_ups,
        "sessions": breaks.sessions,
        "lost_tokens": breaks.lost_tokens,
        "age_s": round(now - breaks.last_at, 1),
    }


def summary(cause: Cause, breaks: Breaks) -> str:
    """One line for people, e.g. `claude-code: system[0] changes each request, 14 sessions`."""
    is_each = breaks.each_request
    if cause.change == "changed":
        done = "changes" if is_each else "changed"
    else:
        done = f"{'is' if is_each else 'was'} {cause.change}"
    often = "each request" if is_each else f"{breaks.count} time{'s' if breaks.count != 1 else ''}"
    kind = f" ({cause.part})" if cause.place.endswith("]") and cause.part not in cause.place else ""
    sessions = f"{breaks.sessions} session{'s' if breaks.sessions != 1 else ''}"
    return f"{cause.client}: {cause.place}{kind} {done} {often}, {sessions}"
