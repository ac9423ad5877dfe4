"""What rollout functions return, and how they are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Required, TypedDict

from slime.data.sample import Group, Sample
from slime.data.source import DataSource

if TYPE_CHECKING:
    from slime.config.args import Args


class EvalResults(TypedDict, total=False):
    """The results of one data set of an evaluation: ``rewards`` and ``truncated`` hold one entry per rollout.

    A reward is NaN where a verifier gave no answer. ``samples`` are flat, ``settings`` those of the data set.
    """

    rewards: Required[list[float]]
    truncated: list[bool]
    samples: list[Sample]
    n_samples_per_prompt: int
    settings: dict[str, Any]


@dataclass
class RolloutFnTrainOutput:
    """Groups to train on (an element of a group is a Sample, or a list of them that fanned out), and metrics."""

    samples: list[Group]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """``data``: the results of each data set, by its name; and metrics."""

    data: dict[str, EvalResults] = field(default_factory=dict)
    metrics: dict[str, Any] | None = None


def call_rollout_fn(
    fn: Callable[..., object], args: Args, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Call ``fn(args, rollout_id, data_source, evaluation=...)`` and wrap the older return forms.

    Older forms are a bare (nested) list of samples for training and a bare dict for evaluation.

    Raises:
        TypeError: it returned something else.
    """
    output = fn(args, rollout_id, data_source, evaluation=evaluation)
    wanted = RolloutFnEvalOutput if evaluation else RolloutFnTrainOutput
    if isinstance(output, RolloutFnTrainOutput | RolloutFnEvalOutput) and isinstance(output, wanted):
        return output
    if evaluation and isinstance(output, Mapping):
        return RolloutFnEvalOutput(data=dict(output))
    if not evaluation and isinstance(output, list):
        return RolloutFnTrainOutput(samples=output)
    name = f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', fn)}"
    older = "a dict of data sets" if evaluation else "a list of groups of samples"
    raise TypeError(
        f"{name}(evaluation={evaluation}) returned {type(output).__name__}, not {wanted.__name__} or {older}"
    )
