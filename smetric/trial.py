"""Tries a candidate on the last decisions before it acts: how often it would have chosen otherwise, and where.

Nothing is swapped. Decisions on disk are `smetric replay`'s.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from smetric import policy as language
from smetric.features import VOCABULARY
from smetric.policy import Policy, Reader, Source
from smetric.policy.parameter import CONFIGURATION
from smetric.policy_file import PolicyFile
from smetric.records import report
from smetric.records.comparison import Comparison
from smetric.records.replay import RECORDED, Judges, replay
from smetric.records.ring import recorded
from smetric.telemetry.record import DecisionRecord

#: Seconds after which no further decision is evaluated, and examples that are explained.
MOST_S = 5.0
EXAMPLES = 5

Settings = Mapping[str, float | str | bool]


def candidate_of(file: PolicyFile, text: str, settings: Settings | None, libraries: Mapping[str, str]) -> Policy:
    """The policy that *text* is, in the place of *file*.

    Args:
        file: what it is tried against.
        text: of the candidate.
        settings: values of its parameters; None for those configured there.
        libraries: texts by name; others are read beside the file.

    Raises:
        PolicyError: it does not check.
    """
    beside: Reader = file.beside

    def library(name: str) -> Source | None:
        return Source(libraries[name], f"{name}.policy") if name in libraries else beside(name)

    given, by = (file.settings, CONFIGURATION) if settings is None else (settings, "this trial")
    return language.load(text, VOCABULARY, path="candidate.policy", settings=given, libraries=library, set_by=by)


def trial(
    candidate: Policy,
    records: Sequence[DecisionRecord],
    is_given_up: Callable[[], bool] = lambda: False,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """How *candidate* compares with what was decided in *records*, oldest first, as JSON values.

    Stops after `MOST_S` seconds, and says so; also once it *is_given_up*, asked before each decision.
    """
    end = clock() + MOST_S
    found = Comparison(RECORDED, candidate.name)
    in_time = itertools.takewhile(lambda _: clock() < end and not is_given_up(), recorded(records, [candidate]))
    replay(in_time, Judges(candidate), None, found)
    told = report.examples(found, EXAMPLES)
    return {
        "candidate": f"{candidate.name}@{candidate.digest}",
        "warnings": [one.brief(candidate.source) for one in candidate.warnings],
        "cut_short": found.read < len(records),
        **report.as_json(found, told),
        "text": report.as_text(found, told),
    }
