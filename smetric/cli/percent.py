"""A share of a hundred on the command line: what is no number passes every comparison, and so every bound."""

from __future__ import annotations

import math
from typing import Any

import click


class Percent(click.FloatRange):
    """A number from 0 to 100."""

    def __init__(self) -> None:
        super().__init__(0, 100)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; fails as click does."""
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a valid {self.name}.", param, ctx)
        return number
