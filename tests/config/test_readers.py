"""What the fields say of their readers is true of the code, and the code reads nothing that is no
field.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import NamedTuple

import pytest

from slime.config.args import FLAGS, Args
from slime.config.flag import Flag
from slime.config.hf_config import SHAPE
from slime.config.rules import all_rules
from slime.registry import parts, sections

CHECKOUT = Path(__file__).resolve().parents[2]
FOR_USERS = ("eval_max_context_len",)  # no room reads them: they are for the user's functions
DERIVED = tuple(
    f"slime/config/{name}.py" for name in ("resolve", "algorithm", "settings", "parser")
)
# checks, other commands, lists of names
OTHERS = ("slime/config/", "slime/cli/", "slime/checkpoint/manifest.py")
RESOLVERS = (
    "slime/plugins/agents/config.py",
    *(
        f"slime/plugins/{name}/__init__.py"
        for name in ("distillation", "estimators", "mixture", "preference", "rewards")
    ),
)
# `args` of argparse
OWN_NAMESPACE = ("slime/cli/", "slime/config/", "slime/plugins/tools/commands/")


class InFile(NamedTuple):
    """What the tests ask of a file, which is parsed once for all of them; its tree is not kept."""

    has_parser: bool
    read: set[str]
    attributes: set[str]
    written: set[str]


@functools.cache
def in_files() -> dict[str, InFile]:
    """By path from the checkout."""
    found = {}
    for file in sorted([*CHECKOUT.glob("slime/**/*.py"), *CHECKOUT.glob("train*.py")]):
        text = file.read_text()
        tree = ast.parse(text)
        found[file.relative_to(CHECKOUT).as_posix()] = InFile(
            "ArgumentParser" in text,
            names_read(tree),
            attributes_of_args(tree),
            assigned_to_args(tree),
        )
    return found


def attributes_of_args(tree: ast.AST) -> set[str]:
    """Names read as ``args.name`` or ``self.args.name`` where ``args`` is annotated or taken as the
    configuration.
    """
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            owner_name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", None)
            if owner_name == "args":
                names.add(node.attr)
    return names


def readers(flag: Flag) -> list[str]:
    """The files that read a flag's attribute: those of the rooms, else where other settings are
    derived from it.
    """
    files = reads_by_name().get(flag.name, [])
    return [f for f in files if not f.startswith(OTHERS)] or [
        f for f in files if f in DERIVED or flag.name in derived_from(f)
    ]


@functools.cache
def derived_from(file: str) -> frozenset[str]:
    """The flags from which a value is derived, or by which it is chosen, in a file that has checks,
    too.
    """
    functions = [
        n for n in ast.parse((CHECKOUT / file).read_text()).body if isinstance(n, ast.FunctionDef)
    ]
    return frozenset().union(
        *(
            names_read(n)
            for n in functions
            if n.name.startswith(("derive_", "chosen_", "transport_part"))
        )
    )


@functools.cache
def reads_by_name() -> dict[str, list[str]]:
    """Names read of the arguments, by file: ``args.name`` and ``getattr(args, "name")``. In a file
    that reads names from a table (``getattr(args, attribute)``), every string that names a flag."""
    found: dict[str, list[str]] = {}
    for path, file in in_files().items():
        for name in file.read:
            found.setdefault(name, []).append(path)
    return found


def names_read(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    strings: set[str] = set()
    from_table = False
    sections = sections_of(tree) - {"self"}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Load)
            and is_args(node.value, sections)
        ):
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.add(node.value)
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", "") == "getattr"
            and is_args(node.args[0])
        ):
            if isinstance(node.args[1], ast.Constant):
                names.add(str(node.args[1].value))
            else:
                from_table = True
    return names | (strings & FLAGS.keys() if from_table else set())


def is_args(node: ast.expr, sections: frozenset[str] = frozenset()) -> bool:
    """``args``, ``self.args``, ``_target(self._args)``: the arguments, by the names that they go
    by; ``own``: those of a part's own flags; ``observability``, ``sync``: the sections of these
    names; ``sections``: other names of sections."""
    if isinstance(node, ast.Call) and node.args:
        return is_args(node.args[0], sections)
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return name in ("args", "_args", "own", "observability", "sync") or name in sections


def sections_of(tree: ast.AST) -> frozenset[str]:
    """The parameters of the functions in a file that are sections of the arguments (``settings:
    CheckpointConfig``), fields that are sections, and what a section is stored in (``self.settings =
    section(...)``).
    """
    bases = {base.__name__ for base in (*Args.__mro__, *sections())}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            if getattr(node.annotation, "id", None) in bases:
                found.add(node.arg)
        elif isinstance(node, ast.AnnAssign):
            if isinstance(node.target, ast.Name) and getattr(node.annotation, "id", None) in bases:
                found.add(node.target.id)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            called = node.value.func
            if "section" in (getattr(called, "attr", None), getattr(called, "id", None)):
                found |= {getattr(x, "attr", None) or getattr(x, "id", "") for x in node.targets}
    return frozenset(found)


def test_every_flag_that_works_is_read_somewhere() -> None:
    conditions = {name for part in parts("kernels").values() for name in part.when}
    elsewhere = conditions.union(FOR_USERS)
    unread = {
        flag.option
        for flag in FLAGS.values()
        if flag.status == "works" and not readers(flag) and flag.name not in elsewhere
    }
    by_rows = " ".join(rule.when for rule in all_rules().defaults)
    # What allows a combination that is refused otherwise does nothing else.
    allowing = {
        word
        for rule in all_rules().refused
        for word in rule.unless.split()
        if word.startswith("--allow-")
    }
    assert unread <= set(by_rows.split()) | allowing


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("def f(args): return args.lr", {"lr"}),
        (
            "class A:\n def f(self): return self.args.lr + getattr(self._args, 'seed', 0)",
            {"lr", "seed"},
        ),
        (
            "T = ('lr', 'other words')\ndef f(args): return [getattr(args, name) for name in T]",
            {"lr"},
        ),
        ("T = ('lr',)\ndef f(args): args.seed = 1\n# args.save", set()),
    ],
)
def test_what_counts_as_reading(code: str, found: set[str]) -> None:
    assert names_read(ast.parse(code)) == found


def is_known(args: Args, name: str) -> bool:
    try:
        getattr(args, name)  # hasattr is False for flags that were not given
    except AttributeError:
        return False
    return True


def test_no_code_reads_what_is_no_flag() -> None:
    args = Args(train_backend="megatron")
    unknown = {
        f"{path}: args.{name}"
        for path, file in in_files().items()
        if not path.startswith(OWN_NAMESPACE) and not file.has_parser
        for name in file.attributes
        if not is_known(args, name)
        and name not in SHAPE
        and not name.startswith("__")
        and not hasattr(dict, name)
    }
    assert unknown == set()


def assigned_to_args(tree: ast.AST) -> set[str]:
    """Attributes of ``args`` or ``self.args`` that code assigns, deletes, or sets by name or
    through its dict.
    """
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            owner, name = node.value, node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("setattr", "delattr"):
            owner, name = node.args[0], "setattr"
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "update":
            owner, name = dict_of(node.func), "update"
        else:
            continue
        if (owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")) in (
            "args",
            "_args",
        ):
            found.add(name)
    return found


def dict_of(update: ast.expr) -> ast.expr:
    """Of ``vars(args).update`` and ``args.__dict__.update``: ``args``."""
    assert isinstance(update, ast.Attribute)
    owner = update.value
    if isinstance(owner, ast.Attribute) and owner.attr == "__dict__":
        return owner.value
    if isinstance(owner, ast.Call) and getattr(owner.func, "id", "") == "vars" and owner.args:
        return owner.args[0]
    return ast.Constant(None)


def test_nothing_is_written_to_args_after_parsing() -> None:
    """Only the configuration fills them in. Everything else makes copies, with
    ``Args.with_values``.
    """
    paths = {
        path
        for path, file in in_files().items()
        if not path.startswith("slime/config/")
        # a plug-in's resolver is a part of parsing
        and path not in RESOLVERS
        and file.written
    }
    assert not paths, (
        "pass the value, or a copy with it to users' functions: args.with_values(name=...)"
    )


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("def f(args): args.lr = 1", {"lr"}),
        ("def f(self): self.args.lr, x = 1, 2", {"lr"}),
        ("def f(self): self._args.lr += 1", {"lr"}),
        ("def f(args, name): setattr(args, name, 1)", {"setattr"}),
        ("def f(args, sample): sample.lr = args.lr", set()),
        ("self.args.load: str = 'x'", {"load"}),
        ("args.a, b = 1, 2", {"a"}),
        ("setattr(bench.args, name, value)", {"setattr"}),
        ("delattr(args, 'lr')", {"setattr"}),
        ("del args.lr", {"lr"}),
        ("vars(args).update(lr=1.0)", {"update"}),
        ("self.args.__dict__.update(values)", {"update"}),
        ("self.args = args.with_values(lr=1.0)", set()),
        ("parser.args_of = args.lr", set()),
        ("args.notices.append('x')", set()),
        ("args.notices.update(x)", set()),
    ],
)
def test_what_counts_as_writing(code: str, found: set[str]) -> None:
    assert assigned_to_args(ast.parse(code)) == found
