"""Decision outcomes: migrations, goodput, stickiness."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from smetric import names
from smetric.fleet.exchange import Exchange, Listener
from smetric.fleet.instance import prefill_cost, twice_attended
from smetric.fleet.record import DecisionRecord, Forecast, Migration
from smetric.log_limit import LogLimit
from smetric.policy.guard import NOBODY
from smetric.policy.plan import StatementKind
from smetric.telemetry.gauges import GuardOutcomes
from smetric.telemetry.metrics import Count, Counts, Histograms, Series
from smetric.telemetry.savings import Savings

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from smetric.fleet.instance import Instance
    from smetric.policy.decision import Decision
    from smetric.request.request import InferenceRequest
    from smetric.sources.measured import PrefillTime


# Where each conversation was served last: for telemetry alone, no decision rests on it.
#
# Bounded; hashes only. How a prompt is hashed is in `smetric.reading.prompt`.

#: Places remembered, by prompt and by session, 3 MB of them; the one that was served longest ago goes first.
MOST = 1 << 14


class Sessions:
    """Remembers them, and counts whether later turns stay.

    A conversation goes on from the request whose whole prompt is its own up to the last assistant turn, whose place it
    then takes; where a client has edited its history, from the last request of the session that a header names.

    Args:
        most: places remembered.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._places: OrderedDict[int, str] = OrderedDict()
        self.turns = Counts(names.SESSION_TURNS)

    def __len__(self) -> int:
        return len(self._places)

    def last(self, request: InferenceRequest) -> str | None:
        """The id of the instance that served the turn before *request*; None for a first turn, or if not known."""
        if not request.turn:
            return None
        prompt = request.prompt
        found = None
        if prompt is not None and (question := prompt.hashes.question):
            found = self._places.get(question)
        if found is None and request.session:
            found = self._places.get(hash(request.session))
        return found

    def served(self, request: InferenceRequest, instance: str, policy: str) -> None:
        """*instance* has begun to answer *request*, which *policy* sent there."""
        prompt, session, places = request.prompt, request.session, self._places
        hashes = prompt.hashes if prompt is not None and prompt.is_hashed else None
        if request.turn:
            last = places.pop(hashes.question, None) if hashes is not None else None
            if last is None and session:
                last = places.get(hash(session))
            if last is not None:
                same = names.SAME_INSTANCE if last == instance else names.OTHER_INSTANCE
                self.turns.series[policy, same].value += 1
        if session:
            self._remember(hash(session), instance)
        if hashes is not None:
            self._remember(hashes.whole, instance)

    def _remember(self, key: int, instance: str) -> None:
        places = self._places
        places[key] = instance
        places.move_to_end(key)
        if len(places) > self._most:
            places.popitem(last=False)


# A later turn that went elsewhere: found when it is decided, counted, and said in the log.
#
# Where each conversation was served last is remembered in `sessions.py`.

log = structlog.get_logger("smetric.migration")


def migration_of(record: DecisionRecord, last: str | None) -> Migration | None:
    """Whom the request of *record* was taken away from; None for a first turn, and for one that was not.

    Where hits were looked up they settle it: it is the instance that holds at least a token more of the prompt than the
    chosen one, and most of all. Otherwise it is the one of the last turn. One that was no candidate has no known hit.

    Args:
        record: its decision.
        last: where the conversation was served last, None where that is not known.
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
    """What kept the decision from *source*: a filter that left it out, else what failed in the first rule to route."""
    steps = decision.policy.plan.steps
    for narrowed in decision.filters:
        if narrowed.applied and not narrowed.ignored and source not in narrowed.left:
            return narrowed.label
    for at, stop in enumerate(decision.stops):
        step = steps[at]
        if step.kind is StatementKind.ROUTE and at != decision.step_index and stop >= 0:
            return step.guards[stop].label if stop < len(step.guards) else NOBODY
    return names.NOT_PICKED


class Migrations:
    """Counts migrations, and says them in the log, once a minute for each source, rule and guard."""

    def __init__(self) -> None:
        self.migrations = Counts(names.MIGRATIONS)
        self.left_tokens = Counts(names.MIGRATION_LEFT_TOKENS)
        self._limit = LogLimit()

    def note(self, record: DecisionRecord, migration: Migration) -> None:
        """The request of *record* has migrated."""
        policy, rule = record.policy.name, record.rule
        self.migrations.series[policy, rule, migration.guard].value += 1
        if migration.left_tokens is not None:
            self.left_tokens.series[policy, rule].value += migration.left_tokens
        kept_back = self._limit.passes((migration.source, policy, rule, migration.guard))
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


# Whether streams were answered in time, in tokens: the paper's goodput, for each policy and arm.


class ServiceLevel:
    """Counts tokens of streams within the objective and outside.

    A stream of L prompt tokens is within it if its first token came within `ttft_base_s + ttft_token_s × L` of its
    arrival and its others, on average, within `tpot_s` of each other. One that broke off, or that was refused by us, is
    not. Answers that do not stream have no first token to speak of, and are left out.

    Args:
        ttft_base_s: seconds.
        ttft_token_s: seconds for each prompt token.
        tpot_s: seconds.
    """

    def __init__(self, ttft_base_s: float, ttft_token_s: float, tpot_s: float) -> None:
        self._ttft_base_s = ttft_base_s
        self._ttft_token_s = ttft_token_s
        self._tpot_s = tpot_s
        self.tokens = Counts(names.SLO_TOKENS)

    def ended(self, record: DecisionRecord, gap_s: float | None) -> None:
        """The request of *record* has ended.

        Args:
            record: its decision.
            gap_s: mean seconds between the events of its stream, None where there were not two.
        """
        request, usage = record.request, record.usage
        if not request.stream or record.status is None or record.status == 499:
            return
        prompt = (usage.prompt_tokens if usage is not None else None) or request.prompt_len
        output = (usage.completion_tokens if usage is not None else None) or 0
        is_met = self._is_met(record, prompt, output, gap_s)
        self.tokens.series[record.policy.name, record.arm, "true" if is_met else "false"].value += prompt + output

    def _is_met(self, record: DecisionRecord, prompt: int, output: int, gap_s: float | None) -> bool:
        ttft_s, duration_s = record.ttft_s, record.duration_s
        if record.status != 200 or record.error_type or ttft_s is None or duration_s is None:
            return False
        if ttft_s > self._ttft_base_s + self._ttft_token_s * prompt:
            return False
        per_token_s = (duration_s - ttft_s) / (output - 1) if output > 1 else gap_s
        return per_token_s is None or per_token_s <= self._tpot_s


# What times to first token a decision could expect: of the chosen instance, and of the other one it might have been.
#
# The estimate is the time that the prompts' cost which stands before the first token takes on the instance
# (`smetric.fleet.prefill_cost`, `smetric.fleet.prefill_time`). What came of it is settled in `savings.py`.

#: What time a prefill takes on an instance, None while unknown; and the instance that has an id.
Prefill = Callable[["Instance"], "PrefillTime | None"]
ById = Callable[[str], "Instance | None"]


class Forecasts:
    """Makes them, in the tick of the decision, after the chosen instance was charged.

    Args:
        prefill: of instances.
        by_id: finds them.
    """

    def __init__(self, prefill: Prefill, by_id: ById) -> None:
        self._prefill = prefill
        self._by_id = by_id

    def of(self, record: DecisionRecord, runner_up: int | None) -> Forecast | None:
        """The forecast of *record*; None where nothing can be said, as no hit was looked up.

        Args:
            record: the decision.
            runner_up: index of the best of the others by score, None without one.
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


# What decisions come to, seen from the paper's side: guards, stickiness, migrations, service levels, savings.
#
# Told of each decision, answer and end by `exchange.py`. What each of them counts is in its own file.


class Consequences(Listener):
    """Hands what happens to those who count it.

    Args:
        service_level: the objective that streams are measured by.
        prefill: what time a prefill takes on an instance, None while unknown.
        by_id: the instance that has an id, or None.
    """

    def __init__(self, service_level: ServiceLevel, prefill: Prefill, by_id: ById) -> None:
        self.sessions = Sessions()
        self.migrations = Migrations()
        self.savings = Savings()
        self._guards = GuardOutcomes()
        self._level = service_level
        self._forecasts = Forecasts(prefill, by_id)
        self._hit_places = Counts(names.HIT_PLACES)
        self._margins = Histograms(names.SCORE_MARGIN_RATIO)
        places = self._hit_places.series
        #: By policy: tokens held by the chosen instance, elsewhere only, nowhere.
        self._held: Series[tuple[Count, Count, Count]] = Series(
            1,
            lambda policy: (
                places[policy, names.HELD_HERE],
                places[policy, names.HELD_ELSEWHERE],
                places[policy, names.HELD_NOWHERE],
            ),
        )

    def collectors(self) -> list[Collector]:
        """Their series."""
        savings, migrations = self.savings, self.migrations
        return [
            self._guards,
            self._level.tokens,
            self._hit_places,
            self._margins,
            self.sessions.turns,
            migrations.migrations,
            migrations.left_tokens,
            savings.tokens,
            savings.seconds,
            savings.forecasts,
            savings.forecast_seconds,
        ]

    def decided(self, exchange: Exchange, record: DecisionRecord) -> None:
        """Note in *record* what a decision comes to."""
        decision = record.decision
        if decision is None:
            return
        self._guards.decided(decision)
        if record.instance is None:
            return
        record.migration = migration_of(record, self.sessions.last(record.request))
        if record.migration is not None:
            self.migrations.note(record, record.migration)
        score = decision.score
        runner_up = None if score is None else decision.runner_up_index
        if score is not None and runner_up is not None:
            self._margins.series[record.policy.name].observe(decision.share_behind(runner_up, score))
        if record.rank == 0:
            self._count_hits(record)
        record.forecast = self._forecasts.of(record, runner_up)

    def answering(self, exchange: Exchange, record: DecisionRecord) -> None:
        """Remember the instance that serves the session."""
        if record.instance is not None:
            self.sessions.served(record.request, record.instance.id, record.policy.name)

    def ended(self, exchange: Exchange) -> None:
        """Measure the service level and the savings of a decided request."""
        if (record := exchange.record) is not None:
            self._level.ended(record, exchange.gap_s)
            self.savings.settle(record)

    def _count_hits(self, record: DecisionRecord) -> None:
        """Where the prompt's tokens are, if the policy looked."""
        best, length = record.best_hit, record.request.prompt_len
        if best is None:
            return
        here = record.hit[0] if record.hit is not None else 0
        on_chosen, elsewhere, nowhere = self._held[record.policy.name]
        on_chosen.value += here
        elsewhere.value += best - here
        if length > best:
            nowhere.value += length - best
