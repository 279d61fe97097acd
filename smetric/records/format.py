"""Lines of a record, and the situation of a recorded decision."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from smetric.features import ON_DEMAND, VOCABULARY
from smetric.fleet.record import Forecast, Migration
from smetric.policy import Kind, Policy
from smetric.policy.plan import Const, walk
from smetric.request.request import Usage

# Which fields of a request a record holds, and which of them as stand-ins.
#
# Numbers are always recorded, but for those that are filled on demand, and so is the model. Other strings come from
# clients (sessions, tenants, request ids): they are recorded only where a loaded policy reads them, and then as
# stand-ins (`smetric.policy.pseudonym`), except where a policy names the very string.

#: All fields, in the order of the table.
FIELDS = tuple(VOCABULARY.request)
#: Those that are recorded whatever policies are loaded.
ALWAYS = frozenset(name for name, field in VOCABULARY.request.items() if field.kind is not Kind.STRING) - ON_DEMAND
#: Those whose strings are replaced by stand-ins; of models only names that are no names.
HIDDEN = tuple(name for name, field in VOCABULARY.request.items() if field.kind is Kind.STRING)
MODEL = "model"


def fields_recorded(policies: Collection[Policy]) -> list[str]:
    """What is recorded of a request while *policies* are loaded."""
    read = {name for policy in policies for name in fields_read(policy)}
    return [name for name in FIELDS if name in ALWAYS or name == MODEL or name in read]


def fields_read(policy: Policy) -> set[str]:
    """The request's fields that *policy* may read; its id stands for an empty key of `hrw` and `bucket`."""
    return {*policy.fields, *(("id",) if policy.plan.keyed else ())}


def strings_named(policy: Policy) -> set[str]:
    """The strings that stand in *policy*, which a request's may be compared with."""
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


# The lines of a record of decisions: JSON, one object a line, its `kind` first.
#
# A file begins with a header. Before the first decision of each generation of the policy stands the policy itself, so
# that a file needs nothing else to be evaluated again. Writing is `recorder.py`, reading `reader.py`.

#: Version of these lines. A reader refuses larger ones; what a newer writer of the same version adds is passed over.
VERSION = 1


class Header(msgspec.Struct, tag_field="kind", tag="header", kw_only=True):
    """First line of a file.

    Args:
        version: of the lines.
        smetric: version of the router that wrote it.
        time_ns: when the file was begun, Unix nanoseconds.
    """

    version: int
    smetric: str
    time_ns: int


class PolicyLine(msgspec.Struct, tag_field="kind", tag="policy", kw_only=True):
    """A policy that decides from here on.

    Args:
        generation: what decisions refer to it by; 1 for the policy loaded at start, +1 a reload.
        name: as the file says.
        digest: as in traces.
        file: the file's name, without the folder.
        text: the whole file.
        libraries: those of its libraries, by name.
        params: the values of its parameters, defaults included.
        fields: the request's fields that are recorded while it decides.
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
    """One feature over the candidates.

    Args:
        values: as the policy saw them, unknown cells filled in.
        unknown: which of them were, as indices.
        age: seconds since each was measured, None for never; None where the feature is as old as the decision.
        origin: who knew it: one name for all cells, or one each.
        lag: seconds after the decision at which it was looked up, for an observed policy; None for the decision's own.
    """

    values: list[Any]
    unknown: list[int] = []
    age: list[float | None] | None = None
    origin: str | list[str] = ""
    lag: float | None = None


class HitLine(msgspec.Struct, kw_only=True):
    """What was believed of the chosen instance's cache.

    Args:
        tokens: of the prompt, believed to be there.
        source: who said so.
    """

    tokens: int
    source: str = ""


if TYPE_CHECKING:
    RequestLine = Any
else:
    #: The request's fields as a policy reads them; those that `PolicyLine.fields` does not name mean nothing. What is
    #: filled on demand is UNSET where it was not.
    RequestLine = msgspec.defstruct(
        "RequestLine",
        [
            (field.name, Any, msgspec.UNSET if field.on_demand else field.default)
            for field in VOCABULARY.request.values()
        ],
        module=__name__,
    )


class DecisionLine(msgspec.Struct, tag_field="kind", tag="decision", kw_only=True):
    """One decision and what became of it.

    Args:
        id: as in the response's `x-smetric-decision-id`.
        time_ns: when it was made, Unix nanoseconds.
        trace_id: of its trace; empty without one.
        generation: of the policy.
        rank: how many decisions of the same request came before it.
        outcome: as in traces: routed, pinned, held, rejected, no_candidate, error.
        reason: what settled it.
        origin: where the decision comes from: `live` for a request that was served.
        route: the entry of `routes` that the request fell under.
        arm: `control` or `canary` where the route has a canary; empty elsewhere.
        instance: who was chosen; None for nobody.
        rule: the label of the rule that fired; empty where no policy ran.
        api: the wire format of the request.
        request: what policies read of it: what the policy's `fields` name.
        tokens_source: how the prompt's length is known.
        ids: the candidates; empty where no policy ran, as `columns` are then.
        columns: what was read of them, by feature.
        cursors: of the picks that rotate, as they were given.
        seed: of its draws.
        guards: for each rule visited, its guards: true, false, or None for not reached.
        score: of the chosen one; None where none was chosen by a score.
        reject: the status that the rule rejects with; None where it rejects nobody. The client is sent another where an
            instance has failed the request before.
        margin: how far the score of the best of the others is from it; None where there is none.
        evaluate_s: seconds the policy took.
        lookup_s: seconds spent on look-ups before.
        status: what the client was sent; None where another decision of the same request follows.
        ttft_s: seconds from arrival to the first byte of the answer; None where nothing was to be computed.
        duration_s: seconds from arrival to its end.
        error_type: what went wrong; empty for nothing.
        usage: tokens as the instance counted them; None where it did not say.
        hit: tokens believed cached on the chosen instance; None where none were looked up.
        forecast: times that were expected; None where nothing could be said.
        migration: where it was taken away from; None where it is no later turn that went elsewhere.
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
