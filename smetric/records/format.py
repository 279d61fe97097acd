"""Lines of a record of decisions: JSON, one object a line, its `kind` first.

A file begins with a header. A policy stands before the first decision of each of its generations, so that a file is
complete in itself. Numbers of a request are always recorded, and so is the model. Other strings come from clients
(sessions, tenants, request ids): they are recorded only if a loaded policy reads them, and then as pseudonyms, except
strings that a policy names.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from smetric.features import ON_DEMAND, VOCABULARY
from smetric.fleet.record import Forecast, Migration
from smetric.policy import Kind, Policy
from smetric.policy.plan import Const, walk
from smetric.request.request import Usage

#: All fields, in the order of the table.
FIELDS = tuple(VOCABULARY.request)
#: Fields recorded whatever policies are loaded.
ALWAYS = frozenset(name for name, field in VOCABULARY.request.items() if field.kind is not Kind.STRING) - ON_DEMAND
#: Fields whose strings are replaced by pseudonyms; of models, only unsafe names.
HIDDEN = tuple(name for name, field in VOCABULARY.request.items() if field.kind is Kind.STRING)
MODEL = "model"


def fields_recorded(policies: Collection[Policy]) -> list[str]:
    """Return the request fields that are recorded while *policies* are loaded."""
    read = {name for policy in policies for name in fields_read(policy)}
    return [name for name in FIELDS if name in ALWAYS or name == MODEL or name in read]


def fields_read(policy: Policy) -> set[str]:
    """Return the request fields that *policy* may read; the id stands in for an empty key of `hrw` and `bucket`."""
    return {*policy.fields, *(("id",) if policy.plan.keyed else ())}


def strings_named(policy: Policy) -> set[str]:
    """Return the strings in the text of *policy*; a decision may compare strings of a request with them."""
    found: set[str] = set()
    for term in policy.plan.terms:
        for part in walk(term):
            if isinstance(part, Const):
                found |= _strings_in(part.value)
    return found


def _strings_in(value: Any) -> set[str]:
    if isinstance(value, str):
        return {value}
    return {item for item in value if isinstance(item, str)} if isinstance(value, Collection) else set()


#: Version of these lines. A reader refuses larger ones, and ignores fields that a newer writer adds.
VERSION = 1


class Header(msgspec.Struct, tag_field="kind", tag="header", kw_only=True):
    """First line of a file.

    Args:
        version: of the lines.
        smetric: version of the router that wrote it.
        time_ns: begin of the file, Unix nanoseconds.
    """

    version: int
    smetric: str
    time_ns: int


class PolicyLine(msgspec.Struct, tag_field="kind", tag="policy", kw_only=True):
    """A policy that decides from here on.

    Args:
        generation: number by which decisions refer to it: 1 for the policy loaded at start, +1 for each reload.
        name: as in the file.
        digest: as in traces.
        file: name of the file, without its folder.
        text: the whole file.
        libraries: texts of its libraries, by name.
        params: values of its parameters, defaults included.
        fields: request fields that are recorded while it decides.
    """

    generation: int
    name: str
    digest: str
    file: str
    text: str
    libraries: dict[str, str] = {}
    params: dict[str, float | bool | str]
    fields: list[str]


class ColumnLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A feature over the candidates.

    Args:
        values: as the policy saw them, unknown cells filled in.
        unknown: indices of the unknown cells.
        age: seconds since each was measured, None for never; None if the feature is as old as the decision.
        origin: source of the cells: one name for all, or one each.
        lag: seconds after the decision at which it was looked up for an observed policy; None for the decision's own.
    """

    values: list[Any]
    unknown: list[int] = []
    age: list[float | None] | None = None
    origin: str | list[str] = ""
    lag: float | None = None


class HitLine(msgspec.Struct, kw_only=True):
    """Expected hit on the chosen instance.

    Args:
        tokens: prompt tokens expected to be cached.
        source: where the expectation comes from.
    """

    tokens: int
    source: str = ""


if TYPE_CHECKING:
    RequestLine = Any
else:
    #: Request fields as a policy reads them; only those in `PolicyLine.fields` count. A field filled on demand is UNSET
    #: otherwise.
    RequestLine = msgspec.defstruct(
        "RequestLine",
        [
            (field.name, Any, msgspec.UNSET if field.on_demand else field.default)
            for field in VOCABULARY.request.values()
        ],
        module=__name__,
    )


class DecisionLine(msgspec.Struct, tag_field="kind", tag="decision", kw_only=True):
    """A decision and its outcome.

    Args:
        id: as in the response's `x-smetric-decision-id`.
        time_ns: time of the decision, Unix nanoseconds.
        trace_id: its trace; empty without one.
        generation: of the policy.
        rank: number of earlier decisions on the same request.
        outcome: as in traces: routed, pinned, held, rejected, no_candidate, error.
        reason: what settled it.
        origin: `live` for a request that was served.
        route: matching entry of `routes`.
        arm: `control` or `canary` if the route has a canary; otherwise empty.
        instance: the chosen one, or None.
        rule: label of the rule that fired; empty if no policy ran.
        api: wire format of the request.
        request: the request's fields, those in the policy line's `fields`.
        tokens_source: how the prompt's length is known.
        ids: the candidates; empty if no policy ran, as are `columns`.
        columns: features that were read, by name.
        cursors: of rotating picks, as given.
        seed: of its draws.
        guards: for each visited rule, its guards: true, false, or None for not reached.
        score: of the chosen instance; None if none was chosen by a score.
        reject: status of the reject rule. The client gets another one if an instance has failed the request before.
        margin: distance to the score of the best other candidate; None without one.
        evaluate_s: seconds spent on evaluating the policy.
        lookup_s: seconds spent on look-ups before.
        status: the client's status; None if another decision on the same request follows.
        ttft_s: seconds from arrival to the first output of the answer; None if nothing was to be computed.
        duration_s: seconds from arrival to its end.
        error_type: empty without an error.
        usage: tokens as the instance counted them, or None.
        hit: expected hit; None if none was looked up.
        forecast: expected times; None if none could be computed.
        migration: where a later turn was moved from; None otherwise.
    """

    id: str
    time_ns: int
    trace_id: str = ""
    generation: int
    rank: int = 0
    outcome: str
    reason: str = ""
    origin: str = "live"
    route: str = "default"
    arm: str = ""
    instance: str | None = None
    rule: str = ""
    api: str = ""
    request: RequestLine
    tokens_source: str = ""
    ids: list[str] = []
    columns: dict[str, ColumnLine] = {}
    cursors: dict[str, str] = {}
    seed: int = 0
    guards: Sequence[tuple[str, Sequence[tuple[str, bool | None]]]] = []
    score: float | None = None
    reject: int | None = None
    margin: float | None = None
    evaluate_s: float = 0.0
    lookup_s: float = 0.0
    status: int | None = None
    ttft_s: float | None = None
    duration_s: float | None = None
    error_type: str = ""
    usage: Usage | None = None
    hit: HitLine | None = None
    forecast: Forecast | None = None
    migration: Migration | None = None


Line = Header | PolicyLine | DecisionLine
