"""The arrows between the rooms point one way, as CONTRIBUTING.md says; imports for types alone do not count."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "slime"
LOW = {"config", "data", "algorithms", "models"}
MAY_IMPORT: dict[str, set[str]] = {
    "config": set(),
    "algorithms": set(),
    "data": {"config", "algorithms"},
    "models": {"data"},
    "observability": {"config", "data"},
    "engines": {"config", "models"},
    "weights": {"config", "models", "engines"},
    "checkpoint": {"data"},
    "backends": LOW | {"weights", "observability", "checkpoint"},
    "rollout": {"config", "data", "engines", "observability", "utils"},
    "agent": {"config", "data", "engines", "rollout", "observability"},
    "utils": {"config", "data", "engines", "algorithms"},
    "cluster": LOW | {"engines", "weights", "checkpoint", "backends", "rollout", "observability"},
    "cli": LOW | {"engines", "weights", "checkpoint", "backends", "rollout", "observability", "agent"},
}


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    guarded = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    for_types = {id(inner) for guard in guarded for inner in ast.walk(guard)}
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, f"{node.module}.{node.names[0].name}"
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)


@pytest.mark.parametrize("name", sorted(p.name for p in ROOT.iterdir() if (p / "__init__.py").is_file()))
def test_a_room_imports_only_what_lies_below_it(name: str) -> None:
    assert name in MAY_IMPORT, f"slime/{name}: a new room needs its line here and in CONTRIBUTING.md"
    wrong = [
        f"{path.relative_to(ROOT.parent)}:{line}: {module}"
        for path in sorted((ROOT / name).rglob("*.py"))
        for line, module in imports(path)
        if module.startswith("slime.") and module.split(".")[1] not in MAY_IMPORT[name] | {name}
    ]
    assert not wrong, "\n".join(wrong)


def test_no_two_rooms_import_each_other() -> None:
    for low, below in MAY_IMPORT.items():
        assert not [other for other in below if low in MAY_IMPORT[other]], low
