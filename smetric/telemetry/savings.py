"""Cost and savings of decisions."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from smetric import names
from smetric.telemetry.metrics import Count, Counts

if TYPE_CHECKING:
    from smetric.fleet.record import DecisionRecord


#: Days kept, and accounts of all of them; the oldest goes first.
MOST_DAYS = 31
MOST_ACCOUNTS = 4096


class _Series(NamedTuple):
    """Of one policy and rule."""

    tokens_saved: Count
    tokens_lost: Count
    seconds_saved: Count
    seconds_lost: Count
    forecasts: Count
    predicted: Count
    actual: Count


@dataclass(slots=True)
class Account:
    """One rule of one policy on one day.

    Args:
        decisions: its decisions whose requests have ended, forecast or not.
        compared_tokens: those whose tokens could be compared.
        saved_tokens: by how many more tokens were found cached; below 0 for fewer.
        compared_seconds: those whose times could be compared.
        saved_s: by how much sooner first tokens came; below 0 for later.
        forecast: those whose own time was forecast.
        predicted_s: the sum of these forecasts.
        actual_s: the sum of what became of them.
        migrations: those that went elsewhere.
        compared_migrations: those of them of which it is known what they left behind.
        left_tokens: what these left behind.
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
    #: The metrics of what it adds up: bound once.
    series: _Series = field(repr=False, kw_only=True)


class Savings:
    """Keeps the accounts.

    Args:
        now: Unix seconds; days are those of UTC.
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._accounts: OrderedDict[tuple[str, str, str], Account] = OrderedDict()
        self._day = ""
        self._day_ends = 0.0
        self.tokens = Counts(names.SAVINGS_TOKENS)
        self.seconds = Counts(names.SAVINGS_SECONDS)
        self.forecasts = Counts(names.FORECASTS)
        self.forecast_seconds = Counts(names.FORECAST_SECONDS)

    def settle(self, record: DecisionRecord) -> None:
        """The request of *record* has ended."""
        decision, request, forecast = record.decision, record.request, record.forecast
        if decision is None or record.status != 200 or record.error_type:
            return
        account = self._account(record.policy.name, record.rule)
        series = account.series
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
                (series.tokens_saved if saved >= 0 else series.tokens_lost).value += abs(saved)
        # Only of a stream is the first byte the first token; a second attempt began late.
        actual_s = record.ttfc_s
        if not request.stream or record.rank or actual_s is None:
            return
        if forecast.ttft_s is not None:
            account.forecast += 1
            account.predicted_s += forecast.ttft_s
            account.actual_s += actual_s
            series.forecasts.value += 1
            series.predicted.value += forecast.ttft_s
            series.actual.value += actual_s
        if forecast.other_ttft_s is not None:
            saved_s = forecast.other_ttft_s - actual_s
            account.compared_seconds += 1
            account.saved_s += saved_s
            (series.seconds_saved if saved_s >= 0 else series.seconds_lost).value += abs(saved_s)

    def report(self) -> list[dict[str, Any]]:
        """All accounts as JSON values, the latest day first."""
        rows = []
        for (day, policy, rule), account in reversed(self._accounts.items()):
            share = account.actual_s / account.predicted_s if account.predicted_s else None
            rows.append(
                {
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
            )
        return rows

    def _series(self, policy: str, rule: str) -> _Series:
        return _Series(
            self.tokens.series[policy, rule, names.SAVED],
            self.tokens.series[policy, rule, names.LOST],
            self.seconds.series[policy, rule, names.SAVED],
            self.seconds.series[policy, rule, names.LOST],
            self.forecasts.series[policy],
            self.forecast_seconds.series[policy, "predicted"],
            self.forecast_seconds.series[policy, "actual"],
        )

    def _account(self, policy: str, rule: str) -> Account:
        now = self._now()
        if not self._day_ends - 86_400 <= now < self._day_ends:  # a clock may be set back, too
            self._begin_day(now)
        key = self._day, policy, rule
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = Account(series=self._series(policy, rule))
            if len(self._accounts) > MOST_ACCOUNTS:
                self._accounts.popitem(last=False)
        return account

    def _begin_day(self, now: float) -> None:
        self._day = time.strftime("%Y-%m-%d", time.gmtime(now))
        self._day_ends = (now // 86_400 + 1) * 86_400
        oldest = time.strftime("%Y-%m-%d", time.gmtime(now - MOST_DAYS * 86_400))
        while self._accounts and next(iter(self._accounts))[0] <= oldest:
            self._accounts.popitem(last=False)
