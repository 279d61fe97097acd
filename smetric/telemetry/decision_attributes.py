"""What the span of a decision says: its record as attributes.

Never text of a prompt, never a raw session id. The rows and texts within are laid out in `candidates.py`,
`decision_text.py` and `shadowed.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import compress
from typing import TYPE_CHECKING, Any

import orjson

from smetric.policy.figure import exact
from smetric.telemetry import candidates as candidate_rows
from smetric.telemetry import names, shadowed
from smetric.telemetry.candidates import LIMIT
from smetric.telemetry.client_text import CLIENT_TEXT_MAX
from smetric.telemetry.decision_text import notes_of, summary_of

if TYPE_CHECKING:
    from smetric.fleet.instance import Instance
    from smetric.policy.decision import Decision
    from smetric.policy.policy import Policy
    from smetric.telemetry.record import DecisionRecord

_CURSOR_MAX = 256
_LOADS = {
    "requests": names.LOAD_REQUESTS.name,
    "running": names.LOAD_RUNNING.name,
    "waiting": names.LOAD_WAITING.name,
    "kv_usage": names.LOAD_KV_USAGE.name,
}


def left_out(decision: Decision, instances: Sequence[Instance], model: str) -> str:
    """Why the instances the policy was not given were left out, e.g. `draining=1 model=3`; empty for none.

    Args:
        decision: on what was given.
        instances: all, as they are in the tick of the decision.
        model: the model asked for.
    """
    given = decision.snapshot.ids
    if len(given) == len(instances):
        return ""
    reasons: dict[str, int] = {}
    ids = set(given)
    for instance in instances:
        if instance.id in ids:
            continue
        if not instance.serves(model):
            reason = "model"
        elif instance.draining:
            reason = "draining"
        elif not instance.healthy:
            reason = "unhealthy"
        else:
            reason = "spared" if instance.spared else "excluded"
        reasons[reason] = reasons.get(reason, 0) + 1
    return " ".join(f"{name}={count}" for name, count in sorted(reasons.items()))


def of_decision(
    record: DecisionRecord, *, configured: int, left_out: str, top: int, limit: int, ui_hints: bool, salt: bytes
) -> dict[str, Any]:
    """The attributes of a `route` span.

    Args:
        record: the decision.
        configured: how many instances there were.
        left_out: why the policy was not given all of them.
        top: candidates shown at most.
        limit: bytes of the attributes that show them.
        ui_hints: whether to add what tracing UIs lay out.
        salt: key of the session hash.
    """
    request, policy, decision = record.request, record.policy, record.decision
    result: dict[str, Any] = {
        names.DECISION_ID.name: record.id,
        names.OUTCOME.name: record.outcome,
        names.REASON.name: record.reason,
        names.DURATION.name: record.evaluate_s,
        names.LOOKUP_DURATION.name: record.lookup_s,
        names.POLICY_NAME.name: policy.name,
        names.POLICY_HASH.name: policy.digest,
        names.POLICY_SOURCE.name: policy.path.rpartition("/")[2],
        names.POLICY_GENERATION.name: record.generation,
        names.POLICY_ORIGIN.name: str(record.policy_origin),  # a member of its enumeration
        names.POLICY_PARAMS.name: params_of(policy),
        names.ORIGIN.name: record.origin,
        names.ROUTE.name: record.route,
        names.CANDIDATES.name: configured,
        names.INSTANCE_RANK.name: record.rank,
        names.PROMPT_TOKENS.name: request.prompt_len,
        names.PROMPT_SOURCE.name: record.tokens_source,
    }
    if record.arm:
        result[names.ARM.name] = record.arm
    if record.held_s:
        result[names.HOLD_DURATION.name] = record.held_s
    if record.instance is not None:
        result[names.INSTANCE_ID.name] = record.instance.id
    if request.turn is not None:
        result[names.TURN.name] = request.turn
    if request.est_hit is not None:
        result[names.EST_HIT.name] = request.est_hit
    session = session_hash(request.session, salt)
    if session:
        result[names.SESSION_HASH.name] = session
    if decision is not None:
        result[names.RULE.name] = decision.rule
        result[names.ELIGIBLE.name] = len(decision.snapshot.ids)
        if decision.survivors:
            result[names.FILTERED.name] = len(decision.snapshot.ids) - len(decision.survivors[-1])
        if left_out:
            result[names.FILTER_REASONS.name] = left_out
        _add_score(result, decision)
        _add_snapshot(result, decision)
        _add_outlook(result, record)
        result |= shadowed.attributes_of(record.shadowed)
        result[names.CANDIDATES_JSON.name] = candidate_rows.as_json(decision, top, limit)
    hit = record.hit
    if hit is not None:
        result[names.HIT_TOKENS.name] = hit[0]
        result[names.HIT_RATIO.name] = hit[0] / request.prompt_len if request.prompt_len else 0.0
        if hit[1]:
            result[names.HIT_SOURCE.name] = hit[1]
    summary = result[names.SUMMARY.name] = summary_of(record)
    if ui_hints:
        result[names.UI_KIND.name] = "CHAIN"
        result[names.UI_INPUT.name] = orjson.dumps(
            {"turn": request.turn, "prompt_len": request.prompt_len, "est_hit": request.est_hit}
        ).decode()
        result[names.UI_INPUT_TYPE.name] = "application/json"
        result[names.UI_OUTPUT.name] = (
            summary if decision is None else candidate_rows.as_text(decision, summary, top, limit, notes_of(record))
        )
        result[names.UI_OUTPUT_TYPE.name] = "text/plain"
        if session:
            result[names.UI_SESSION.name] = session
    return bounded(result)


def bounded(attributes: dict[str, Any]) -> dict[str, Any]:
    """*attributes* with no text longer than collectors keep; what is laid out is shorter already."""
    for name, value in attributes.items():
        if (
            type(value) is str
            and len(value) > CLIENT_TEXT_MAX
            and len(encoded := value.encode(errors="replace")) > LIMIT
        ):
            attributes[name] = encoded[: LIMIT - 3].decode(errors="ignore") + "…"
    return attributes


@lru_cache(maxsize=16)  # each traced decision shows them
def params_of(policy: Policy) -> str:
    """The values of a policy's parameters, `*` where configuration set one, e.g. `OVERLOAD=1.5* LOAD=requests`."""
    return " ".join(
        f"{name}={exact(one.value)}{'*' * one.configured}"
        if isinstance(one.value, float)
        else f"{name}={str(one.value).lower() if isinstance(one.value, bool) else one.value}{'*' * one.configured}"
        for name, one in policy.params.items()
    )[:CLIENT_TEXT_MAX]


def session_hash(session: str, salt: bytes) -> str:
    """A keyed hash of a session id, 16 hex digits; empty for none."""
    return hashlib.blake2b(session.encode(), digest_size=8, key=salt).hexdigest() if session else ""


def _add_score(result: dict[str, Any], decision: Decision) -> None:
    score, chosen = decision.score, decision.index
    if chosen < 0:
        return
    result[names.TIED.name] = decision.tied
    if score is None:
        return
    lowest = decision.direction != "max"
    values = [score[index] for index in decision.candidates]
    result[names.SCORE_CHOSEN.name] = float(score[chosen])
    result[names.SCORE_DIRECTION.name] = "min" if lowest else "max"
    result[names.SCORE_WORST.name] = float(max(values) if lowest else min(values))
    at = decision.runner_up_index
    if at is not None:
        result[names.RUNNER_UP.name] = decision.snapshot.ids[at]
        result[names.SCORE_RUNNER_UP.name] = float(score[at])
        result[names.SCORE_MARGIN.name] = float(abs(score[at] - score[chosen]))


def _add_outlook(result: dict[str, Any], record: DecisionRecord) -> None:
    """Whom a later turn left, and what was expected of the chosen instance and of the other one."""
    migration, forecast = record.migration, record.forecast
    if migration is not None:
        result[names.MIGRATED_FROM.name] = migration.source
        result[names.MIGRATION_GUARD.name] = migration.guard[:CLIENT_TEXT_MAX]
        if migration.left_tokens is not None:
            result[names.MIGRATION_TOKENS.name] = migration.left_tokens
    if forecast is None:
        return
    if forecast.ttft_s is not None:
        result[names.FORECAST_TTFT.name] = forecast.ttft_s
    if forecast.other:
        result[names.FORECAST_OTHER.name] = forecast.other
    if forecast.other_ttft_s is not None:
        result[names.FORECAST_OTHER_TTFT.name] = forecast.other_ttft_s


def _add_snapshot(result: dict[str, Any], decision: Decision) -> None:
    snapshot, index = decision.snapshot, decision.index
    result[names.SEED.name] = decision.seed
    failed = [label for _, guards in decision.guards for label, held in guards if held is False]
    if failed:
        result[names.GUARD_FAILED.name] = ", ".join(failed)[:CLIENT_TEXT_MAX]
    if decision.cursors:
        result[names.CURSOR.name] = " ".join(f"{k}={v}" for k, v in decision.cursors.items())[:_CURSOR_MAX]
    oldest: list[float] = []
    of_chosen: list[float] = []
    for feature, stamps in snapshot.stamps.items():
        known = snapshot.known.get(feature)
        measured = [at for at in (stamps if known is None else compress(stamps, known)) if at is not None]
        if measured:
            oldest.append(min(measured))
            if index >= 0 and (at := stamps[index]) is not None and (known is None or known[index]):
                of_chosen.append(at)
    if oldest:
        result[names.MAX_AGE.name] = max(0.0, snapshot.now - min(oldest))
    if of_chosen:
        result[names.CHOSEN_AGE.name] = max(0.0, snapshot.now - min(of_chosen))
    if index >= 0:
        for feature, name in _LOADS.items():
            column = snapshot.columns.get(feature)
            if column is not None:
                result[name] = float(column[index])
