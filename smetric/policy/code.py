"""Python function under construction, as `ast` nodes that carry their places in the policy file."""

from __future__ import annotations

import ast
import bisect
import functools
import keyword
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from smetric.policy.diagnostic import Span

T = TypeVar("T")

#: Limit on the statements of one function. Code that both branches of an `if` need is written in both, so a file
#: within its own bounds could still double at every step.
MAX_STATEMENTS = 4000


class TooLargeError(Exception):
    """The function would have more than `MAX_STATEMENTS`."""


def load(name: str) -> ast.Name:
    """A variable, read."""
    return ast.Name(id=name, ctx=ast.Load())


def call(function: str, *arguments: ast.expr | str) -> ast.Call:
    """`function(arguments)`; a text is the name of a variable."""
    return ast.Call(func=load(function), args=[load(a) if isinstance(a, str) else a for a in arguments], keywords=[])


def quote(template: str, **parts: ast.expr | str) -> ast.expr:
    """The expression *template*, in which each name of *parts* is replaced by its expression, or by another name.

    An expression that is named twice is evaluated twice.
    """
    made: ast.expr = _filled(_parsed(template), parts)
    return made


@functools.lru_cache(maxsize=256)
def _parsed(template: str) -> ast.expr:
    return ast.parse(template, mode="eval").body


def _filled(node: Any, parts: dict[str, ast.expr | str]) -> Any:
    """A copy of *node*; names are always copied, because a node has one place."""
    if isinstance(node, list):
        return [_filled(each, parts) for each in node]
    if isinstance(node, ast.Name):
        part = parts.get(node.id, node.id)
        name = part.id if isinstance(part, ast.Name) else part
        return ast.Name(id=name, ctx=node.ctx) if isinstance(name, str) else name
    if not isinstance(node, ast.AST) or not node._fields:
        return node
    return type(node)(**{name: _filled(getattr(node, name), parts) for name in node._fields})


def listed(element: ast.expr, sources: dict[str, str], condition: ast.expr | None = None) -> ast.expr:
    """`[element for names in zip(lists) if condition]`; *sources* maps each name to its list, and is not empty."""
    names = {f"x{i}": name for i, name in enumerate(sources)}
    lists = {f"v{i}": name for i, name in enumerate(sources.values())}
    over = f"zip({', '.join(lists)})" if len(lists) > 1 else "v0"
    if condition is None:
        return quote(f"[e for {', '.join(names)} in {over}]", e=element, **names, **lists)
    return quote(f"[e for {', '.join(names)} in {over} if c]", e=element, c=condition, **names, **lists)


@dataclass(slots=True)
class Branch(Generic[T]):
    """A block written aside, which may be dropped, continued or adopted; `result` is that of writing it."""

    result: T
    body: list[ast.stmt]
    state: dict[str, bool]
    ended: bool


class Code:
    """A function body.

    Args:
        text: the policy file.
        reserved: names that no local variable may take.
    """

    def __init__(self, text: str, reserved: Iterable[str]) -> None:
        self.body: list[ast.stmt] = []
        #: Local variables: True if they are set on every path to this point, False if only on some.
        self.state: dict[str, bool] = {}
        #: Whether every path has returned.
        self.ended = False
        #: The place of the next statements.
        self.span = Span(0, 0)
        self._text = text
        self._starts = [0, *(found.end() for found in re.finditer("\n", text))]
        self._taken = {*reserved, *keyword.kwlist, "__debug__"}  # Python forbids setting `__debug__`
        self._optional: set[str] = set()
        self._statements = 0

    @contextmanager
    def at(self, span: Span) -> Iterator[None]:
        """Place the statements of this block at *span*."""
        outer, self.span = self.span, span
        yield
        self.span = outer

    def name(self, hint: str) -> str:
        """A new variable, called *hint* or much like it."""
        name, ordinal = hint.replace(".", "_"), 2
        if name in self._taken:
            while f"{name}_{ordinal}" in self._taken:
                ordinal += 1
            name = f"{name}_{ordinal}"
        self._taken.add(name)
        return name

    def add(self, statement: ast.stmt) -> None:
        """Append a statement; it and its expressions get the current place."""
        self._statements += 1
        if self._statements > MAX_STATEMENTS:
            raise TooLargeError
        start, end = self._position(self.span.start), self._position(self.span.end)
        pending: list[Any] = [statement]
        while pending:
            node = pending.pop()
            (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset) = start, end
            # The statements of a block have their own places.
            pending += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]
        self.body.append(statement)

    def assign(self, name: str, value: ast.expr) -> None:
        """`name = value`."""
        self.add(ast.Assign(targets=[ast.Name(id=name, ctx=ast.Store())], value=value))
        self.state[name] = True

    def unpack(self, names: Sequence[str], value: ast.expr) -> None:
        """`a, b = value`."""
        target = ast.Tuple(elts=[ast.Name(id=name, ctx=ast.Store()) for name in names], ctx=ast.Store())
        self.add(ast.Assign(targets=[target], value=value))
        self.state.update(dict.fromkeys(names, True))

    def give(self, value: ast.expr) -> None:
        """`return value`."""
        self.add(ast.Return(value=value))
        self.ended = True

    def once(self, name: str, write: Callable[[], None]) -> None:
        """Ensure that *name* is set: *write* sets it, unless it is set already."""
        state = self.state.get(name)
        if state is None:
            write()
        elif not state:
            self._optional.add(name)
            self.choose(quote("x is None", x=name), write)
            self.state[name] = True

    # ── branches ─────────────────────────────────────────────────────────────

    def capture(self, write: Callable[[], T]) -> Branch[T]:
        """Write a block aside."""
        return self._aside(Branch(None, [], dict(self.state), False), write)

    def resume(self, branch: Branch[T], write: Callable[[T], None]) -> Branch[None]:
        """Continue a captured block."""
        return self._aside(branch, lambda: write(branch.result))

    def adopt(self, branch: Branch[T]) -> T:
        """Append a captured block here."""
        self.body += branch.body
        self.state = branch.state
        self.ended = branch.ended
        return branch.result

    def choose(
        self, condition: ast.expr, then: Callable[[], None], otherwise: Callable[[], None] = lambda: None
    ) -> None:
        """`if condition: then else: otherwise`."""
        self.join(condition, self.capture(then), self.capture(otherwise))

    def join(self, condition: ast.expr, then: Branch[None], otherwise: Branch[None]) -> None:
        """`if` of two captured blocks; afterwards a variable is set if both set it."""
        if not then.body and otherwise.body:
            condition = ast.UnaryOp(op=ast.Not(), operand=condition)
            then, otherwise = otherwise, then
        if not then.body:
            return
        self.add(ast.If(test=condition, body=then.body, orelse=otherwise.body))
        self.ended = then.ended and otherwise.ended
        if then.ended or otherwise.ended:
            self.state = (otherwise if then.ended else then).state
        else:
            first, second = then.state, otherwise.state
            self.state = {name: first.get(name, False) and second.get(name, False) for name in first | second}

    def lazily(self, condition: ast.expr, then: Callable[[], ast.expr], otherwise: Callable[[], ast.expr]) -> ast.expr:
        """`then if condition else otherwise`; only the branch taken is computed."""
        first, second = self.capture(then), self.capture(otherwise)
        if not first.body and not second.body:
            return quote("a if c else b", c=condition, a=first.result, b=second.result)
        return self._joined(condition, first, second)

    def short_circuit(self, op: str, left: ast.expr, right: Callable[[], ast.expr]) -> ast.expr:
        """`left and right` or `left or right`; *right* is computed only if *left* does not determine the result."""
        branch = self.capture(right)
        if not branch.body:
            return quote(f"left {op} right", left=left, right=branch.result)
        settled: Branch[ast.expr] = self.capture(lambda: ast.Constant(op == "or"))
        first, second = (branch, settled) if op == "and" else (settled, branch)
        return self._joined(left, first, second)

    def named(self, value: ast.expr, hint: str = "x") -> str:
        """The variable that *value* is, else a new one that holds it."""
        if isinstance(value, ast.Name):
            return value.id
        name = self.name(hint)
        self.assign(name, value)
        return name

    def atomic(self, value: ast.expr, hint: str = "x") -> ast.expr:
        """*value* as a constant or a variable, which can be read twice."""
        return value if isinstance(value, ast.Constant) else load(self.named(value, hint))

    def _joined(self, condition: ast.expr, first: Branch[ast.expr], second: Branch[ast.expr]) -> ast.expr:
        name = self.name("x")

        def set_it(value: ast.expr) -> None:
            self.assign(name, value)

        self.join(condition, self.resume(first, set_it), self.resume(second, set_it))
        return load(name)

    def _aside(self, start: Branch[Any], write: Callable[[], T]) -> Branch[T]:
        outer = self.body, self.state, self.ended
        self.body, self.state, self.ended = start.body, start.state, start.ended
        try:
            return Branch(write(), self.body, self.state, self.ended)
        finally:
            self.body, self.state, self.ended = outer

    # ── the function ─────────────────────────────────────────────────────────

    def module(self, name: str, arguments: Iterable[str]) -> ast.Module:
        """A module with the function *name*."""
        optional = "; ".join(f"{each} = None" for each in sorted(self._optional))
        module = ast.parse(f"def {name}({', '.join(arguments)}): {optional or 'pass'}")
        function = module.body[0]
        assert isinstance(function, ast.FunctionDef)
        function.body = [*(function.body if optional else []), *self.body]
        return module

    def _position(self, offset: int) -> tuple[int, int]:
        """Line from 1 and column in UTF-8 bytes from 0, as `ast` counts."""
        line = bisect.bisect_right(self._starts, offset)
        return line, len(self._text[self._starts[line - 1] : offset].encode())
