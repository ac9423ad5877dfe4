"""The imports between the modules of slime, read from its files.

Three things count as an import, wherever they stand in a file: an ``import`` statement (also inside
a function), an ``import`` for types alone, and a string that holds the dotted path of a module,
which something imports at run time.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "slime"
_DOTTED = re.compile(r"\bslime(?:\.\w+)+")


@dataclass(frozen=True)
class Arrow:
    """One place in ``module`` that leads to ``target``, both modules of slime.

    Attributes:
        kind: ``import``, ``type`` (under TYPE_CHECKING) or ``string``.
    """

    module: str
    line: int
    target: str
    kind: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.kind} {self.target}"


@cache
def modules(root: Path = ROOT) -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def resolve(dotted: str, known: dict[str, Path]) -> str | None:
    """The module that a dotted path names, or the one that holds what it names; None where slime
    has no such module.
    """
    while dotted.count("."):
        if dotted in known:
            return dotted
        dotted = dotted.rpartition(".")[0]
    return None


def arrows(module: str, known: dict[str, Path]) -> Iterator[Arrow]:
    nodes = list(ast.walk(ast.parse(known[module].read_text(encoding="utf-8"))))
    guards = [
        n
        for n in nodes
        if isinstance(n, ast.If)
        and isinstance(n.test, ast.Name | ast.Attribute)
        and "TYPE_CHECKING" in ast.unparse(n.test)
    ]
    for_types = {
        id(inner) for guard in guards for statement in guard.body for inner in ast.walk(statement)
    }
    prose = {
        id(n.value) for n in nodes if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)
    }
    for node in nodes:
        kind, names = "type" if id(node) in for_types else "import", []
        if isinstance(node, ast.ImportFrom):
            names = [f"{_origin(module, node, known)}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose
        ):
            kind, names = "string", _DOTTED.findall(node.value)
        for name in names:
            target = resolve(name, known) if name.startswith("slime.") else None
            if target is not None and target != module:
                yield Arrow(module, getattr(node, "lineno", 0), target, kind)


def _origin(module: str, node: ast.ImportFrom, known: dict[str, Path]) -> str:
    """The module that a ``from`` names, with the dots of a relative import resolved."""
    package = module if known[module].name == "__init__.py" else module.rpartition(".")[0]
    above = package.rsplit(".", node.level - 1)[0] if node.level else ""
    return ".".join(part for part in (above, node.module) if part)


@cache
def all_arrows(root: Path = ROOT) -> tuple[Arrow, ...]:
    known = modules(root)
    return tuple(arrow for module in known for arrow in arrows(module, known))
