"""Help for unknown names, functions and units. Most texts have none, so this is imported where one is found."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from smetric.policy.builtin import BUILTINS
from smetric.policy.types import BASES, BEHIND_NUMBERS, NUMBERS, base_unit, did_you_mean, looked_up
from smetric.policy.vocabulary import Kind, Vocabulary

#: Features that the help for an unknown name lists.
MOST_NEAR = 5
#: Names of no value in other languages, and the help for them.
NOTHINGS = ("None", "null", "nil", "NaN", "undefined")
ASK_KNOWN = "an unknown value has no name: ask known(…); a guard that reads an unknown field of the request fails"
#: Functions of other languages, and their counterparts here.
_FOREIGN = {
    "avg": "`mean(…)`",
    "average": "`mean(…)`",
    "len": "`count()`",
    "median": "`quantile(…, 0.5)`",
    "normalize": "`norm(…)`",
    "now": "`age(…)` of what is read: a policy has no clock",
    "random": "`sample(1)`",
    "round_robin": "`rr_argmin(0)`",
}
#: Durations of the language. Right behind a number they are a unit only where the number has an exponent.
_DURATIONS = frozenset({"us", "ms", "s", "m", "h"})
_TIMES = _DURATIONS | {"sec", "secs", "min", "mins", "hour", "hours", "minute", "minutes"}
_ABOVE = "define it above this line"


def help_for_name(name: str, known: Collection[str], below: Collection[str], vocabulary: Vocabulary) -> str:
    """Return the help for an unknown *name*, where the names *known* are defined and those *below* are further down."""
    if name == "req":
        return "name one of its fields: req.turn, req.prompt_len, …"
    if name in vocabulary.request:
        return f"request fields are written `req.{name}`"
    if name in below:
        return _ABOVE
    if name in NOTHINGS:
        return ASK_KNOWN
    if base_unit(name) is not None:
        meant = did_you_mean(name, vocabulary.features)
        return meant or "a unit stands right behind a number: 16 requests, 5 tokens per second"
    return did_you_mean(name, {*known, *vocabulary.features, "true", "false"}) or _near(name, vocabulary)


def _near(name: str, vocabulary: Vocabulary) -> str:
    """Return the help for a name that resembles no other: the features about it, else the labels of instances."""
    parts = {name.lower(), *name.lower().split("_")}
    words = {word.name: re.findall("[a-z]{4,}", word.doc.lower()) for word in vocabulary.features.values()}
    near = [feature for feature, doc in words.items() if parts.intersection((*feature.split("_"), *doc))]
    what = f"features about it are {', '.join(near[:MOST_NEAR])}"
    if not near:
        labels = [word.name for word in vocabulary.features.values() if word.kind is Kind.STRING]
        what = f"instances have the labels {', '.join(labels)}"
    return f'{what}; define it above, or quote it if it is a string: "{name}"'


def help_for_function(name: str, known: Collection[str], below: Collection[str], vocabulary: Vocabulary) -> str:
    """Return the help for an unknown function; arguments as of `help_for_name`."""
    if name in below:
        return _ABOVE
    if name in vocabulary.features:
        return looked_up(name)
    return f"write {_FOREIGN[name]}" if name in _FOREIGN else did_you_mean(name, {*known, *BUILTINS})


def help_for_unit(word: str, parameters: Iterable[str], *, last: bool, touches: bool) -> str:
    """Return the help for an unknown unit.

    Args:
        word: as written.
        parameters: the feature parameters, whose names are units too.
        last: whether it stands behind `per`.
        touches: whether it stands right behind a number.
    """
    if word in _TIMES and last:
        return "behind `per` time is in seconds: per second"
    if word in _DURATIONS and touches:
        return "durations have no exponent: 500ms, 2s, 5m, 1h"
    if word in _TIMES:
        return "durations are written 500ms, 2s, 5m, 1h, without a space"
    if word in ("percent", "pct"):
        return "shares are plain numbers: write 0.5 for 50%"
    if word.lstrip("_").isdigit() or word in ("k", "K", "M", "G"):
        return NUMBERS
    return did_you_mean(word, BASES.values()) or did_you_mean(word, parameters) or did_you_mean(word, BEHIND_NUMBERS)
