"""Plan to one Python function."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

from smetric.policy.builtin import BUILTINS, drawn, drawn_of, highest, lowest, marked, rotated, stream_of
from smetric.policy.code import Code, call, load, quote
from smetric.policy.decision import Decision, Need
from smetric.policy.emitter import Emitter
from smetric.policy.plan import Op, Outcome, Pick, Plan, Ref, Shape, Step, Term, features_of, fields_of
from smetric.policy.vocabulary import Vocabulary

_ARGUMENTS = ("policy", "snapshot", "req", "used", "seed")
#: The functions that compiled policies may call, by name.
_CALLABLE: dict[str, object] = {
    **{row.name: row.function for row in BUILTINS.values()},
    **{function.__name__: function for function in (enumerate, len, max, min, range, zip)},
    **{function.__name__: function for function in (drawn, rotated, drawn_of, highest, lowest, marked)},
    "Decision": Decision,
    "Need": Need,
}


class Compiler:
    """Compiles a plan, once per instance.

    Args:
        plan: the policy, resolved.
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
        #: The variables of the stops and of the candidates left, for the steps written so far.
        self._stops: list[str] = []
        self._left: list[str] = []
        self._emitter = self._emitter_for(outside_guards=[s.value for s in plan.steps if s.value is not None])

    def compile(self) -> Callable[..., Any]:
        """The function that decides: `(policy, snapshot, request, cursors, seed) -> Decision | Need`."""
        self._write_steps()
        return self._function()

    @property
    def asked_by(self) -> dict[str, list[str]]:
        """For each look-up, the labels of the guards, filters and picks that may ask for it first."""
        return self._emitter.asked_by

    def python(self) -> str:
        """The text of the function that decides."""
        self._write_steps()
        return ast.unparse(self._code.module("decide", _ARGUMENTS))

    def _write_steps(self) -> None:
        for index, step in enumerate(self._plan.steps):
            self._code.span = step.span
            self._step(index, step)

    def probe(self, before: int, term: Term) -> Callable[..., Any]:
        """A function that computes *term* as step number *before* sees it, for explanations.

        It takes the arguments of `decide` and returns one value, or a list with one value per candidate. It returns
        None if a look-up is absent or a filter leaves no candidate.
        """
        filters = [(index, step) for index, step in enumerate(self._plan.steps[:before]) if step.is_filter]
        masks = [step.value for _, step in filters if step.value is not None]
        self._emitter = self._emitter_for(outside_guards=[term, *masks], absent=lambda _: ast.Constant(None))
        for index, step in filters:
            self._code.span = step.span
            self._filter(index, step, lambda: self._code.give(ast.Constant(None)))
        is_vector = term.shape is Shape.VECTOR
        self._code.give(load(self._emitter.vector(term)) if is_vector else self._emitter.scalar(term))
        return self._function()

    def _function(self) -> Callable[..., Any]:
        exec(compile(self._code.module("decide", _ARGUMENTS), self._path, "exec"), self._namespace)
        decide: Any = self._namespace["decide"]
        return decide  # type: ignore[no-any-return]

    def _emitter_for(
        self, outside_guards: Sequence[Term], absent: Callable[[frozenset[str]], ast.expr] | None = None
    ) -> Emitter:
        read = {name for term in outside_guards for name in fields_of(term)}
        return Emitter(self._code, self._vocabulary, self._unknowable & read, absent or self._need)

    def _need(self, lookups: frozenset[str]) -> ast.expr:
        if lookups not in self._needs:
            self._needs[lookups] = self._code.name("need")
            self._namespace[self._needs[lookups]] = Need(lookups)
        return load(self._needs[lookups])

    def _ask(self, label: str, term: Term) -> None:
        lookups = frozenset(name for name in features_of(term) if self._vocabulary.features[name].lookup)
        self._emitter.asking = (label, lookups)

    # ── steps ────────────────────────────────────────────────────────────────

    def _step(self, index: int, step: Step) -> None:
        if step.is_filter:
            self._filter(index, step, lambda: self._decide(index))
            return
        code, value = self._code, step.value
        stop = code.name(f"{step.label}_stop")

        def fire() -> None:
            if step.outcome is Outcome.ROUTE:
                assert value is not None
                self._ask(step.label, value)
                self._route(index, value)
            elif step.outcome is Outcome.HOLD:
                assert value is not None
                self._decide(index, wait=self._emitter.scalar(value))
            elif value is None:
                self._decide(index)
            else:
                self._ask(step.label, value)
                self._decide(index, retry=call("max", ast.Constant(0.0), self._emitter.scalar(value)))
            if not code.ended:
                code.assign(stop, ast.Constant(len(step.guards)))

        self._guarded(step, stop, fire)
        self._stops.append(stop)

    def _guarded(self, step: Step, stop: str, fire: Callable[[], None], at: int = 0) -> None:
        """Write the guards from number *at* on: *fire* if all hold, else set *stop* to the number that do."""
        if at == len(step.guards):
            fire()
            return
        guard = step.guards[at]
        code = self._code

        def held() -> None:
            self._guarded(step, stop, fire, at + 1)

        def failed() -> None:
            code.assign(stop, ast.Constant(at))

        # A guard that reads an unknown request field fails.
        unknowable = sorted(fields_of(guard.value) & self._unknowable)
        known: list[ast.expr] = [quote("x is not None", x=self._emitter.raw_field(name)) for name in unknowable]
        self._ask(guard.label, guard.value)
        branch = code.capture(lambda: self._emitter.scalar(guard.value))
        if not known:
            code.choose(code.adopt(branch), held, failed)
        elif not branch.body:
            code.choose(ast.BoolOp(op=ast.And(), values=[*known, branch.result]), held, failed)
        else:
            all_known = known[0] if len(known) == 1 else ast.BoolOp(op=ast.And(), values=known)
            code.choose(all_known, lambda: code.choose(code.adopt(branch), held, failed), failed)

    def _filter(self, index: int, step: Step, nobody: Callable[[], None]) -> None:
        """Write a filter; *nobody* writes the statements for a `keep` that leaves no candidate."""
        code, emitter = self._code, self._emitter
        stop = code.name(f"{step.label}_stop")
        left = code.name(f"left_by_{step.label}")
        before = emitter.candidates(len(emitter.levels) - 1)

        def narrow() -> None:
            assert step.value is not None
            self._ask(step.label, step.value)
            mask = emitter.vector(step.value)
            i = code.name("i")
            those = code.name("those")
            code.assign(those, before)
            code.assign(left, quote("[i for i in those if mask[i]]", i=i, those=those, mask=mask))
            if step.outcome is Outcome.NO_CANDIDATE:
                code.assign(stop, ast.Constant(len(step.guards)))
                self._left.append(left)
                self._stops.append(stop)
                code.choose(quote("not left", left=left), nobody)
                self._left.pop()
                self._stops.pop()
                return

            def ignored() -> None:
                code.assign(left, load(those))
                code.assign(stop, ast.Constant(-1))

            code.choose(load(left), lambda: code.assign(stop, ast.Constant(len(step.guards))), ignored)

        self._guarded(step, stop, narrow)
        if step.guards:
            code.once(left, lambda: code.assign(left, before))
        emitter.levels.append(left)
        self._left.append(left)
        self._stops.append(stop)

    def _route(self, index: int, term: Term) -> None:
        """Decide for a pick, if it has a candidate."""
        picked = self._emitter.picked(term)

        def fire() -> None:
            self._decide(index, pick=picked.index, score=picked.score, site=picked.site)

        if self._certain(term):
            fire()
        else:
            self._code.choose(quote("x >= 0", x=picked.index), fire)

    def _certain(self, term: Term) -> bool:
        """Whether a pick has a candidate in any case."""
        while isinstance(term, Ref):
            term = term.binding.value
        if isinstance(term, Pick):
            return term.where is None
        assert isinstance(term, Op)
        if id(term) not in self._sure:
            condition, then, otherwise = term.operands
            asked = isinstance(condition, Op) and condition.op == "chosen" and condition.operands[0] is then
            self._sure[id(term)] = (asked or self._certain(then)) and self._certain(otherwise)
        return self._sure[id(term)]

    def _decide(self, index: int, **given: ast.expr | str) -> None:
        """Return a decision of step *index*; *given* replaces the arguments of one that routes nowhere."""
        step = self._plan.steps[index]
        stops: list[ast.expr] = [load(stop) for stop in self._stops]
        if len(stops) == index:
            stops.append(ast.Constant(len(step.guards)))
        left: list[ast.expr] = [load(name) for name in self._left]
        template = f"Decision(policy, snapshot, req, used, seed, {index}, pick, stops, left, score, site, retry, wait)"
        arguments = {"pick": quote("-1"), "score": quote("None"), "site": quote("-1"), "retry": quote("None")}
        arguments |= {"stops": ast.Tuple(elts=stops, ctx=ast.Load()), "left": ast.Tuple(elts=left, ctx=ast.Load())}
        self._code.give(quote(template, **{**arguments, "wait": quote("0.0"), **given}))
