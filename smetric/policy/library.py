"""Libraries of a policy: found by name, parsed once, checked for how they use each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from smetric.policy import tree
from smetric.policy.diagnostic import Diagnostic, PolicyError, PolicyText, Span
from smetric.policy.parser import read

#: Libraries of one policy, those of its libraries included.
MAX_LIBRARIES = 16

#: Returns the text of `NAME.policy` beside the policy; None if there is no such file.
#: Raises `OSError` or `ValueError` with the reason if the file cannot be read.
Reader = Callable[[str], PolicyText | None]


def no_libraries(_: str) -> None:
    """Return None: the reader of a policy without libraries."""


@dataclass(slots=True)
class Linked:
    """Libraries of a policy.

    Args:
        files: the libraries by name.
        targets: the library of each `use`, by the statement's identity; a `use` with an error has none.
        errors: the errors of files and uses, each with its source.
    """

    files: dict[str, tree.File] = field(default_factory=dict)
    targets: dict[int, str] = field(default_factory=dict)
    errors: list[Diagnostic] = field(default_factory=list)


def taken(file: tree.File) -> set[tuple[str, str]]:
    """Return the names that *file* takes, each with its library first."""
    uses = (statement for statement in file.statements if isinstance(statement, tree.Use))
    return {(use.library.name, name.name) for use in uses for name in use.names}


def link(file: tree.File, reader: Reader) -> Linked:
    """Read and parse all libraries that *file* uses, directly or not."""
    linked = Linked()
    _follow(file, None, (file.name,), reader, linked)
    return linked


def _follow(
    file: tree.File, source: PolicyText | None, path: Sequence[str], reader: Reader, linked: Linked
) -> None:  # fmt: skip
    """Link the libraries of *file*, reached over *path*; *source* is None for the policy."""
    for statement in file.statements:
        if not isinstance(statement, tree.Use):
            continue
        name = statement.library.name

        def fail(message: str, help_text: str = "", place: Span = statement.library.span) -> None:
            linked.errors.append(Diagnostic("use", message, place, help_text, source=source))

        if name in path:
            circle = " → ".join([*path[path.index(name) :], name])
            fail(f"these files use each other: {circle}", "move what they share into a library of its own")
            continue
        if name not in linked.files:
            if len(linked.files) == MAX_LIBRARIES:
                fail(f"a policy uses at most {MAX_LIBRARIES} libraries")
                continue
            found = _found(name, reader, fail)
            if found is None:
                continue
            linked.files[name] = found[0]
            linked.errors += found[1]
            own = PolicyText(found[0].text, found[0].path)
            _follow(found[0], own, (*path, name), reader, linked)
        linked.targets[id(statement)] = name


def _found(name: str, reader: Reader, fail: Callable[..., None]) -> tuple[tree.File, list[Diagnostic]] | None:
    """Return the library *name* and its syntax errors; None, and an error, if there is none."""
    try:
        source = reader(name)
    except (OSError, ValueError) as error:
        fail(f"{name}.policy cannot be read: {getattr(error, 'strerror', None) or error}")
        return None
    if source is None:
        fail(f"there is no {name}.policy beside this file", f"it would start with `library {name}`")
        return None
    try:
        file, errors = read(source.text, source.path)
    except PolicyError as error:
        fail(f"{name}.policy cannot be read: {error.diagnostics[0].message}")
        return None
    if file.kind != "library":
        fail(f"`{name}` is a policy; only a library can be used", "move what they share into a library")
        return None
    if file.name != name:
        fail(f"{name}.policy says that it is `library {file.name}`", "a library has the name of its file")
        return None
    return file, [found.within(source) for found in errors]
