"""Options that several commands share."""

from __future__ import annotations

import click
import pytest

from smetric.cli.options import Percent


@pytest.mark.parametrize(("text", "number"), [("0", 0.0), ("99.5", 99.5), ("100", 100.0)])
def test_percent_accepts_0_to_100(text: str, number: float) -> None:
    assert Percent()(text) == number


@pytest.mark.parametrize("text", ["nan", "-nan", "inf", "-1", "100.01", "half", ""])
def test_percent_rejects_nan_and_values_out_of_range(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Percent()(text)
