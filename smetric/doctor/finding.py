"""What is wrong with a set-up, and how to mend it. Finding it is not here."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

#: Characters shown of a text that came from outside, and items of a list.
_LONGEST, _MOST = 80, 8


class Severity(enum.Enum):
    """How bad it is, the worst first; only an info leaves the exit code 0."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or worth knowing.

    Args:
        severity: how bad it is.
        where: the instance, service or setting.
        what: what was seen.
        why: why it matters.
        remedy: the flag or setting to change.
    """

    severity: Severity
    where: str
    what: str
    why: str
    remedy: str


def error(where: str, what: str, why: str, remedy: str) -> Finding:
    """Something does not work."""
    return Finding(Severity.ERROR, where, what, why, remedy)


def warning(where: str, what: str, why: str, remedy: str) -> Finding:
    """Something works worse than it should."""
    return Finding(Severity.WARNING, where, what, why, remedy)


def info(where: str, what: str, why: str, remedy: str) -> Finding:
    """Something worth knowing."""
    return Finding(Severity.INFO, where, what, why, remedy)


def shown(text: object) -> str:
    """*text* from outside, fit for a terminal: printable, and not long."""
    clean = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text)[: _LONGEST + 1])
    return clean if len(clean) <= _LONGEST else clean[: _LONGEST - 1] + "…"


def listed(items: Iterable[object]) -> str:
    """*items* in a row, the first few if there are many; "none" for none."""
    each = [shown(item) for item in items]
    more = f" and {len(each) - _MOST} more" if len(each) > _MOST else ""
    return (", ".join(each[:_MOST]) + more) or "none"
