"""Savings: what decisions saved, in tokens and in time, against the instances that were not chosen."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cachetools import FIFOCache
from prometheus_client import CollectorRegistry

from smetric import names
from smetric.telemetry.metrics import loop_counter

if TYPE_CHECKING:
    from smetric.fleet.record import DecisionRecord

#: Days kept, and accounts of all of them; the oldest is dropped.
MAX_DAYS = 31
MAX_ACCOUNTS = 4096
_DAY_S = 86_400


@dataclass(slots=True)
class Account:
    """Sums over one rule of one policy on one day.

    Args:
        decisions: decisions whose requests have ended, with and without forecast.
        compared_tokens: requests whose tokens could be compared.
        saved_tokens: tokens found cached above what the other instance was believed to hold.
        compared_seconds: requests whose times could be compared.
        saved_s: seconds by which first tokens came sooner than expected of the other instance.
        forecast: requests whose own time was forecast.
        predicted_s: sum of these forecasts.
        actual_s: sum of the times that came.
        migrations: migrated requests.
        compared_migrations: migrated requests whose tokens left behind are known.
        left_tokens: tokens that these left behind.
    """

    decisions: int = 0
    compared_tokens: int = 0
    saved_tokens: int = 0
    compared_seconds: int = 0
    saved_s: float = 0.0
    forecast: int = 0
    predicted_s: float = 0.0
    actual_s: float = 0.0
    migrations: int = 0
    compared_migrations: int = 0
    left_tokens: int = 0


class Savings:
    """Accounts of savings by day, policy and rule, and their metrics.

    Args:
        registry: where the metrics are registered.
        now: Unix seconds; days are those of UTC.
    """

    def __init__(self, registry: CollectorRegistry, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._accounts: FIFOCache[tuple[str, str, str], Account] = FIFOCache(MAX_ACCOUNTS)
        self._day = ""
        self._day_ends = 0.0
        self._tokens = loop_counter(names.SAVINGS_TOKENS, registry)
        self._seconds = loop_counter(names.SAVINGS_SECONDS, registry)
        self._forecasts = loop_counter(names.FORECASTS, registry)
        self._forecast_seconds = loop_counter(names.FORECAST_SECONDS, registry)

    def settle(self, record: DecisionRecord) -> None:
        """Compare what became of the request of *record* with what was expected."""
        decision, request, forecast = record.decision, record.request, record.forecast
        if decision is None or record.status != 200 or record.error_type:
            return
        policy, rule = record.policy.name, record.rule
        account = self._account(policy, rule)
        account.decisions += 1
        if (migration := record.migration) is not None:
            account.migrations += 1
            if migration.left_tokens is not None:
                account.compared_migrations += 1
                account.left_tokens += migration.left_tokens
        if forecast is None:
            return
        if forecast.other_hit is not None:
            usage, found, other = record.usage, record.hit_at(decision.index), forecast.other_hit
            if usage is not None and usage.cached_tokens is not None and usage.prompt_tokens:
                found, other = usage.cached_tokens, record.as_counted(other, usage.prompt_tokens)
            if found is not None:
                saved = found - other
                account.compared_tokens += 1
                account.saved_tokens += saved
                self._tokens[policy, rule, names.SAVED if saved >= 0 else names.LOST].inc(abs(saved))
        # Only of a stream is the first byte the first token; a second attempt began late.
        actual_s = record.ttfc_s
        if not request.stream or record.rank or actual_s is None:
            return
        if forecast.ttft_s is not None:
            account.forecast += 1
            account.predicted_s += forecast.ttft_s
            account.actual_s += actual_s
            self._forecasts[policy].inc()
            self._forecast_seconds[policy, "predicted"].inc(forecast.ttft_s)
            self._forecast_seconds[policy, "actual"].inc(actual_s)
        if forecast.other_ttft_s is not None:
            saved_s = forecast.other_ttft_s - actual_s
            account.compared_seconds += 1
            account.saved_s += saved_s
            self._seconds[policy, rule, names.SAVED if saved_s >= 0 else names.LOST].inc(abs(saved_s))

    def report(self) -> list[dict[str, Any]]:
        """Return all accounts as JSON values, the latest day first."""
        return [_row(*key, account) for key, account in reversed(list(self._accounts.items()))]

    def _account(self, policy: str, rule: str) -> Account:
        now = self._now()
        if not self._day_ends - _DAY_S <= now < self._day_ends:  # a clock may be set back, too
            self._begin_day(now)
        key = self._day, policy, rule
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = Account()
            # All series of an account exist from its start, so that queries may subtract them.
            for series in (self._tokens, self._seconds):
                series[policy, rule, names.SAVED].inc(0)
                series[policy, rule, names.LOST].inc(0)
            for kind in ("predicted", "actual"):
                self._forecast_seconds[policy, kind].inc(0)
            self._forecasts[policy].inc(0)
        return account

    def _begin_day(self, now: float) -> None:
        self._day = _day(now)
        self._day_ends = (now // _DAY_S + 1) * _DAY_S
        oldest = _day(now - MAX_DAYS * _DAY_S)
        while self._accounts and next(iter(self._accounts))[0] <= oldest:
            self._accounts.popitem()


def _day(now: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(now))


def _row(day: str, policy: str, rule: str, account: Account) -> dict[str, Any]:
    share = account.actual_s / account.predicted_s if account.predicted_s else None
    return {
        "day": day,
        "policy": policy,
        "rule": rule,
        "decisions": account.decisions,
        "tokens": {"compared": account.compared_tokens, "saved": account.saved_tokens},
        "seconds": {"compared": account.compared_seconds, "saved": round(account.saved_s, 3)},
        "forecast": {
            "count": account.forecast,
            "predicted_s": round(account.predicted_s, 3),
            "actual_s": round(account.actual_s, 3),
            "actual_of_predicted": round(share, 3) if share is not None else None,
        },
        "migrations": {
            "count": account.migrations,
            "compared": account.compared_migrations,
            "left_tokens": account.left_tokens,
        },
    }
