"""Print the test files that a change can break, by the imports of slime and of the tests.

    python tools/affected.py            # of what is not committed, and of the commits that main does not have
    python tools/affected.py HEAD~3     # of all changes since a commit

A test file is listed if it has changed, if it imports a changed module of slime, directly or
through others, or if it is the one of a changed module by the layout (``slime/data/rows.py``:
``tests/data/test_rows*.py``). Changes outside of the package and the tests list the tests that
speak of them: docs those of ``tests/docs``, scripts those of ``tests/scripts``, and so on. What all
tests use (``conftest.py``, the pins) lists all tests.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from import_graph import all_arrows, modules, resolve

CHECKOUT = Path(__file__).resolve().parents[1]
EVERYTHING = (
    "pyproject.toml",
    "requirements/",
    "tests/conftest.py",
    "tests/make_args.py",
    "scripts/env",
)
"""Beginnings of the paths of which all tests depend."""
NAMES_BY_PATH = ("slime.config.", "slime.registry", "slime.plugins.")
SPEAK_OF = {
    "docs/": "tests/docs",
    "README.md": "tests/docs",
    "CONTRIBUTING.md": "tests/docs",
    "tools/": "tests/docs",
    "scripts/": "tests/scripts",
    ".ci/": "tests/scripts",
    "examples/": "tests/examples",
    "benchmarks/": "tests/benchmarks",
    "train": "tests/e2e",
    "tests/e2e/README.md": "tests/e2e/test_specification.py",
}
"""The folders of tests for changes of other paths, by the beginnings of these."""


def changed_files(base: str) -> list[str]:
    """Paths that differ from the commit ``base``, or that git does not know yet."""

    def git(*words: str) -> list[str]:
        done = subprocess.run(
            ["git", *words], cwd=CHECKOUT, check=True, capture_output=True, text=True
        )
        return done.stdout.split("\n")[:-1]

    return sorted(
        {*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")}
    )


def users_of(changed: Iterable[str]) -> set[str]:
    """The given modules of slime, and all that import them, directly or through others."""
    importers: dict[str, set[str]] = {}
    for arrow in all_arrows():
        # A path in a flag's default or in a row of the registry does not change with the module.
        named = arrow.kind == "string" and arrow.module.startswith(NAMES_BY_PATH)
        if arrow.kind != "type" and not named:
            importers.setdefault(arrow.target, set()).add(arrow.module)
    found: set[str] = set()
    todo = list(changed)
    while todo:
        if (module := todo.pop()) not in found:
            found.add(module)
            todo += importers.get(module, ())
    return found


@cache
def _imports(file: Path) -> frozenset[str]:
    """The dotted names that a test file or a helper of the tests imports or names."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.startswith("slime.")
        ):
            names.add(node.value.partition(":")[0])
    return frozenset(names)


def uses(file: Path, helpers: dict[str, Path], seen: frozenset[str] = frozenset()) -> set[str]:
    """The modules of slime that a test file uses, also through helpers of the tests."""
    found: set[str] = set()
    for name in _imports(file):
        if name.startswith("slime"):
            module = resolve(name, modules())
            found |= {module} if module is not None else set()
        elif (helper := name.partition(".")[0]) in helpers and helper not in seen:
            found |= uses(helpers[helper], helpers, seen | {helper})
    return found


def affected_tests(changed: Sequence[str]) -> list[str]:
    """The test files that a change of these paths can break, in the order of their names."""
    tests = sorted((CHECKOUT / "tests").rglob("test_*.py"))
    if any(path.startswith(EVERYTHING) for path in changed):
        return [str(test.relative_to(CHECKOUT)) for test in tests]
    touched = {path for path in changed if path.startswith("tests/")}
    by_path = {str(file.relative_to(CHECKOUT)): module for module, file in modules().items()}
    used = users_of(by_path[path] for path in changed if path in by_path)
    helpers = {
        file.stem: file
        for file in (CHECKOUT / "tests").rglob("*.py")
        if not file.name.startswith("test_")
    }
    changed_helpers = {
        Path(path).stem for path in touched if not Path(path).name.startswith("test_")
    }
    folders = [
        folder
        for start, folder in SPEAK_OF.items()
        if any(path.startswith(start) for path in changed)
    ]
    own = {
        f"tests/{Path(path).relative_to('slime').parent}/test_{Path(path).stem}"
        for path in changed
        if path.startswith("slime/") and path.endswith(".py")
    }
    found = []
    for test in tests:
        name = str(test.relative_to(CHECKOUT))
        imports_helper = {word.partition(".")[0] for word in _imports(test)} & changed_helpers
        by_name = name in touched or name.startswith((*folders, *own))
        if by_name or imports_helper or (used and used & uses(test, helpers)):
            found.append(name)
    return found


if __name__ == "__main__":
    print("\n".join(affected_tests(changed_files(sys.argv[1] if len(sys.argv) > 1 else "main"))))
