"""Python code under construction as `ast` nodes, and the code that reads the inputs of a decision."""

from __future__ import annotations

import ast
import bisect
import keyword
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from smetric.policy.diagnostic import Span
from smetric.policy.vocabulary import Vocabulary

# Python code being written as `ast` nodes: the current block, and which local variables are set at this point.
#
# Every node carries a place in the policy file, so that tracebacks and profilers point there. What the code computes is
# not known here.

T = TypeVar("T")

#: Statements of one function at most. What both ways of a branch need is written in both, so a file within its bounds
#: could still double at every step.
MAX_STATEMENTS = 4000


class TooLargeError(Exception):
    """The function would have more than `MAX_STATEMENTS`, or nest deeper than Python can compile."""


def load(name: str) -> ast.Name:
    """Read a variable."""
    return ast.Name(id=name, ctx=ast.Load())


def store(name: str) -> ast.Name:
    """Set a variable."""
    return ast.Name(id=name, ctx=ast.Store())


def call(function: str, *arguments: ast.expr) -> ast.Call:
    """`function(arguments)`."""
    return ast.Call(func=load(function), args=list(arguments), keywords=[])


def method(owner: ast.expr, name: str, *arguments: ast.expr) -> ast.Call:
    """`owner.name(arguments)`."""
    return ast.Call(func=attribute(owner, name), args=list(arguments), keywords=[])


def attribute(owner: ast.expr, name: str) -> ast.Attribute:
    """`owner.name`."""
    return ast.Attribute(value=owner, attr=name, ctx=ast.Load())


def item(owner: ast.expr, index: ast.expr) -> ast.Subscript:
    """`owner[index]`."""
    return ast.Subscript(value=owner, slice=index, ctx=ast.Load())


def compare(left: ast.expr, op: ast.cmpop, right: ast.expr) -> ast.Compare:
    """`left op right`."""
    return ast.Compare(left=left, ops=[op], comparators=[right])


def is_none(value: ast.expr) -> ast.Compare:
    """`value is None`."""
    return compare(value, ast.Is(), ast.Constant(None))


def all_of(conditions: list[ast.expr]) -> ast.expr:
    """Their conjunction; at least one is given."""
    return conditions[0] if len(conditions) == 1 else ast.BoolOp(op=ast.And(), values=conditions)


def listed(element: ast.expr, sources: dict[str, str], condition: ast.expr | None = None) -> ast.ListComp:
    """`[element for names in zip(lists) if condition]`; *sources* maps each name to its list, and has one at least."""
    names, lists = [store(name) for name in sources], [load(source) for source in sources.values()]
    if len(names) == 1:
        target: ast.expr = names[0]
        over: ast.expr = lists[0]
    else:
        target = ast.Tuple(elts=list(names), ctx=ast.Store())
        over = call("zip", *lists)
    conditions = [] if condition is None else [condition]
    return ast.ListComp(
        elt=element, generators=[ast.comprehension(target=target, iter=over, ifs=conditions, is_async=0)]
    )


def _place(statement: ast.AST, start: tuple[int, int], end: tuple[int, int]) -> None:
    """Set where a statement and its expressions stand, lines from 1 and columns in bytes from 0; blocks have theirs."""
    pending: list[Any] = [statement]  # of any kind of node; what has no place gets one nobody asks for
    while pending:
        node = pending.pop()
        node.lineno, node.col_offset = start
        node.end_lineno, node.end_col_offset = end
        for name in node._fields:
            value = getattr(node, name, None)  # a list that was not given is missing on 3.12, and empty on 3.13
            if isinstance(value, ast.expr):
                pending.append(value)
            elif isinstance(value, list):
                pending += [each for each in value if not isinstance(each, ast.stmt)]


@dataclass(slots=True)
class Branch(Generic[T]):
    """A block that may still be thrown away, continued or adopted; `result` is what writing it gave."""

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
        #: Local variables: True where every way to this point sets them, False where only some do.
        self.state: dict[str, bool] = {}
        #: Whether no way leads past this point.
        self.ended = False
        self.span = Span(0, 0)
        self._text = text
        self._starts = [0, *(found.end() for found in re.finditer("\n", text))]
        self._taken = {*reserved, *keyword.kwlist, "__debug__"}  # Python lets nobody set the last one either
        self._optional: set[str] = set()
        self._statements = 0

    def name(self, hint: str) -> str:
        """A new variable, called *hint* or much like it."""
        name = hint.replace(".", "_")
        if name in self._taken:
            ordinal = 2
            while f"{name}_{ordinal}" in self._taken:
                ordinal += 1
            name = f"{name}_{ordinal}"
        self._taken.add(name)
        return name

    def add(self, statement: ast.stmt) -> None:
        """Append a statement, placed at the current span with its expressions."""
        self._statements += 1
        if self._statements > MAX_STATEMENTS:
            raise TooLargeError
        _place(statement, self._position(self.span.start), self._position(self.span.end))
        self.body.append(statement)

    def assign(self, name: str, value: ast.expr) -> None:
        """`name = value`."""
        self.add(ast.Assign(targets=[store(name)], value=value))
        self.state[name] = True

    def unpack(self, names: Sequence[str], value: ast.expr) -> None:
        """`a, b = value`."""
        target = ast.Tuple(elts=[store(name) for name in names], ctx=ast.Store())
        self.add(ast.Assign(targets=[target], value=value))
        self.state.update(dict.fromkeys(names, True))

    def give(self, value: ast.expr) -> None:
        """`return value`."""
        self.add(ast.Return(value=value))
        self.ended = True

    def once(self, name: str, write: Callable[[], None]) -> None:
        """Make sure that *name* is set: *write* sets it, where it may not be set yet."""
        state = self.state.get(name)
        if state is None:
            write()
        elif not state:
            self._optional.add(name)
            self.choose(is_none(load(name)), write)
            self.state[name] = True

    def capture(self, write: Callable[[], T]) -> Branch[T]:
        """Write a block aside."""
        return self._aside(Branch(None, [], dict(self.state), False), write)

    def resume(self, branch: Branch[T], write: Callable[[T], None]) -> Branch[None]:
        """Write on in a block that was captured."""
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
        """`if` of two captured blocks; afterwards a variable is set where both set it."""
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

    def named(self, value: ast.expr, hint: str = "x") -> str:
        """The variable that *value* is, else a new one that holds it."""
        if isinstance(value, ast.Name):
            return value.id
        name = self.name(hint)
        self.assign(name, value)
        return name

    def atomic(self, value: ast.expr, hint: str = "x") -> ast.expr:
        """*value* as a constant or a variable."""
        return value if isinstance(value, ast.Constant) else load(self.named(value, hint))

    def lazily(self, condition: ast.expr, then: Callable[[], ast.expr], otherwise: Callable[[], ast.expr]) -> ast.expr:
        """`then if condition else otherwise`, where only the side taken is computed."""
        first, second = self.capture(then), self.capture(otherwise)
        if not first.body and not second.body:
            return ast.IfExp(test=condition, body=first.result, orelse=second.result)
        return self._joined(condition, first, second)

    def short_circuit(self, op: str, left: ast.expr, right: Callable[[], ast.expr]) -> ast.expr:
        """`left and right` or `left or right`, where *right* is computed only if *left* does not settle it."""
        branch = self.capture(right)
        if not branch.body:
            return ast.BoolOp(op=ast.And() if op == "and" else ast.Or(), values=[left, branch.result])
        settled: Branch[ast.expr] = self.capture(lambda: ast.Constant(op == "or"))
        first, second = (branch, settled) if op == "and" else (settled, branch)
        return self._joined(left, first, second)

    def function(self, name: str, arguments: Iterable[str], path: str, namespace: dict[str, object]) -> object:
        """Compile what was written; *namespace* holds what it calls."""
        exec(compile(self.module(name, arguments), path, "exec"), namespace)
        return namespace[name]

    def module(self, name: str, arguments: Iterable[str]) -> ast.Module:
        """What was written, as a module with one function."""
        optional: list[ast.stmt] = [
            ast.Assign(targets=[store(name)], value=ast.Constant(None)) for name in sorted(self._optional)
        ]
        top = (1, 0)
        definition = ast.FunctionDef(
            name=name,
            args=ast.arguments(
                posonlyargs=[], args=[ast.arg(arg=a) for a in arguments], kwonlyargs=[], kw_defaults=[], defaults=[]
            ),
            body=optional + self.body,
            decorator_list=[],
        )
        for node in (definition, *definition.args.args, *optional):
            _place(node, top, top)
        return ast.Module(body=[definition], type_ignores=[])

    def _joined(self, condition: ast.expr, first: Branch[ast.expr], second: Branch[ast.expr]) -> ast.expr:
        name = self.name("x")
        self.join(
            condition,
            self.resume(first, lambda value: self.assign(name, value)),
            self.resume(second, lambda value: self.assign(name, value)),
        )
        return load(name)

    def _aside(self, start: Branch[Any], write: Callable[[], T]) -> Branch[T]:
        outer = self.body, self.state, self.ended
        self.body, self.state, self.ended = start.body, start.state, start.ended
        try:
            result = write()
            return Branch(result, self.body, self.state, self.ended)
        finally:
            self.body, self.state, self.ended = outer

    def _position(self, offset: int) -> tuple[int, int]:
        """Line from 1 and column in UTF-8 bytes from 0, as `ast` counts."""
        line = bisect.bisect_right(self._starts, offset)
        return line, len(self._text[self._starts[line - 1] : offset].encode())


# Writes the code that reads a decision's inputs, each at most once: columns of the snapshot, fields of the request.
#
# A look-up that the snapshot lacks ends the evaluation there, with what is to be fetched.


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
