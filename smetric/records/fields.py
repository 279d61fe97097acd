"""Which fields of a request a record holds, and which of them as stand-ins.

Numbers are always recorded, but for those that are filled on demand, and so is the model. Other strings come from
clients (sessions, tenants, request ids): they are recorded only where a loaded policy reads them, and then as stand-ins
(`smetric.policy.pseudonym`), except where a policy names the very string.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from smetric.features import VOCABULARY
from smetric.policy import Kind, Policy
from smetric.policy.term import Const, walk

#: All fields, in the order of the table.
FIELDS = tuple(VOCABULARY.request)
#: Those that are filled for the requests only that a policy which reads them is asked about.
ON_DEMAND = frozenset(name for name, field in VOCABULARY.request.items() if field.on_demand)
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
