"""Figures about the code of slime/: its size, its types, its comments.

    python tools/measure_code.py [--rooms] [FOLDER]

The tokens are Python's, without comments and docstrings. The core is the package without
slime/plugins.

``tests/docs/test_measures.py`` holds the limits of these figures, and CONTRIBUTING.md names this
command.
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import json
import re
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "slime"
DOCS = PACKAGE.parent / "docs" / "en"
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Measures:
    """What is counted in a folder of Python files."""

    files: int = 0
    files_above_400_lines: int = 0
    total_lines: int = 0
    code_lines: int = 0
    """Lines that hold a token which is no comment and no part of a docstring."""
    tokens: int = 0
    """Tokens of Python without comments and docstrings."""
    comment_lines: int = 0
    """Lines that hold a comment and nothing else."""
    functions: int = 0
    functions_above_60_lines: int = 0
    functions_with_any_parameter: int = 0
    functions_that_take_args: int = 0
    own_functions_that_take_args: int = 0
    """Those of them whose signature is slime's own choice: outside of plugins/compat, no registered
    part, no name that users' functions import (import_paths.md), and without the parameters of a
    user's function (the table in customization.md).
    """
    getattr_of_args_with_default: int = 0
    attributes_any_none: int = 0
    """Attributes and variables declared ``: Any = None``."""

    @property
    def any_parameter_percent(self) -> float:
        return round(100.0 * self.functions_with_any_parameter / max(self.functions, 1), 1)

    @property
    def tokens_per_code_line(self) -> float:
        return round(self.tokens / max(self.code_lines, 1), 1)

    @property
    def comments_per_1000_lines(self) -> float:
        return round(1000.0 * self.comment_lines / max(self.total_lines, 1), 1)


def measure(folder: Path) -> Measures:
    """Count in every Python file below ``folder``."""
    found = [
        _of_file(path.read_text(encoding="utf-8"), path.stem, "compat" in path.parts)
        for path in sorted(folder.rglob("*.py"))
    ]
    return Measures(*(sum(getattr(one, each.name) for one in found) for each in fields(Measures)))


@functools.cache
def _of_file(text: str, module: str, compat: bool) -> Measures:
    tree = ast.parse(text)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    class_of = {node: one.name for one in classes for node in one.body}
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    lines = text.count("\n")
    total = Measures(files=1, files_above_400_lines=int(lines > 400), total_lines=lines)
    prose = _docstring_lines(tree)
    code, comments = _lines_of_tokens(tokens)
    total.tokens = _count_tokens(tokens, prose)
    total.code_lines += len(code - prose)
    total.comment_lines += len(comments - code)
    for node in ast.walk(tree):
        if isinstance(node, Function):
            takes_args = _add_function(total, node)
            if takes_args and not compat:
                name = class_of.get(node, node.name)
                users = _parameters(node) in _of_users() and not node.name.startswith("_")
                fixed = users or name in _importable() or (module, name) in _registered()
                total.own_functions_that_take_args += not fixed
        elif isinstance(node, ast.Call):
            total.getattr_of_args_with_default += _is_getattr_of_args(node)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            is_none = isinstance(node.value, ast.Constant) and node.value.value is None
            total.attributes_any_none += is_none and ast.unparse(node.annotation) == "Any"
    return total


def _add_function(total: Measures, function: Function) -> bool:
    """Count a function, and return whether it takes ``args``."""
    parameters = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    named = {p.arg: ast.unparse(p.annotation) for p in parameters if p.annotation is not None}
    total.functions += 1
    total.functions_above_60_lines += (
        function.end_lineno or function.lineno
    ) - function.lineno + 1 > 60
    total.functions_with_any_parameter += "Any" in named.values()
    takes_args = named.get("args") in ("Any", "Args")
    total.functions_that_take_args += takes_args
    return takes_args


def _parameters(function: Function) -> tuple[str, ...]:
    """The names of the parameters that have no default."""
    positional = function.args.args
    return tuple(p.arg for p in positional[: len(positional) - len(function.args.defaults)])


@functools.cache
def _of_users() -> frozenset[tuple[str, ...]]:
    """The parameters of each kind of users' functions that has others besides ``args``."""
    page = (DOCS / "get_started" / "customization.md").read_text(encoding="utf-8")
    calls = re.findall(r"`(?:await )?fn\((.+?)\)`", page)
    names = (call.split(", ") for call in calls)
    return frozenset(tuple(n for n in one if not set(n) & set("*=")) for one in names) - {("args",)}


@functools.cache
def _importable() -> frozenset[str]:
    """The functions and classes that users' functions may import."""
    page = (DOCS / "reference" / "import_paths.md").read_text(encoding="utf-8")
    lines = re.findall(r"^- `[\w.]+`: (.+)", page, re.MULTILINE)
    return frozenset(name for line in lines for name in re.findall(r"`(\w+)`", line))


@functools.cache
def _registered() -> frozenset[tuple[str, str]]:
    """The places of the package's parts: module, without its package, and name. A plug-in names
    them as texts, or registers a function of its own ``__init__.py`` itself.
    """
    texts = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")]
    places = {place for text in texts for place in re.findall(r'\.(\w+):(\w+)"', text)}
    itself = re.compile(r'register\(\s*"[^"]+",\s*"[^"]+",\s*(\w+)[,)]')
    return frozenset(
        places | {("__init__", name) for text in texts for name in itself.findall(text)}
    )


def _is_getattr_of_args(call: ast.Call) -> bool:
    if not (isinstance(call.func, ast.Name) and call.func.id == "getattr" and len(call.args) == 3):
        return False
    return ast.unparse(call.args[0]).split(".")[-1] == "args"


EMPTY = {
    tokenize.NEWLINE,
    tokenize.NL,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}
"""Kinds of tokens without a text of their own."""


def _count_tokens(tokens: Sequence[tokenize.TokenInfo], prose: set[int]) -> int:
    """Return the number of tokens but for comments and the strings that begin on a line of
    ``prose``.
    """
    return sum(
        token.type not in EMPTY
        and token.type != tokenize.COMMENT
        and not (token.type == tokenize.STRING and token.start[0] in prose)
        for token in tokens
    )


def _lines_of_tokens(tokens: Sequence[tokenize.TokenInfo]) -> tuple[set[int], set[int]]:
    """Numbers of the lines with code (docstrings included) and of those with comments."""
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokens:
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in EMPTY:
            code.update(range(token.start[0], token.end[0] + 1))
    return code, comments


def _docstring_lines(tree: ast.AST) -> set[int]:
    return {
        line
        for node in _docstrings(tree)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def _docstrings(tree: ast.AST) -> Iterator[ast.Expr]:
    """Strings that stand as statements: docstrings of modules, classes, functions and
    attributes.
    """
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node


def show(folder: Path) -> dict[str, float]:
    """The figures of a folder by name, the shares included."""
    found = measure(folder)
    return asdict(found) | {
        "any_parameter_percent": found.any_parameter_percent,
        "tokens_per_code_line": found.tokens_per_code_line,
        "comments_per_1000_lines": found.comments_per_1000_lines,
    }


def tokens_by_room(package: Path = PACKAGE) -> dict[str, int]:
    """The tokens of each room and of each plug-in (``plugins/NAME``) of the package."""
    rooms = [*package.iterdir(), *(package / "plugins").iterdir()]
    folders = [
        room for room in rooms if (room / "__init__.py").is_file() and room.name != "plugins"
    ]
    return {folder.relative_to(package).as_posix(): measure(folder).tokens for folder in folders}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", type=Path, nargs="?", default=PACKAGE, help="folder to measure; default: slime/"
    )
    parser.add_argument(
        "--rooms", action="store_true", help="print the tokens of each room and plug-in, too"
    )
    options = parser.parse_args()
    print(json.dumps(show(options.folder), indent=2))
    if options.rooms:
        rooms = Counter(tokens_by_room(options.folder))
        for name, tokens in rooms.most_common():
            print(f"{name:20} {tokens:7} tokens")
        core = sum(tokens for name, tokens in rooms.items() if not name.startswith("plugins/"))
        print(f"{'core':20} {core:7} tokens")


if __name__ == "__main__":
    main()
