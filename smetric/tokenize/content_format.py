"""Whether a chat template reads a message's content as a list of parts or as one text, told from its syntax tree.

vLLM decides so (`--chat-template-content-format auto`) and this follows it (`renderers/hf.py`, 0.32): a template takes
parts if it loops over the content of a message, directly, through a variable, or through an argument of a macro.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes


def takes_parts(root: nodes.Template) -> bool:
    """Whether the template *root* is given parts."""
    messages = set(_messages(root))
    arguments = {id(loop): names for loop, names in _macro_loops(root, messages)}
    for loop in root.find_all(nodes.For):
        if any(_reaches(loop.iter, message, "content") for message in messages):
            return True
        if isinstance(loop.iter, nodes.Name):
            taken = arguments.get(id(loop))
            if loop.iter.name in taken if taken is not None else loop.iter.name == "content":
                return True
    return False


def _messages(root: nodes.Template) -> Iterator[str]:
    """Names of the variables that loops over the messages set."""
    lists = ["messages"]
    for known in lists:  # grows while it is walked
        for assigned in root.find_all(nodes.Assign):
            target = assigned.target
            if isinstance(target, nodes.Name) and target.name not in lists and _reaches(assigned.node, known):
                lists.append(target.name)
    for loop in root.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name) and any(_reaches(loop.iter, name) for name in lists):
            yield loop.target.name


def _macro_loops(root: nodes.Template, messages: set[str]) -> Iterator[tuple[nodes.For, set[str]]]:
    """The loops in macros, each with the macro's arguments that are given a message's content somewhere."""
    for macro in root.find_all(nodes.Macro):
        names: list[str] = [argument.name for argument in macro.args]
        given: set[str] = set()
        for call in root.find_all(nodes.Call):
            if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
                continue
            passed = [*zip(names, call.args, strict=False)]
            passed += [(keyword.key, keyword.value) for keyword in call.kwargs if isinstance(keyword, nodes.Keyword)]
            given |= {
                name
                for name, value in passed
                if name in names and any(_reaches(value, message, "content") for message in messages)
            }
        for loop in macro.find_all(nodes.For):
            yield loop, given


def _reaches(node: nodes.Node | None, variable: str, key: str = "") -> bool:
    """Whether *node* is *variable* or, with *key*, that item of it; filtered, tested or sliced as it may be."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key:
        if isinstance(node, nodes.Getitem):
            found = isinstance(node.arg, nodes.Const) and node.arg.value == key
        else:
            found = isinstance(node, nodes.Getattr) and node.attr == key
        if not found:
            return False
        assert isinstance(node, nodes.Getitem | nodes.Getattr)
        node = node.node
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == variable
