"""Imports point one way: each layer of `LAYERS` uses those below it."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "smetric"

#: The layers from the top down; what stands on one line is one layer, whose parts may use each other.
LAYERS = (
    {"cli", "__main__"},
    {"demo", "doctor", "bench", "reference", "glossary", "highlight", "lsp", "pytest_plugin"},
    {"serving"},
    {"app"},
    {"proxy"},
    {"live"},
    {"router", "routes", "root", "shadow", "trial", "guardrail", "arm_load", "policies", "policy_file"},
    {"sources", "fleet", "features", "telemetry", "records", "policy_folder", "policy_text"}
    | {"request", "reading", "caches", "tokens", "token_ids", "tokenize", "block_keys", "file_watch"},
    {"policy"},
)
#: What any layer but `policy` may use, and which uses no layer itself.
GROUND = {"config", "errors", "resources", "file_bytes", "unreadable"}
#: Beside the layers: the paper's model of an engine, and what speaks vLLM on the wire with it.
ASIDE = {
    "sim": {"sim", "policy", "features", "fleet", "request", "records", *GROUND},
    "emulator": {"emulator", "sim", *GROUND},
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part_of(name: str) -> str:
    """`smetric.policy.tree` → `policy`; the package itself → an empty text."""
    return name.partition(".")[2].partition(".")[0]


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything the file imports, in functions and for type checkers too."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write the import with its full name"
            assert node.module is not None
            if node.module == "smetric":  # `from smetric import policy` is about the part, not the package
                for alias in node.names:
                    yield node.lineno, f"smetric.{alias.name}"
            else:
                yield node.lineno, node.module


def allowed(part: str) -> set[str]:
    """The parts that *part* may import."""
    if part in ASIDE:
        return ASIDE[part]
    if part in GROUND:
        return GROUND
    if part == "policy":
        return {"policy"}
    depth = next((i for i, layer in enumerate(LAYERS) if part in layer), None)
    assert depth is not None, f"smetric/{part} has no place in LAYERS, GROUND or ASIDE of {Path(__file__).name}"
    below = set().union(*LAYERS[depth:]) | GROUND
    return below | set(ASIDE) if depth < 2 else below


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    part = part_of(module_name(path))
    for line, name in imported(path):
        if name.split(".")[0] != "smetric" or not part_of(name) or name == "smetric.__version__":
            continue
        assert part, (
            f"{path}:{line}: smetric/__init__.py imports nothing of the package, so that `import smetric` is free"
        )
        assert part_of(name) in allowed(part), f"{path}:{line}: {part} must not import {name}"


def test_policy_uses_the_standard_library_and_lark_alone() -> None:
    for path in (PACKAGE / "policy").rglob("*.py"):
        for line, name in imported(path):
            top = name.split(".")[0]
            assert top in sys.stdlib_module_names | {"lark"} or name.startswith("smetric.policy"), (
                f"{path}:{line}: policy must not import {name}"
            )


def test_a_back_edge_is_one() -> None:
    assert "proxy" not in allowed("router")
    assert "app" not in allowed("proxy")
    assert "router" not in allowed("sim")
    assert "sources" not in allowed("policy")
    assert "policy" in allowed("cli")
