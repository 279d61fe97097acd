"""How guards are called in traces and tests."""

from __future__ import annotations

import pytest

from smetric.policy import tree
from smetric.policy.guard import conjuncts, label_of
from smetric.policy.lexer import one_line
from smetric.policy.parser import parse


def labels(when: str) -> list[str]:
    text = f"policy p\ndef busy(l) = max(l) > 3\nroute argmin(requests) when {when}\n"
    file = parse(text)
    (route,) = [statement for statement in file.statements if isinstance(statement, tree.Rule)]
    return [label_of(guard, text, {"busy"}) for guard in conjuncts(route.when)]


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ("req.turn != 0", ["req.turn != 0"]),
        ("busy(requests)", ["busy"]),
        ("not busy(requests)", ["not busy"]),
        ("any(healthy) and busy(requests) and req.turn > 1", ["any(healthy)", "busy", "req.turn > 1"]),
        ("req.turn > 1 or busy(requests)", ["req.turn > 1 or busy"]),
        (
            "any(healthy where requests > 3) or busy(requests) or busy(running)",
            ["any(healthy where requests > 3) or busy or busy"],
        ),
        (
            "requests[argmin(requests where busy(running))] > (1 if busy(requests) else -req.turn)",
            ["requests[argmin(requests where busy)] > (1 if busy else -req.turn)"],
        ),
        ("req.turn\n   >   1 # why\n and any(healthy)", ["req.turn > 1", "any(healthy)"]),
        ('req.session != "a#b"', ['req.session != "a#b"']),
    ],
)
def test_guard_label_is_its_definition_or_its_text(when: str, expected: list[str]) -> None:
    assert labels(when) == expected


def test_guard_label_is_one_line_without_comments() -> None:
    assert one_line('a  # "x"\n  and "b # c"\t> d#e') == 'a and "b # c" > d'


def test_guards_of_no_condition_are_none() -> None:
    assert conjuncts(None) == []
