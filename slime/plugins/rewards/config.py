"""The file of ``--rubric``: its items, and what is wrong with it.

It is read when flags are parsed, so nothing heavy is imported.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slime.config.files import load_yaml
from slime.config.flag import path_flag
from slime.registry import parts

if TYPE_CHECKING:
    from slime.config.args import Args

PASS = 0.5
"""A required item whose reward is below this makes the whole reward 0."""


@dataclass
class RubricFlags:
    _title = "rubric"

    rubric: str | None = path_flag()
    """YAML file of the items of --rm-type rubric (docs/en/rewards.md)"""


@dataclass(frozen=True)
class Item:
    """One item of a rubric, which has one of ``rm_type``, ``path`` and ``judge``.

    Attributes:
        name: Of its curve, ``rollout/reward/NAME``.
        weight: Its share of the reward is weight / sum of the weights.
        required: Whether the reward is 0 where this item's is below :data:`PASS`.
        rm_type: A reward type.
        path: A function of the user, as for ``--custom-rm-path``.
        judge: What the model behind ``--rm-url`` is asked; the reward is P(yes).
    """

    name: str
    weight: float = 1.0
    required: bool = False
    rm_type: str | None = None
    path: str | None = None
    judge: str | None = None


def read_rubric(path: str) -> tuple[Item, ...]:
    """Read the items of a file, which is read again when it has changed.

    Raises:
        ValueError: Something is wrong with it. The message has a line for each problem.
    """
    return _read(path, Path(path).expanduser().stat().st_mtime_ns)


@functools.cache
def _read(path: str, changed: int) -> tuple[Item, ...]:
    rows = load_yaml(Path(path).expanduser())
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"--rubric {path}: it must be a list of items with a name each")
    problems = [f"--rubric {path}: {line}" for row in rows for line in _problems(row)]
    names = [row.get("name") for row in rows if isinstance(row, Mapping)]
    problems += [
        f"--rubric {path}: two items are named {name!r}"
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    if problems:
        raise ValueError("\n".join(problems))
    return tuple(Item(**row) for row in rows)


def _problems(row: object) -> list[str]:
    if not isinstance(row, Mapping) or not isinstance(row.get("name"), str):
        return [f"{row!r} has no name"]
    name = row["name"]
    known = [field.name for field in dataclasses.fields(Item)]
    problems = [f"item {name}: {key!r} is none of {', '.join(known)}" for key in row.keys() - known]
    kinds = [kind for kind in ("rm_type", "path", "judge") if row.get(kind) is not None]
    if len(kinds) != 1:
        problems.append(f"item {name} needs one of rm_type, path and judge")
    weight = row.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
        problems.append(f"item {name}: its weight {weight!r} is not a number above 0")
    kind = row.get("rm_type")
    if kind is not None and (
        kind == "rubric" or str(kind).removeprefix("boxed_") not in parts("reward")
    ):
        problems.append(f"item {name}: {kind!r} is not a reward type that an item can have")
    return problems


def resolve(args: Args) -> list[str]:
    """Use the weights of the rubric for ``--advantage-estimator gdpo``, and tell what is wrong with
    the file.
    """
    if args.rubric is None:
        return []
    if args.rm_type is None:
        args.rm_type = "rubric"
    try:
        items = read_rubric(args.rubric)
    except (OSError, ValueError) as error:
        return str(error).splitlines()
    if args.reward_weights is not None:
        return ["--rubric and --reward-weights exclude each other: the file has the weights"]
    args.reward_weights = {item.name: item.weight for item in items}
    return []
