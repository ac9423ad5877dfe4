"""Several data sets in one run, by weights that may change in its course."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from slime.config.files import read_named_rows
from slime.config.flag import path_flag
from slime.registry import register

if TYPE_CHECKING:
    from slime.config.args import Args


BY_SOURCE = "by_source"
SOURCE = "slime.plugins.mixture.source.MixtureSource"
Weight = float | Mapping[int, float]
EstimatorChoice = str | Mapping[str, Any]
SAMPLING = ("max_new_tokens", "stop", "stop_token_ids")
"""The sampling parameters that a data set may have. Others change the distribution of tokens, which
the trainer must know, and it has one for the whole run."""


@dataclass
class MixtureFlags:
    _title = "mixture"

    prompt_mixture: str | None = path_flag()
    """YAML file of several data sets with weights, in place of --prompt-data (docs/en/data.md)"""


@dataclass
class BySourceFlags:
    _title = "estimator by_source"

    source_estimators: dict[str, Any] | None = None
    """JSON object of the estimator of each data set by its name, for --advantage-estimator by_source:
    a name, or an object with a name and values of its flags. --prompt-mixture sets it"""


@dataclass(frozen=True)
class MixedSet:
    """One data set of a mixture.

    Attributes:
        path: As for ``--prompt-data``: a file, or a data set by name.
        environment: As for ``--environment``, in place of a path.
        weight: Its share of the prompts is weight / sum of the weights. A mapping gives the weight
            at some rollouts; between them it changes linearly.
        rm_type, custom_rm_path: Its reward, if it is not that of the run.
        generate_function_path: Its generate function, if it is not that of the run.
        input_key, label_key: Its columns, if they are not those of the run.
        estimator: Its estimator (:mod:`slime.plugins.mixture.estimator`), if it is not that of the
            run: a name, or a mapping with a name and values of its flags.
        sampling: Sampling parameters of its requests that replace those of the run,
            :data:`SAMPLING`.
        pass_rate: Rows whose share of passes, when they came last, is not within these bounds are
            left out.
        after: It begins when other data sets, by name, have reached these pass rates.
    """

    name: str
    path: str | None = None
    environment: str | None = None
    weight: Weight = 1.0
    rm_type: str | None = None
    custom_rm_path: str | None = None
    generate_function_path: str | None = None
    input_key: str | None = None
    label_key: str | None = None
    estimator: EstimatorChoice | None = None
    sampling: Mapping[str, Any] | None = None
    pass_rate: tuple[float, float] | None = None
    after: Mapping[str, float] | None = None


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
    if not sum(weight_at(one.weight, 0.0) for one in mixed if not one.after):
        raise ValueError(f"--prompt-mixture {path}: all weights are 0 at the beginning")
    names = {one.name for one in mixed}
    unknown = sorted({name for one in mixed for name in one.after or ()} - names)
    if unknown:
        raise ValueError(f"--prompt-mixture {path}: after: no data set is called {unknown[0]}")
    return mixed


def _problems(row: Mapping[str, Any]) -> list[str]:
    problems = (
        [] if ("path" in row) != ("environment" in row) else ["it needs a path, or an environment"]
    )
    weight = row.get("weight", 1.0)
    given = weight if isinstance(weight, Mapping) else {0: weight}
    if not given or any(type(key) is not int or key < 0 for key in given):
        problems.append("a schedule has weights by the number of a rollout")
    if any(type(value) not in (int, float) or not value >= 0 for value in given.values()):
        problems.append(f"its weight {weight!r} must be a number that is not negative")
    other = [name for name in row.get("sampling") or () if name not in SAMPLING]
    if other:
        problems.append(f"sampling has {', '.join(other)}, but may only have {', '.join(SAMPLING)}")
    bounds = row.get("pass_rate", (0, 1))
    if not isinstance(bounds, Sequence) or len(bounds) != 2 or not 0 <= bounds[0] <= bounds[1] <= 1:
        problems.append(f"its pass_rate {bounds!r} must be two numbers from 0 to 1")
    if any(not 0 <= rate <= 1 for rate in (row.get("after") or {}).values()):
        problems.append("after has the pass rates of other data sets, from 0 to 1")
    return problems


def resolve(args: Args) -> list[str]:
    """Select the data source, and tell what is wrong with the file."""
    if args.prompt_mixture is None:
        return []
    if "data_source_path" not in args.explicit:
        args.data_source_path = SOURCE
    try:
        mixed = read_mixture(args.prompt_mixture)
    except (OSError, ValueError) as error:
        return str(error).splitlines()
    if args.prompt_data is not None:
        return ["--prompt-mixture and --prompt-data exclude each other: the file names the data"]
    chosen = {one.name: one.estimator for one in mixed if one.estimator is not None}
    if chosen and args.source_estimators is None:
        others = {one.name: args.advantage_estimator for one in mixed}
        args.source_estimators = others | chosen
        args.advantage_estimator = BY_SOURCE
    return []


def parts() -> None:
    """Register the flag of mixtures, what it sets, and the check of their data."""
    here = "slime.plugins.mixture"
    register("resolver", "mixture", resolve, flags=MixtureFlags)
    mixed = ("prompt_mixture",)
    register("check", "mixture", f"{here}.source:check", when=mixed)
    register("group listener", "mixture", f"{here}.source:listen", when=mixed)
    register("algorithm", "by_source", f"{here}.estimator:BySource", flags=BySourceFlags)
    when = ("source_estimators",)
    register("check", "by_source", f"{here}.estimator:check", when=when)
