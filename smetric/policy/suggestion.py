"""What somebody probably meant: a name, or a comparison."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from smetric.policy.types import Sort

#: Help for `1_000` and `4k`.
NUMBERS = "numbers have no separators and no letters: e.g. 5000 or 5e3"
#: Help for `2 hit_len`, before how it is written.
PRODUCT = "a product needs its sign:"
#: The words that may stand behind a number.
BEHIND_NUMBERS = ("when", "as", "and", "or", "retry", "else", "if", "in")


def closest(name: str, known: Iterable[str]) -> str:
    """The known name that is most like *name*, or empty when none is like it."""
    names = sorted(known)
    for candidate in names:
        if candidate.lower() == name.lower():
            return candidate
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.65)
    return found[0] if found else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Help for an unknown *name*: the closest known one, or empty."""
    found = closest(name, known)
    return f"did you mean `{found}`?" if found else ""


def truth(name: str) -> str:
    """Help for an unknown *name* that is a truth value in other languages, or empty."""
    return f"did you mean `{name.lower()}`?" if name.lower() in ("true", "false") else ""


def comparison(sort: Sort) -> str:
    """Help where a value of this sort stands and a truth value is needed; empty where nothing makes it one."""
    compared = {Sort.NUMBER: "> 0", Sort.STRING: '== "…"'}.get(sort)
    return f"compare it with something, e.g. `{compared}`" if compared else ""
