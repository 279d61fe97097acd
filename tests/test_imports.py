"""Directions of imports between and within rooms."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "smetric"

#: The rooms from the top down. Rooms on one line do not import each other.
FLOORS = (
    {"__main__"},
    {"cli"},
    {"app", "lab", "tools", "doctor"},
    {"admin", "proxy"},
    {"routing", "telemetry", "records"},
    {"sources"},
    {"fleet"},
    {"request"},
    {"features"},
    {"policy", "config", "http"},
    {"files"},
    {"errors", "names", "log_limit"},
)
#: The doctor and the demo build a whole router.
EXCEPTIONS = {("doctor", "app"), ("lab", "app")}
#: The only packages that `policy` and `http` import, so that each can be used alone.
ALONE = {"policy": {"policy"}, "http": {"http", "errors", "files", "names", "log_limit"}}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def room_of(module: str) -> str:
    """`smetric.policy.tree` → `policy`; the package itself → an empty text."""
    return module.partition(".")[2].partition(".")[0]


def imported(path: Path, *, for_types: bool = True) -> Iterator[tuple[int, str]]:
    """Line and name of every module of the package that the file imports, also in functions."""
    tree = ast.parse(path.read_text(), str(path))
    skipped: set[ast.AST] = set()
    if not for_types:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                skipped.update(ast.walk(node))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write the import with its full name"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield node.lineno, full if full in MODULES else node.module


def allowed(room: str) -> set[str]:
    """The rooms that *room* may import."""
    if room in ALONE:
        return ALONE[room]
    floor = next((i for i, rooms in enumerate(FLOORS) if room in rooms), None)
    assert floor is not None, f"smetric/{room} has no place in FLOORS of {Path(__file__).name}"
    below = set().union(*FLOORS[floor + 1 :])
    return below | {room} | {to for from_, to in EXCEPTIONS if from_ == room}


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    room = room_of(module)
    for line, name in imported(MODULES[module], for_types=bool(room)):
        if name.split(".")[0] != "smetric" or not room_of(name):
            continue
        assert room, f"{MODULES[module]}:{line}: smetric/__init__.py imports nothing of the package"
        assert room_of(name) in allowed(room), f"{MODULES[module]}:{line}: {room} must not import {name}"


def test_imports_have_no_circles() -> None:
    graph = {
        module: {name for _, name in imported(path, for_types=False) if name in MODULES and name != module}
        for module, path in MODULES.items()
    }
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, f"a circle of imports: {' > '.join([*way[way.index(module) :], module])}"
        if module not in done:
            for name in sorted(graph[module]):
                visit(name, (*way, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_public_classes_have_names_of_their_own() -> None:
    found: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text(), str(path)).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}


def test_policy_uses_the_standard_library_and_lark_alone() -> None:
    for path in (PACKAGE / "policy").rglob("*.py"):
        for line, name in imported(path):
            top = name.split(".")[0]
            assert top in sys.stdlib_module_names | {"lark"} or name.startswith("smetric.policy"), (
                f"{path}:{line}: policy must not import {name}"
            )


def test_serving_loads_neither_laboratory_nor_tools() -> None:
    """`smetric serve` loads neither emulator, demo nor language server."""
    code = "import sys, smetric.cli.serve; print(*[name for name in sys.modules if name.startswith('smetric.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert {room_of(name) for name in done.stdout.split()} & {"lab", "tools", "doctor"} == set()


def test_package_offers_its_names_and_loads_them_at_their_first_use() -> None:
    code = """
import sys, smetric
print(*[name for name in sys.modules if name.startswith("smetric.")])
print(smetric.load_policy("load_only").name, "smetric.app" in sys.modules, smetric.Decision, smetric.create_app)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    nothing, loaded = done.stdout.split("\n", 1)
    assert nothing == ""
    assert loaded.startswith("load_only False <class 'smetric.policy.decision.Decision'> <function create_app at ")


def test_back_edge_is_refused() -> None:
    assert "proxy" not in allowed("routing")
    assert "records" not in allowed("telemetry")
    assert "app" not in allowed("proxy")
    assert "sources" not in allowed("policy")
    assert "policy" in allowed("cli")
