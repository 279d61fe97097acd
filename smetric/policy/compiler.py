"""Plan to one Python function."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from smetric.policy.builtin import BUILTINS, drawn, drawn_of, highest, lowest, marked, rotated, stream_of
from smetric.policy.code import Asking, Code, Inputs, all_of, call, compare, item, listed, load
from smetric.policy.decision import Decision, Need
from smetric.policy.emitter import Emitter
from smetric.policy.plan import Op, Pick, Plan, Ref, Shape, StatementKind, Step, Term, features_of, fields_of
from smetric.policy.vocabulary import Vocabulary

_ARGUMENTS = ("policy", "snapshot", "req", "used", "seed")
#: What the code of every policy may call, by name.
_CALLABLE: dict[str, object] = {
    **{row.name: row.function for row in BUILTINS.values()},
    **{function.__name__: function for function in (enumerate, len, max, min, range, zip)},
    **{function.__name__: function for function in (drawn, rotated, drawn_of, highest, lowest, marked)},
    "Decision": Decision,
    "Need": Need,
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """The function of a policy, and what was learnt while writing it.

    Args:
        decide: `(policy, snapshot, request, cursors, seed) -> Decision | Need`.
        asked_by: for each look-up, the labels of the guards, filters and picks that may ask for it first.
    """

    decide: Callable[..., Any]
    asked_by: dict[str, tuple[str, ...]]


class Compiler:
    """Compiles a plan, once per instance.

    Args:
        plan: what to compute.
        vocabulary: features and request fields.
        text: the policy file.
        path: its name in tracebacks.
    """

    def __init__(self, plan: Plan, vocabulary: Vocabulary, text: str, path: str) -> None:
        self._plan = plan
        self._vocabulary = vocabulary
        self._path = path
        self._namespace: dict[str, object] = dict(_CALLABLE)
        for site, key in enumerate(plan.keys):
            self._namespace[f"key_{site}"] = key
            self._namespace[f"stream_{site}"] = stream_of(key)
        for site, key in enumerate(plan.draws):
            self._namespace[f"draw_{site}"] = stream_of(f"draw {key}")
        self._unknowable = frozenset(name for name, known in vocabulary.request.items() if known.may_be_unknown)
        self._code = Code(text, {*self._namespace, *_ARGUMENTS, "decide"})
        self._needs: dict[frozenset[str], str] = {}
        self._sure: dict[int, bool] = {}
        self._stops: list[ast.expr] = []
        self._left: list[str] = []
        self._emitter = self._emitter_for(outside_guards=[s.value for s in plan.steps if s.value is not None])

    def compile(self) -> Compiled:
        """The function that decides."""
        self._write_steps()
        decide: Any = self._code.function("decide", _ARGUMENTS, self._path, self._namespace)
        asked_by = {feature: tuple(labels) for feature, labels in self._emitter.inputs.asked_by.items()}
        return Compiled(decide, asked_by)

    def python(self) -> str:
        """The function that decides, as Python to read."""
        self._write_steps()
        return ast.unparse(self._code.module("decide", _ARGUMENTS))

    def _write_steps(self) -> None:
        for index, step in enumerate(self._plan.steps):
            self._code.span = step.span
            self._step(index, step)

    def probe(self, before: int, term: Term) -> Callable[..., Any]:
        """A function that computes *term* as step number *before* sees it, for explanations.

        It takes the arguments of `decide` and returns one value, or a list with one per candidate; None where a look-up
        is absent or a filter leaves nobody.
        """
        filters = [(index, step) for index, step in enumerate(self._plan.steps[:before]) if step.kind.is_filter]
        masks = [step.value for _, step in filters if step.value is not None]
        self._emitter = self._emitter_for(outside_guards=[term, *masks], absent=lambda _: ast.Constant(None))
        for index, step in filters:
            self._code.span = step.span
            self._filter(index, step, lambda: self._code.give(ast.Constant(None)))
        is_vector = term.shape is Shape.VECTOR
        self._code.give(load(self._emitter.vector(term)) if is_vector else self._emitter.scalar(term))
        function: Any = self._code.function("decide", _ARGUMENTS, self._path, self._namespace)
        return function  # type: ignore[no-any-return]

    def _emitter_for(
        self, outside_guards: Sequence[Term], absent: Callable[[frozenset[str]], ast.expr] | None = None
    ) -> Emitter:
        read = {name for term in outside_guards for name in fields_of(term)}
        inputs = Inputs(self._code, self._vocabulary, self._unknowable & read, absent or self._need)
        return Emitter(self._code, inputs)

    def _need(self, lookups: frozenset[str]) -> ast.expr:
        if lookups not in self._needs:
            self._needs[lookups] = self._code.name("need")
            self._namespace[self._needs[lookups]] = Need(lookups)
        return load(self._needs[lookups])

    def _ask(self, label: str, term: Term) -> None:
        lookups = frozenset(name for name in features_of(term) if self._vocabulary.features[name].lookup)
        self._emitter.inputs.asking = Asking(label, lookups)

    # ── steps ────────────────────────────────────────────────────────────────

    def _step(self, index: int, step: Step) -> None:
        if step.kind.is_filter:
            self._filter(index, step, lambda: self._decide(index))
            return
        stop = self._code.name(f"{step.label}_stop")
        passed = len(step.guards)

        def fire() -> None:
            if step.kind is StatementKind.REJECT:
                self._reject(index, step)
            elif step.kind is StatementKind.HOLD:
                assert step.value is not None
                self._decide(index, wait=self._emitter.scalar(step.value))
            else:
                assert step.value is not None
                self._ask(step.label, step.value)
                self._route(index, step.value)
            if not self._code.ended:
                self._code.assign(stop, ast.Constant(passed))

        self._guarded(step, stop, fire)
        self._stops.append(load(stop))

    def _guarded(self, step: Step, stop: str, fire: Callable[[], None], at: int = 0) -> None:
        """Write the guards from number *at* on: *fire* where all hold, else *stop* is how many did."""
        if at == len(step.guards):
            fire()
            return
        guard = step.guards[at]
        code = self._code

        def held() -> None:
            self._guarded(step, stop, fire, at + 1)

        def failed() -> None:
            code.assign(stop, ast.Constant(at))

        # A guard that reads an unknown number of the request fails.
        unknowable = sorted(fields_of(guard.value) & self._unknowable)
        known: list[ast.expr] = [
            compare(load(self._emitter.inputs.raw_field(name)), ast.IsNot(), ast.Constant(None)) for name in unknowable
        ]
        self._ask(guard.label, guard.value)
        branch = code.capture(lambda: self._emitter.scalar(guard.value))
        if not known:
            code.choose(code.adopt(branch), held, failed)
        elif not branch.body:
            code.choose(all_of([*known, branch.result]), held, failed)
        else:
            code.choose(all_of(known), lambda: code.choose(code.adopt(branch), held, failed), failed)

    def _filter(self, index: int, step: Step, nobody: Callable[[], None]) -> None:
        """Write a filter; *nobody* writes what follows when a `keep` leaves none."""
        code, emitter = self._code, self._emitter
        stop = code.name(f"{step.label}_stop")
        left = code.name(f"left_by_{step.label}")
        everybody = emitter.candidates(len(emitter.levels) - 1)

        def narrow() -> None:
            assert step.value is not None
            self._ask(step.label, step.value)
            mask = emitter.vector(step.value)
            i = code.name("i")
            those = code.name("those")
            code.assign(those, everybody)
            code.assign(left, listed(load(i), {i: those}, item(load(mask), load(i))))
            if step.kind is StatementKind.KEEP:
                code.assign(stop, ast.Constant(len(step.guards)))
                self._left.append(left)
                self._stops.append(load(stop))
                code.choose(ast.UnaryOp(op=ast.Not(), operand=load(left)), nobody)
                self._left.pop()
                self._stops.pop()
                return

            def ignored() -> None:
                code.assign(left, load(those))
                code.assign(stop, ast.Constant(-1))

            code.choose(load(left), lambda: code.assign(stop, ast.Constant(len(step.guards))), ignored)

        self._guarded(step, stop, narrow)
        if step.guards:
            code.once(left, lambda: code.assign(left, everybody))
        emitter.levels.append(left)
        self._left.append(left)
        self._stops.append(load(stop))

    def _reject(self, index: int, step: Step) -> None:
        retry: ast.expr = ast.Constant(None)
        if step.value is not None:
            self._ask(step.label, step.value)
            retry = call("max", ast.Constant(0.0), self._emitter.scalar(step.value))
        self._decide(index, retry=retry)

    def _route(self, index: int, term: Term) -> None:
        """Decide for a pick, where it is somebody."""
        picked = self._emitter.picked(term)

        def fire() -> None:
            self._decide(index, load(picked.index), load(picked.score), load(picked.site))

        if self._certain(term):
            fire()
        else:
            self._code.choose(compare(load(picked.index), ast.GtE(), ast.Constant(0)), fire)

    def _certain(self, term: Term) -> bool:
        """Whether a pick is somebody in any case."""
        while isinstance(term, Ref):
            term = term.binding.value
        if isinstance(term, Pick):
            return term.where is None
        assert isinstance(term, Op)
        if id(term) not in self._sure:
            condition, then, otherwise = term.operands
            asked = isinstance(condition, Op) and condition.op == "somebody" and condition.operands[0] is then
            self._sure[id(term)] = (asked or self._certain(then)) and self._certain(otherwise)
        return self._sure[id(term)]

    def _decide(
        self,
        index: int,
        pick: ast.expr | None = None,
        score: ast.expr | None = None,
        site: ast.expr | None = None,
        retry: ast.expr | None = None,
        wait: ast.expr | None = None,
    ) -> None:
        """Return a decision of step *index*."""
        step = self._plan.steps[index]
        stops = list(self._stops)
        if len(stops) == index:
            stops.append(ast.Constant(len(step.guards)))
        nobody = ast.Constant(None)
        self._code.give(
            call(
                "Decision",
                *(load(name) for name in _ARGUMENTS),
                ast.Constant(index),
                ast.Constant(-1) if pick is None else pick,
                ast.Tuple(elts=stops, ctx=ast.Load()),
                ast.Tuple(elts=[load(name) for name in self._left], ctx=ast.Load()),
                score or nobody,
                site or ast.Constant(-1),
                retry or nobody,
                *(() if wait is None else (wait,)),
            )
        )
