"""A snapshot and a request written down as JSON, for `smetric explain`.

{"instances": [{"id": "a", "requests": 3, "hit_len": null, "age(requests)": 0.2}, …],
 "request": {"turn": 2, "prompt_len": 9000, "est_hit": 8000}, "cursors": {"least": "a"}, "seed": 7}

Only `instances` must be there. A feature that is left out or null is unknown. A request field that bounds a feature, as
the prompt's length bounds a hit, is at least as large as the instances say, if it is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from smetric.errors import ConfigError
from smetric.policy import Feature, Kind, RequestField, Vocabulary
from smetric.policy.situation import Situation
from smetric.suggestion import did_you_mean

#: Largest file that is read, bytes: ten thousand instances of which everything is known take less.
MAX_BYTES = 64 * 1024 * 1024
_MOST_INSTANCES = 10_000
_AGE = re.compile(r"age\((\w+)\)\Z")
_IS = {
    Kind.NUMBER: lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    Kind.BOOL: lambda value: isinstance(value, bool),
    Kind.STRING: lambda value: isinstance(value, str),
    Kind.SET: lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
}


def read_situation(text: str, place: str, vocabulary: Vocabulary) -> Situation:
    """The situation that the JSON *text* describes.

    Raises:
        ConfigError: it is no JSON, or says something that *vocabulary* does not know or allow.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{place}: not JSON: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{place}: nested too deeply") from error
    top = _object(document, place, ("instances", "request", "cursors", "seed"))
    given = _request(top.get("request", {}), f"{place}: request", vocabulary)
    rows = top.get("instances")
    if not isinstance(rows, list) or not 1 <= len(rows) <= _MOST_INSTANCES:
        example = '[{"id": "a", "requests": 3}, …]'
        raise ConfigError(f"{place}: instances: expected a list of 1 to {_MOST_INSTANCES} objects: {example}")
    ids, cells, ages = _columns(rows, place, vocabulary, given)
    cursors = _object(top.get("cursors", {}), f"{place}: cursors")
    if not all(isinstance(value, str) for value in cursors.values()):
        raise ConfigError(f"{place}: cursors: expected instance ids")
    seed = top.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 1 << 64:
        raise ConfigError(f"{place}: seed: expected a whole number from 0 to 2^64 - 1, got {_shown(seed)}")
    return Situation(ids, cells, ages, given, cursors, seed)


def _columns(
    rows: list[Any], place: str, vocabulary: Vocabulary, given: Mapping[str, Any]
) -> tuple[list[str], dict[str, list[Any]], dict[str, list[float]]]:
    """The rows as columns: ids, cells per feature, ages per feature (0 where a row says none)."""
    ids: dict[str, None] = {}
    cells: dict[str, list[Any]] = {}
    ages: dict[str, list[float]] = {}
    for i, row in enumerate(rows):
        here = f"{place}: instances[{i}]"
        _object(row, here)
        ident = row.get("id")
        if not isinstance(ident, str) or not ident or ident in ids:
            raise ConfigError(f"{here}: id: expected a text of its own, got {_shown(ident)}")
        ids[ident] = None
        for name, value in row.items():
            aged = _AGE.match(name)
            if name == "id":
                continue
            _known_name(aged[1] if aged else name, vocabulary.features, here)
            if aged:
                if not _IS[Kind.NUMBER](value) or not 0 <= value < float("inf"):
                    raise ConfigError(f"{here}: {name}: expected seconds, 0 or more, got {_shown(value)}")
                ages.setdefault(aged[1], [0.0] * len(rows))[i] = float(value)
                continue
            feature = vocabulary.features[name]
            high = min(feature.high, given.get(feature.at_most, feature.high))
            cells.setdefault(name, [None] * len(rows))[i] = _typed(value, feature, high, f"{here}: {name}")
    return list(ids), cells, ages


def _request(value: Any, place: str, vocabulary: Vocabulary) -> dict[str, Any]:
    """The request fields that are given."""
    given = {}
    for name, item in _object(value, place, vocabulary.request).items():
        field = vocabulary.request[name]
        if item is None and not field.may_be_unknown:
            raise ConfigError(f"{place}: {name}: is never unknown; give a value or leave it out")
        given[name] = _typed(item, field, field.high, f"{place}: {name}")
    return given


def _typed(value: Any, row: Feature | RequestField, high: float, place: str) -> Any:
    """*value* as the language holds it, None for unknown; *high* is the largest allowed."""
    if value is None:
        return None
    if not _IS[row.kind](value):
        raise ConfigError(f"{place}: expected a {row.kind.value}, got {_shown(value)}")
    if row.kind is Kind.NUMBER:
        if not row.low <= value <= high:
            raise ConfigError(f"{place}: expected a number from {row.low:g} to {high:g}, got {_shown(value)}")
        return float(value)
    return frozenset(value) if row.kind is Kind.SET else value


def _object(value: Any, place: str, keys: Iterable[str] | None = None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: expected an object, got {_shown(value)}")
    if keys is not None:
        for key in value:
            _known_name(key, keys, place)
    return value


def _known_name(name: str, names: Iterable[str], place: str) -> None:
    if name not in names:
        meant = did_you_mean(name, names) or "; known here: " + ", ".join(names)
        raise ConfigError(f"{place}: {name[:80]}: no such name{meant}")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:59] + "…"
