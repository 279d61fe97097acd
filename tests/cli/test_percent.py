"""What bounds a share is a number from 0 to 100."""

from __future__ import annotations

import click
import pytest

from smetric.cli.policy import Percent


@pytest.mark.parametrize(("text", "number"), [("0", 0.0), ("99.5", 99.5), ("100", 100.0)])
def test_a_share_is_taken(text: str, number: float) -> None:
    assert Percent()(text) == number


@pytest.mark.parametrize("text", ["nan", "-nan", "inf", "-1", "100.01", "half", ""])
def test_what_would_pass_or_fail_whatever_comes_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Percent()(text)
