"""What the checker says of a policy in the words of these tests: what is known of it, or its errors."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from smetric.policy.check import Checked, check_text
from smetric.policy.diagnostic import PolicyError
from smetric.policy.parameter import Value
from tests.policy.words import WORDS


def checked(code: str, settings: Mapping[str, Value] | None = None) -> Checked:
    """What is known of a sound policy whose statements are *code*."""
    return check_text(f"policy p\n{code}", WORDS, settings)[1]


def errors(code: str, settings: Mapping[str, Value] | None = None) -> list[str]:
    """The messages of the errors of a policy whose statements are *code*."""
    with pytest.raises(PolicyError) as caught:
        checked(code, settings)
    return [found.message for found in caught.value.diagnostics]
