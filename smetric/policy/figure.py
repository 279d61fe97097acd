"""How numbers and other values are printed: short in explanations, in full where somebody may copy them."""

from __future__ import annotations

from typing import Any

_WIDTH = 40


def figure(value: Any, digits: int = 4) -> str:
    """A value of any kind: numbers with at most *digits* figures where they have decimals, long strings cut."""
    if type(value) is not float:  # most are
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, frozenset | set):
            return clipped("{" + ", ".join(sorted(value)) + "}")
        if isinstance(value, str):
            return clipped(value)
    if value == int(value):
        return str(int(value))
    decimals = max(0, digits - len(str(int(abs(value)))))
    shown = f"{value:.{decimals}f}"
    if float(shown) == 0:
        return f"{value:.{digits - 1}g}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown


def exact(value: float) -> str:
    """A number with all its figures, as the language writes it."""
    return f"{value + 0.0:.15g}"  # -0.0 is 0


def written(value: Any) -> str:
    """A value of any kind as the language writes it, `?` for None."""
    if value is None:
        return "?"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, frozenset):
        return "{" + ", ".join(f'"{text}"' for text in sorted(value)) + "}"
    return f'"{value}"' if isinstance(value, str) else exact(value)


def clipped(text: str) -> str:
    """*text* in at most 40 characters."""
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"
