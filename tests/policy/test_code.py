"""The nodes that a policy becomes are what every Python that is supported makes a function of."""

import ast

import pytest

from smetric.features import VOCABULARY
from smetric.policy import load


@pytest.mark.filterwarnings("ignore:Field 'of_a_later_python':DeprecationWarning")
def test_lists_that_some_pythons_have_and_others_not_need_not_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function has `type_params` from 3.12 on; there a node that was made without it has no such attribute."""
    name = "of_a_later_python"
    monkeypatch.setattr(ast.FunctionDef, "_fields", (*ast.FunctionDef._fields, name))
    types = {**getattr(ast.FunctionDef, "_field_types", {}), name: list[ast.expr]}  # from 3.13 on
    monkeypatch.setattr(ast.FunctionDef, "_field_types", types, raising=False)
    assert load("policy p\nroute argmin(requests)\n", VOCABULARY).name == "p"
