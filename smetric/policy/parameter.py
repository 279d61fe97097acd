"""Parameters of a policy and the values given to them."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

from smetric.policy.diagnostic import clip
from smetric.policy.types import Interval, Sort, Type, exact, written
from smetric.policy.vocabulary import LARGEST

Value = float | str | bool
#: Who gives values unless somebody else is named.
CONFIGURATION = "configuration"
_SORTS: dict[type, Sort] = {float: Sort.NUMBER, bool: Sort.BOOL, str: Sort.STRING}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter with the value it has.

    Args:
        name: as declared.
        value: as configured, else the default; numbers in base units; a feature's name where `is_feature`.
        unit: of a number, as the language writes it; empty for a plain one and all else.
        low: smallest value of a range, or None.
        high: largest value of a range, or None.
        choices: the values allowed, or empty.
        configured: whether the value comes from the configuration.
        is_feature: whether it names a feature.
        doc: its `##` lines.
    """

    name: str
    value: Value
    unit: str = ""
    low: float | None = None
    high: float | None = None
    choices: tuple[Value, ...] = ()
    configured: bool = False
    is_feature: bool = False
    doc: str = ""

    @property
    def domain(self) -> str:
        """The values allowed, as the language writes them; empty for any."""
        if self.choices:
            return "{" + ", ".join(self.show(choice) for choice in self.choices) + "}"
        if self.low is None:
            return ""
        return f"{exact(self.low)}.." if self.high is None else f"{exact(self.low)}..{exact(self.high)}"

    def show(self, value: Value) -> str:
        """A value of this parameter, as the language writes it."""
        shown = clip(value) if isinstance(value, str) else value
        return str(shown) if self.is_feature else written(shown)

    def outside(self, value: Value) -> bool:
        """Whether *value*, of the right kind, is none of those allowed."""
        if self.choices:
            return value not in self.choices
        if isinstance(value, str) or self.low is None:
            return False
        return value < self.low or (self.high is not None and value > self.high)

    @property
    def type(self) -> Type:
        """What an expression that names it sees, unless it names a feature."""
        made = Type(_SORTS[type(self.value)])
        if isinstance(self.value, bool):
            made = replace(made, interval=Interval(float(self.value), float(self.value)))
        elif isinstance(self.value, float):
            made = replace(made, interval=self._interval(self.value))
        return replace(made, may=frozenset((self.name,)))

    def _interval(self, value: float) -> Interval:
        if self.low is None:
            return Interval(value, value)
        return Interval(self.low, LARGEST if self.high is None else self.high)


@dataclass(frozen=True, slots=True)
class Settings:
    """Values given to parameters, by name, and who gives them, as messages call it."""

    values: Mapping[str, object]
    by: str = CONFIGURATION

    def only(self, names: Container[str]) -> Settings:
        """Those of *names*."""
        return replace(self, values={name: value for name, value in self.values.items() if name in names})
