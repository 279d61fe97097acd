"""Decision outcomes: guards, stickiness, migrations, goodput, hits, forecasts, and the savings that settle these."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog
from cachetools import FIFOCache
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from smetric import names
from smetric.fleet.exchange import Exchange, Listener
from smetric.fleet.instance import prefill_cost, twice_attended
from smetric.fleet.record import DecisionRecord, Forecast, Migration
from smetric.log_limit import LogLimit
from smetric.policy.guard import NOBODY
from smetric.policy.plan import Outcome
from smetric.telemetry.gauges import computed
from smetric.telemetry.metrics import Computed, counter, loop_counter, loop_histogram

if TYPE_CHECKING:
    from smetric.fleet.instance import Instance
    from smetric.policy.decision import Decision
    from smetric.policy.policy import Policy
    from smetric.request.request import InferenceRequest
    from smetric.sources.measured import PrefillTime

#: Generations of policies that are counted by statement, and guards of earlier ones.
MAX_POLICIES = 32
MAX_GUARDS = 1024
#: Places remembered, by prompt and by session: 3 MB.
MAX_PLACES = 1 << 14
#: Days of savings kept, and accounts of all of them; the oldest is dropped.
MAX_DAYS = 31
MAX_ACCOUNTS = 4096
_DAY_S = 86_400
#: Features on what an instance fetches instead of computing it.
_TIERS = frozenset({"host_hit_len", "disk_hit_len", "store_hit_len"})

#: Returns the time that a prefill takes on an instance, None while it is unknown; and the instance that has an id.
Prefill = Callable[["Instance"], "PrefillTime | None"]
ById = Callable[[str], "Instance | None"]

log = structlog.get_logger("smetric.migration")


class Outcomes(Listener):
    """Listener that notes migration and forecast in each record, and counts what decisions lead to.

    Args:
        registry: where the metrics are registered.
        service_level: the objective that streams are measured by.
        prefill: returns the time that a prefill takes on an instance, None while it is unknown.
        by_id: returns the instance that has an id, or None.
    """

    def __init__(self, registry: CollectorRegistry, service_level: ServiceLevel, prefill: Prefill, by_id: ById) -> None:
        self.savings = Savings(registry)
        self._guards = GuardOutcomes()
        registry.register(Computed(self._guards.collect))
        self._sessions = Sessions()
        self._turns = loop_counter(names.SESSION_TURNS, registry)
        self._migrations = counter(names.MIGRATIONS, registry)
        self._left_tokens = counter(names.MIGRATION_LEFT_TOKENS, registry)
        self._migration_limit = LogLimit()
        self._level = service_level
        self._level_tokens = loop_counter(names.SLO_TOKENS, registry)
        self._forecasts = Forecasts(prefill, by_id)
        self._hit_places = loop_counter(names.HIT_PLACES, registry)
        self._margins = loop_histogram(names.SCORE_MARGIN_RATIO, registry)

    def decided(self, exchange: Exchange, record: DecisionRecord) -> None:
        """Note migration and forecast in *record*; count guards, hits and the margin of the score."""
        decision = record.decision
        if decision is None:
            return
        self._guards.decided(decision)
        if record.instance is None:
            return
        record.migration = migration_of(record, self._sessions.last(record.request))
        if record.migration is not None:
            self._migrated(record, record.migration)
        score = decision.score
        runner_up = None if score is None else decision.runner_up_index
        if score is not None and runner_up is not None:
            self._margins[record.policy.name].observe(decision.share_behind(runner_up, score))
        if record.rank == 0:
            self._count_hits(record)
        record.forecast = self._forecasts.of(record, runner_up)

    def answering(self, exchange: Exchange, record: DecisionRecord) -> None:
        """Remember the instance that serves the session; count whether a later turn stayed."""
        if record.instance is None:
            return
        instance = record.instance.id
        last = self._sessions.served(record.request, instance)
        if last is not None:
            place = names.SAME_INSTANCE if last == instance else names.OTHER_INSTANCE
            self._turns[record.policy.name, place].value += 1

    def ended(self, exchange: Exchange) -> None:
        """Measure the service level and the savings of a decided request."""
        record = exchange.record
        if record is None:
            return
        measured = self._level.measure(record, exchange.gap_s)
        if measured is not None:
            tokens, is_met = measured
            self._level_tokens[record.policy.name, record.arm, "true" if is_met else "false"].value += tokens
        self.savings.settle(record)

    def _count_hits(self, record: DecisionRecord) -> None:
        """Count where the prompt's tokens are, if the policy looked them up."""
        best, decision, places, policy = record.best_hit, record.decision, self._hit_places, record.policy.name
        if best is None or decision is None:
            return
        found = here = record.hit[0] if record.hit is not None else 0
        columns = decision.snapshot.columns
        for tier in _TIERS.intersection(columns):
            found = max(found, int(columns[tier][decision.index]))  # an unknown cell is 0
        places[policy, names.HELD_HERE].value += here
        if found > here:
            places[policy, names.HELD_IN_STORE].value += found - here
        best = max(best, found)
        places[policy, names.HELD_ELSEWHERE].value += best - found
        places[policy, names.HELD_NOWHERE].value += max(0, record.request.prompt_len - best)

    def _migrated(self, record: DecisionRecord, migration: Migration) -> None:
        """Count a migration, and log it once a minute for each source, rule and guard."""
        policy, rule = record.policy.name, record.rule
        self._migrations[policy, rule, migration.guard].inc()
        if migration.left_tokens is not None:
            self._left_tokens[policy, rule].inc(migration.left_tokens)
        kept_back = self._migration_limit.passes((migration.source, policy, rule, migration.guard))
        if kept_back is None:
            return
        assert record.instance is not None
        about = {
            "from": migration.source,
            "to": record.instance.id,
            "policy": policy,
            "rule": rule,
            "guard": migration.guard,
            "left_tokens": migration.left_tokens,
            "decision_id": record.id,
            "kept_back": kept_back,
        }
        if record.trace_id:
            about["trace_id"] = record.trace_id
        log.info("smetric.migration", **about)


class GuardOutcomes:
    """Counts of how often each guard of the acting policies held and failed.

    A decision costs one addition for each statement that it visited; the page sums them up.
    """

    def __init__(self) -> None:
        #: By policy and statement, how many decisions stopped at which guard: the last place but one is for decisions
        #: that passed all guards, the last for a filter that was ignored.
        self._stops: dict[Policy, list[list[int]]] = {}
        #: Counts of earlier policies, by policy, rule, guard and whether it held.
        self._past: Tally[tuple[str, str, str, str]] = Tally()

    def decided(self, decision: Decision) -> None:
        """Count the guards of *decision*."""
        rows = self._stops.get(decision.policy)
        if rows is None:
            rows = self._begin(decision.policy)
        for at, stop in enumerate(decision.stops):
            rows[at][stop] += 1

    def _begin(self, policy: Policy) -> list[list[int]]:
        if len(self._stops) == MAX_POLICIES:
            oldest = next(iter(self._stops))
            self._past.update(_summed(oldest, self._stops.pop(oldest)))
            while len(self._past) > 2 * MAX_GUARDS:
                del self._past[next(iter(self._past))]
        rows = self._stops[policy] = [[0] * (len(step.guards) + 2) for step in policy.plan.steps]
        return rows

    def collect(self) -> Iterator[Metric]:
        """Yield the metric, with the latest policies first; may run in another thread."""
        total: Tally[tuple[str, str, str, str]] = Tally()
        # Copied without a pause: counts that move from one to the other are in one of the copies.
        stops, past = list(self._stops.items()), dict(self._past)
        for policy, rows in reversed(stops):
            total.update(_summed(policy, rows))
        total.update(past)
        yield computed(names.GUARD_OUTCOMES, dict(list(total.items())[: 2 * MAX_GUARDS]))


def _summed(policy: Policy, rows: list[list[int]]) -> dict[tuple[str, str, str, str], int]:
    """Return the counts by labels; a guard held in all decisions that stopped behind it."""
    summed: Tally[tuple[str, str, str, str]] = Tally()
    for step, row in zip(policy.plan.steps, rows, strict=True):
        for place, guard in enumerate(step.guards):
            summed[policy.name, step.label, guard.label, "true"] += sum(row[place + 1 :])
            summed[policy.name, step.label, guard.label, "false"] += row[place]
    return summed


class Sessions:
    """Map from a conversation to the instance that served it last; for telemetry only, no decision reads it.

    A request continues the earlier request whose whole prompt equals its own up to the last assistant turn, and
    replaces it in the map. If a client has edited its history, the session header names the conversation.

    Args:
        most: places remembered; the place served longest ago is forgotten.
    """

    def __init__(self, most: int = MAX_PLACES) -> None:
        self._places: OrderedDict[int, str] = OrderedDict()
        self._most = most

    def __len__(self) -> int:
        return len(self._places)

    def last(self, request: InferenceRequest) -> str | None:
        """Return the instance that served the turn before *request*; None for a first turn, or if it is unknown."""
        if not request.turn:
            return None
        prompt = request.prompt
        found = None
        if prompt is not None and (question := prompt.hashes.question):
            found = self._places.get(question)
        if found is None and request.session:
            found = self._places.get(hash(request.session))
        return found

    def served(self, request: InferenceRequest, instance: str) -> str | None:
        """Remember that *instance* answers *request*; return the instance of the turn before, None if unknown."""
        prompt, session, places = request.prompt, request.session, self._places
        hashes = prompt.hashes if prompt is not None and prompt.is_hashed else None
        last = None
        if request.turn:
            last = places.pop(hashes.question, None) if hashes is not None else None
            if last is None and session:
                last = places.get(hash(session))
        if session:
            self._put(hash(session), instance)
        if hashes is not None:
            self._put(hashes.whole, instance)
        return last

    def _put(self, key: int, instance: str) -> None:
        # No FIFOCache: its own code takes 1 % of a request's CPU.
        self._places[key] = instance
        self._places.move_to_end(key)
        if len(self._places) > self._most:
            self._places.popitem(last=False)


def migration_of(record: DecisionRecord, last: str | None) -> Migration | None:
    """Return the migration of a later turn; None for a first turn, and for a turn that stayed.

    Where hits were looked up, the source is the instance that holds most of the prompt, at least a token more than the
    chosen one. Otherwise it is the instance of the last turn. An instance that was no candidate has no known hit.

    Args:
        record: the decision.
        last: where the conversation was served last, None if unknown.
    """
    decision = record.decision
    if decision is None or decision.index < 0 or not record.request.turn:
        return None
    snapshot, chosen = decision.snapshot, decision.index
    hits, known = snapshot.columns.get("hit_len"), snapshot.known.get("hit_len")
    if hits is not None and max(hits) >= hits[chosen] + 1:
        best = max(range(len(hits)), key=lambda i: hits[i] if known is None or known[i] else -1.0)
        if hits[best] >= hits[chosen] + 1 and (known is None or known[best]):
            is_known = known is None or known[chosen]
            left = int(hits[best] - hits[chosen]) if is_known else None
            return Migration(snapshot.ids[best], _guard(decision, best), left)
    if last is None or last == snapshot.ids[chosen]:
        return None
    if last not in snapshot.ids:
        return Migration(last, names.LEFT_OUT, None)
    if hits is not None:
        return None
    return Migration(last, _guard(decision, snapshot.ids.index(last)), None)


def _guard(decision: Decision, source: int) -> str:
    """Return what kept the decision from *source*: a filter that removed it, else the guard that failed first."""
    steps = decision.policy.plan.steps
    for narrowed in decision.filters:
        if narrowed.applied and not narrowed.ignored and source not in narrowed.left:
            return narrowed.label
    for at, stop in enumerate(decision.stops):
        step = steps[at]
        if step.outcome is Outcome.ROUTE and at != decision.step_index and stop >= 0:
            return step.guards[stop].label if stop < len(step.guards) else NOBODY
    return names.NOT_PICKED


class ServiceLevel:
    """Service level objective of a stream. The paper's goodput counts the tokens of the streams that meet it.

    A stream of L prompt tokens meets it if its first token came within `ttft_base_s + ttft_token_s × L` of its arrival
    and its others, on average, within `tpot_s` of each other. A stream that broke off, or that the router refused,
    misses it. Answers that do not stream have no first token, and are left out.

    Args:
        ttft_base_s: seconds.
        ttft_token_s: seconds for each prompt token.
        tpot_s: seconds.
    """

    def __init__(self, ttft_base_s: float, ttft_token_s: float, tpot_s: float) -> None:
        self._ttft_base_s = ttft_base_s
        self._ttft_token_s = ttft_token_s
        self._tpot_s = tpot_s

    def measure(self, record: DecisionRecord, gap_s: float | None) -> tuple[int, bool] | None:
        """Return the tokens of an ended stream and whether it met the objective; None if it is left out.

        Args:
            record: its decision.
            gap_s: mean seconds between the events of its stream, None with less than two events.
        """
        request, usage = record.request, record.usage
        if not request.stream or record.status is None or record.status == 499:
            return None
        prompt = (usage.prompt_tokens if usage is not None else None) or request.prompt_len
        output = (usage.completion_tokens if usage is not None else None) or 0
        return prompt + output, self._is_met(record, prompt, output, gap_s)

    def _is_met(self, record: DecisionRecord, prompt: int, output: int, gap_s: float | None) -> bool:
        ttft_s, duration_s = record.ttft_s, record.duration_s
        if record.status != 200 or record.error_type or ttft_s is None or duration_s is None:
            return False
        if ttft_s > self._ttft_base_s + self._ttft_token_s * prompt:
            return False
        per_token_s = (duration_s - ttft_s) / (output - 1) if output > 1 else gap_s
        return per_token_s is None or per_token_s <= self._tpot_s


class Forecasts:
    """Expected time to first token of the chosen instance, and of the other instance it might have been.

    The estimate is the time that the instance takes for the prompts' cost before the first token. It is made in the
    tick of the decision, after the chosen instance was charged.

    Args:
        prefill: returns the time that a prefill takes on an instance, None while it is unknown.
        by_id: returns the instance that has an id, or None.
    """

    def __init__(self, prefill: Prefill, by_id: ById) -> None:
        self._prefill = prefill
        self._by_id = by_id

    def of(self, record: DecisionRecord, runner_up: int | None) -> Forecast | None:
        """Return the forecast of *record*; None if no hit was looked up.

        Args:
            record: the decision.
            runner_up: index of the second best by score, None without one.
        """
        decision, instance = record.decision, record.instance
        if decision is None or instance is None or record.request.prompts != 1:
            return None
        if record.hit is None and record.hit_at(decision.index) is None:
            return None
        prefill = self._prefill(instance)
        ttft_s = prefill.of(instance.unprefilled_cost()) if prefill is not None else None
        ids, migration = decision.snapshot.ids, record.migration
        at = ids.index(migration.source) if migration is not None and migration.source in ids else runner_up
        if at is None:
            return Forecast(ttft_s)
        id, hit = ids[at], record.hit_at(at)
        other, other_ttft_s = self._by_id(id), None
        if other is not None and hit is not None and (prefill := self._prefill(other)) is not None:
            length = record.request.prompt_len
            new = length - hit if hit < length else 0
            own = prefill_cost(new, twice_attended(new, length), other.attention_tokens)
            other_ttft_s = prefill.of(other.unprefilled_cost() + own)
        return Forecast(ttft_s, id, other_ttft_s, hit)


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
        """Add the outcome of *record*, and its difference from the forecast, to the account of its rule."""
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
                self._tokens[policy, rule, names.SAVED if saved >= 0 else names.LOST].value += abs(saved)
        # Only of a stream is the first output the first token; a second attempt began late.
        actual_s = record.ttfc_s
        if not request.stream or record.rank or actual_s is None:
            return
        if forecast.ttft_s is not None:
            account.forecast += 1
            account.predicted_s += forecast.ttft_s
            account.actual_s += actual_s
            self._forecasts[policy].value += 1
            self._forecast_seconds[policy, "predicted"].value += forecast.ttft_s
            self._forecast_seconds[policy, "actual"].value += actual_s
        if forecast.other_ttft_s is not None:
            saved_s = forecast.other_ttft_s - actual_s
            account.compared_seconds += 1
            account.saved_s += saved_s
            self._seconds[policy, rule, names.SAVED if saved_s >= 0 else names.LOST].value += abs(saved_s)

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
                series[policy, rule, names.SAVED].value += 0
                series[policy, rule, names.LOST].value += 0
            for kind in ("predicted", "actual"):
                self._forecast_seconds[policy, kind].value += 0
            self._forecasts[policy].value += 0
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
