"""What the fields say of their readers is true of the code, and the code reads nothing that is no field."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from slime.config.args import FLAGS, Args

CHECKOUT = Path(__file__).resolve().parents[2]
FOR_USERS = {"eval_max_context_len", "max_turns"}  # read by the user's own functions
OWN_NAMESPACE = ("slime/cli/", "slime/config/")  # argparse namespaces of other commands


def sources() -> Iterator[tuple[str, str]]:
    for file in [*CHECKOUT.glob("slime/**/*.py"), *CHECKOUT.glob("train*.py")]:
        yield str(file.relative_to(CHECKOUT)), file.read_text()


def attributes_of_args(text: str) -> set[str]:
    """Names read as ``args.name`` or ``self.args.name`` where ``args`` is annotated or taken as the configuration."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            owner_name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", None)
            if owner_name == "args":
                names.add(node.attr)
    return names


def test_every_flag_that_works_is_read_somewhere() -> None:
    texts = dict(sources())
    derived = texts["slime/config/defaults.py"] + texts["slime/config/overrides.py"] + texts["slime/config/parser.py"]
    rooms = "\n".join(text for path, text in texts.items() if not path.startswith("slime/config/"))
    unread = []
    for name, flag in FLAGS.items():
        one_value_left = len(flag.choices) - len(flag.limits) == 1
        if flag.status != "works" or name in FOR_USERS or one_value_left:
            continue
        text = rooms + (derived if flag.reader.startswith("slime/config") else "")
        if not re.search(rf"\b{name}\b", text):
            unread.append(flag.option)
    assert unread == []


def test_no_code_reads_what_is_no_flag() -> None:
    args = Args()
    unknown = {
        f"{path}: args.{name}"
        for path, text in sources()
        if not path.startswith(OWN_NAMESPACE) and "ArgumentParser" not in text
        for name in attributes_of_args(text)
        if not hasattr(args, name) and not name.startswith("__") and not hasattr(dict, name)
    }
    assert unknown == set()


def test_readers_exist() -> None:
    missing = [
        (flag.option, part.strip())
        for flag in FLAGS.values()
        for part in flag.reader.split(",")
        if part.strip() and not (CHECKOUT / part.strip()).exists()
    ]
    assert missing == []
