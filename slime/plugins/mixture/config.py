"""The file of ``--prompt-mixture``: data sets with their weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from slime.config.files import read_named_rows
from slime.config.flag import path_flag

if TYPE_CHECKING:
    from slime.config.args import Args

SOURCE = "slime.plugins.mixture.source.MixtureSource"
Weight = float | Mapping[int, float]


@dataclass
class MixtureFlags:
    _title = "mixture"

    prompt_mixture: str | None = path_flag()
    """YAML file of several data sets with weights, in place of --prompt-data (docs/en/data.md)"""


@dataclass(frozen=True)
class MixedSet:
    """One data set of a mixture.

    Attributes:
        path: As for ``--prompt-data``: a file, or a data set by name.
        weight: Its share of the prompts is weight / sum of the weights. A mapping gives the weight
            at some rollouts; between them it changes linearly.
        rm_type, custom_rm_path: Its reward, if it is not that of the run.
        generate_function_path: Its generate function, if it is not that of the run.
        input_key, label_key: Its columns, if they are not those of the run.
    """

    name: str
    path: str
    weight: Weight = 1.0
    rm_type: str | None = None
    custom_rm_path: str | None = None
    generate_function_path: str | None = None
    input_key: str | None = None
    label_key: str | None = None


def weight_at(weight: Weight, rollout: float) -> float:
    """Return the weight at a rollout, a number that counts prompts as parts of a rollout."""
    if not isinstance(weight, Mapping):
        return weight
    points = sorted(weight.items())
    if rollout <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in pairwise(points):
        if rollout <= right:
            return low + (high - low) * (rollout - left) / (right - left)
    return points[-1][1]


def read_mixture(path: str) -> tuple[MixedSet, ...]:
    """Read the data sets of a file.

    Raises:
        ValueError: Something is wrong with it. The message has a line for each problem.
    """
    rows = read_named_rows(path, "--prompt-mixture", MixedSet, _problems)
    mixed = tuple(MixedSet(**row) for row in rows)
    if not sum(weight_at(one.weight, 0.0) for one in mixed):
        raise ValueError(f"--prompt-mixture {path}: all weights are 0 at the beginning")
    return mixed


def _problems(row: Mapping[str, Any]) -> list[str]:
    problems = [] if isinstance(row.get("path"), str) else ["it needs a path"]
    weight = row.get("weight", 1.0)
    given = weight if isinstance(weight, Mapping) else {0: weight}
    if not given or any(type(key) is not int or key < 0 for key in given):
        problems.append("a schedule has weights by the number of a rollout")
    if any(type(value) not in (int, float) or not value >= 0 for value in given.values()):
        problems.append(f"its weight {weight!r} must be a number that is not negative")
    return problems


def resolve(args: Args) -> list[str]:
    """Select the data source, and tell what is wrong with the file."""
    if args.prompt_mixture is None:
        return []
    try:
        read_mixture(args.prompt_mixture)
    except (OSError, ValueError) as error:
        return str(error).splitlines()
    if args.prompt_data is not None:
        return ["--prompt-mixture and --prompt-data exclude each other: the file names the data"]
    if "data_source_path" not in args.explicit:
        args.data_source_path = SOURCE
    return []
