"""Times and sizes, written with their unit: `250ms`, `32MiB`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from smetric.config.kind import Kind, interpolated, scalar_of
from smetric.config.raw import Raw, wrong

N = TypeVar("N", int, float)

#: Unit to seconds.
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
#: Unit to bytes.
BYTES = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "kB": 1e3, "MB": 1e6, "GB": 1e9}

_QUANTITY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([A-Za-z]+)\Z")


class _Quantity(Kind[N]):
    """A number with a unit between two bounds, each written the same way."""

    def __init__(self, units: Mapping[str, float], shown: tuple[str, ...], low: str, high: str, rule: str) -> None:
        self._units = units
        self._shown = shown
        self._low = self._read(low)
        self._high = self._read(high)
        self._rule = f"{rule} with its unit from {low} to {high}"

    def _read(self, text: str) -> float:
        match = _QUANTITY.match(text)
        if match is None or match[2] not in self._units:
            raise ValueError(text)
        return float(match[1]) * self._units[match[2]]

    def _value(self, raw: Raw, name: str) -> float:
        scalar = scalar_of(raw, name, self._rule)
        try:
            value = self._read(scalar.text)
        except ValueError:
            value = -1.0
        if not self._low <= value <= self._high:
            raise wrong(raw, name, f"{self._rule} (units: {', '.join(self._units)})")
        return value

    def schema(self) -> dict[str, Any]:
        """A string with a unit."""
        return interpolated({"type": "string", "pattern": rf"^[0-9]+(\.[0-9]+)?\s*({'|'.join(self._units)})$"})

    def show(self, value: N) -> str:
        """As it would be written: in the largest unit that leaves a whole number, else in the smallest."""
        for unit in self._shown:
            count = value / self._units[unit]
            if count >= 1 and abs(count - round(count)) < 1e-9:
                return f"{round(count)}{unit}"
        if value == 0:
            return f"0{next(unit for unit, size in self._units.items() if size == 1)}"
        smallest = self._shown[-1]
        return f"{value / self._units[smallest]:.6f}".rstrip("0").rstrip(".") + smallest


class Duration(_Quantity[float]):
    """A time; its value is in seconds."""

    def __init__(self, low: str = "1ms", high: str = "24h") -> None:
        super().__init__(SECONDS, ("h", "m", "s", "ms", "us"), low, high, "a time")

    def parse(self, raw: Raw, name: str) -> float:
        """Seconds."""
        return self._value(raw, name)


class Size(_Quantity[int]):
    """A number of bytes."""

    def __init__(self, low: str, high: str) -> None:
        super().__init__(BYTES, ("GiB", "MiB", "KiB", "B"), low, high, "a size")

    def parse(self, raw: Raw, name: str) -> int:
        """Bytes."""
        return int(self._value(raw, name))
