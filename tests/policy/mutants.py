"""Mutants of policies: the same text with one operator, function, guard, filter or number changed.

A mutant that does not check is none, and neither is one that did only what its policy might have done, whatever is
drawn, in every situation tried: no test could tell them apart. The others must be caught by the policy's tests or by a
counterexample to one of its promises.

    python -m tests.policy.mutants [NAME…]      # all shipped policies when none is named
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from smetric.features import VOCABULARY
from smetric.files import shipped_policies
from smetric.policy import Policy, PolicyError, load, tree
from smetric.policy.builtin import Family
from smetric.policy.diagnostic import Span
from smetric.policy.layout import conjuncts
from smetric.policy.parser import parse
from smetric.policy.testing import Situation, suite_of
from smetric.routing.policy_files import further_tests, libraries_beside
from smetric.tools.prove import SmallFleets, counterexample, promised

#: Situations in which a mutant has to decide unlike its policy, and in which its promises are tried.
SITUATIONS = 1000
#: Seeds tried where anything is drawn: of the policy many, so that what it seldom does is seen, of each mutant some.
POLICY_SEEDS = 64
MUTANT_SEEDS = 12
_OPERATORS = {
    "<": ("<=", ">"),
    "<=": ("<", ">="),
    ">": (">=", "<"),
    ">=": (">", "<="),
    "==": ("!=",),
    "!=": ("==",),
    "and": ("or",),
    "or": ("and",),
    "+": ("-",),
    "-": ("+",),
    "*": ("+",),
    "in": ("not in",),
    "not in": ("in",),
}
_FUNCTIONS = {
    "argmin": ("argmax",),
    "argmax": ("argmin",),
    "rr_argmin": ("rr_argmax", "argmin"),
    "rr_argmax": ("rr_argmin", "argmax"),
    "softmin": ("softmax",),
    "softmax": ("softmin",),
    "mean": ("max", "min"),
    "min": ("max",),
    "max": ("min",),
    "sum": ("max",),
    "any": ("all",),
    "all": ("any",),
    "least": ("greatest",),
    "greatest": ("least",),
}
_DIGITS = re.compile(r"[-0-9.e]+")


@dataclass(frozen=True, slots=True)
class Mutant:
    """A changed text, and what was changed in it."""

    text: str
    change: str
    is_number: bool


def mutants(source: str) -> list[Mutant]:
    """All mutants of a policy's text."""
    found = {}
    for statement in parse(source).statements:
        if not isinstance(statement, tree.Test):
            for span, new in _changes(statement, source):
                line = source.count("\n", 0, span.start) + 1
                old = " ".join(source[span.start : span.end].split())
                text = source[: span.start] + new + source[span.end :]
                found[text] = Mutant(text, f"line {line}: `{old}` → `{new}`", old[:1].isdigit())
    return list(found.values())


def _changes(statement: tree.Statement, source: str) -> Iterator[tuple[Span, str]]:
    """Places of a statement, and what may stand there instead."""
    if isinstance(statement, tree.Filter):
        yield statement.span, ""
    guards = conjuncts(getattr(statement, "when", None))
    for guard in guards if len(guards) > 1 else ():
        yield guard.span, "true"
    for node in _nodes(statement):
        match node:
            case tree.Binary(op=op):
                yield from ((node.op_span, new) for new in _OPERATORS.get(op, ()))
            case tree.Unary(op="not"):
                yield Span(node.span.start, node.operand.span.start), ""
            case tree.Truth(value=value):
                yield node.span, str(not value).lower()
            case tree.Number(value=value):
                digits = _DIGITS.match(source, node.span.start)
                assert digits is not None
                yield Span(*digits.span()), f"{value * 2:g}" if value else "1"
            case tree.Call(function=function):
                yield from ((node.name_span, new) for new in _FUNCTIONS.get(function, ()))
                for before, argument in pairwise(node.arguments):
                    if argument.name in ("then", "within"):
                        yield Span(before.span.end, argument.span.end), ""
                for argument in node.arguments:
                    if argument.where is not None:
                        yield Span(argument.value.span.end, argument.where.span.end), ""


def _nodes(node: Any) -> Iterator[tree.Node]:
    """*node* and all below it; what a parameter may be set to is no part of how it decides."""
    if isinstance(node, tuple):
        for item in node:
            yield from _nodes(item)
    elif isinstance(node, tree.Node) and not isinstance(node, tree.Range | tree.Choices):
        yield node
        assert is_dataclass(node)
        for field in fields(node):
            yield from _nodes(getattr(node, field.name))


class Trial:
    """Tries the mutants of one policy.

    Args:
        path: the policy.
        situations: how many are tried with each mutant.
    """

    def __init__(self, path: Path, situations: int = SITUATIONS) -> None:
        self._count = situations
        self._libraries = libraries_beside(path)
        self._beside = further_tests(path)
        self.source = path.read_text()
        self._policy = self._loaded(self.source)
        self._is_lottery = any(pick.family is Family.LOTTERY for pick in self._policy.picks)
        self._situations = list(SmallFleets(self._policy, VOCABULARY).draw(situations))
        self._told = [self._tell(self._policy, situation, POLICY_SEEDS) for situation in self._situations]

    def survives(self, mutant: Mutant) -> bool | None:
        """Whether nothing catches it; None where it is no mutant."""
        if mutant.is_number and self._is_lottery:
            return None  # it changes the odds, which no test can expect
        try:
            suite = suite_of(mutant.text, VOCABULARY, libraries=self._libraries, beside=self._beside)
        except PolicyError:
            return None
        changed = suite.policy
        pairs = zip(self._situations, self._told, strict=True)
        if all(self._tell(changed, situation, MUTANT_SEEDS) <= told for situation, told in pairs):
            return None
        if any(not result.passed for result in suite.run()):
            return False
        promises = promised(self._policy, VOCABULARY)
        return all(counterexample(changed, VOCABULARY, each, situations=self._count) is None for each in promises)

    def _loaded(self, text: str) -> Policy:
        return load(text, VOCABULARY, libraries=self._libraries)

    def _tell(self, policy: Policy, situation: Situation, seeds: int) -> set[tuple[str, str | None]]:
        """All that is decided, over some seeds."""
        decisions = [
            situation.decide(policy, VOCABULARY, seed=seed) for seed in range(seeds if policy.plan.random else 1)
        ]
        return {(decision.outcome.value, decision.instance) for decision in decisions}


def main() -> int:
    """Try all mutants of the policies named, and name those that nothing catches."""
    shipped = shipped_policies()
    tried = caught = 0
    for name in sys.argv[1:] or shipped:
        trial = Trial(shipped[name])
        verdicts = {mutant.change: trial.survives(mutant) for mutant in mutants(trial.source)}
        survivors = [change for change, survives in verdicts.items() if survives]
        real = sum(survives is not None for survives in verdicts.values())
        tried += real
        caught += real - len(survivors)
        said = f"{name}: {real - len(survivors)} of {real} caught ({len(verdicts) - real} decide alike or do not check)"
        sys.stdout.write("\n  ".join([said, *survivors]) + "\n")
    sys.stdout.write(f"{caught} of {tried} mutants caught\n")
    return 0 if caught == tried else 1


if __name__ == "__main__":
    sys.exit(main())
