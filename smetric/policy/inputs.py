"""Writes the code that reads a decision's inputs, each at most once: columns of the snapshot, fields of the request.

A look-up that the snapshot lacks ends the evaluation there, with what is to be fetched.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass

from smetric.policy.code import Code, attribute, call, is_none, item, load, method
from smetric.policy.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Asking:
    """The guard, filter or pick being written: its name in traces, and the look-ups it may ask for."""

    label: str
    lookups: frozenset[str]


class Inputs:
    """What one function reads.

    Args:
        code: the function.
        vocabulary: features and request fields.
        defaulted: request fields that may be unknown and are read outside guards: they have their default there.
        absent: what is returned where a look-up is absent; given the look-ups to ask for.
    """

    def __init__(
        self,
        code: Code,
        vocabulary: Vocabulary,
        defaulted: frozenset[str],
        absent: Callable[[frozenset[str]], ast.expr],
    ) -> None:
        self.asking = Asking("", frozenset())
        #: For each look-up, the labels of what asks for it.
        self.asked_by: dict[str, list[str]] = {}
        #: The variable of each feature that is read.
        self.columns: dict[str, str] = {}
        self._code = code
        self._vocabulary = vocabulary
        self._defaulted = defaulted
        self._absent = absent
        self._fields: dict[str, str] = {}
        self._with_default: dict[str, str] = {}
        self._snapshot_columns = code.name("columns")
        self._size = code.name("n")

    def ids(self) -> ast.expr:
        """The candidates' ids."""
        return attribute(load("snapshot"), "ids")

    def size(self) -> ast.expr:
        """The number of candidates before any filter."""
        self._code.once(self._size, lambda: self._code.assign(self._size, call("len", self.ids())))
        return load(self._size)

    def column(self, feature: str) -> str:
        """The variable of a feature's list."""
        if feature not in self.columns:
            self.columns[feature] = self._code.name(feature)
        name = self.columns[feature]
        self._code.once(name, lambda: self._read(feature, name))
        return name

    def _read(self, feature: str, name: str) -> None:
        code, columns = self._code, self._snapshot_columns
        code.once(columns, lambda: code.assign(columns, attribute(load("snapshot"), "columns")))
        if not self._vocabulary.features[feature].lookup:
            code.assign(name, item(load(columns), ast.Constant(feature)))
            return
        code.assign(name, method(load(columns), "get", ast.Constant(feature)))
        labels = self.asked_by.setdefault(feature, [])
        if self.asking.label not in labels:
            labels.append(self.asking.label)
        lookups = self.asking.lookups
        code.choose(is_none(load(name)), lambda: code.give(self._absent(lookups)))

    def raw_field(self, name: str) -> str:
        """The variable of a request field as it came: None where unknown."""
        if name not in self._fields:
            self._fields[name] = self._code.name(f"req_{name}")
        variable = self._fields[name]
        self._code.once(variable, lambda: self._code.assign(variable, attribute(load("req"), name)))
        return variable

    def identity(self) -> ast.expr | None:
        """The request's id, which may be empty; None where requests have none."""
        return load(self.raw_field("id")) if "id" in self._vocabulary.request else None

    def field(self, name: str) -> str:
        """The variable of a request field as arithmetic sees it."""
        raw = self.raw_field(name)
        if name not in self._defaulted:
            return raw
        if name not in self._with_default:
            self._with_default[name] = self._code.name(f"{name}_or_default")
        variable = self._with_default[name]
        default = ast.Constant(self._vocabulary.request[name].default)
        value = ast.IfExp(test=is_none(load(raw)), body=default, orelse=load(raw))
        self._code.once(variable, lambda: self._code.assign(variable, value))
        return variable
