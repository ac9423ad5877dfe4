"""The return types of rollout functions, and the calls of users' functions."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Required, TypedDict

from slime.config.hooks import is_async
from slime.data.sample import Group, Sample
from slime.data.source import DataSource

if TYPE_CHECKING:
    from slime.config.args import Args


class EvalResults(TypedDict, total=False):
    """The results of one data set of an evaluation.

    Attributes:
        rewards: One reward per sample, where the samples of a fan-out count as one; NaN if the
            verifier gave no result.
        truncated: One entry for each of ``rewards``.
        samples: All samples, flat.
        n_samples_per_prompt: Number of samples per prompt, before a fan-out.
        settings: The settings of the data set.
    """

    rewards: Required[list[float]]
    truncated: list[bool]
    samples: list[Sample]
    n_samples_per_prompt: int
    settings: dict[str, Any]


@dataclass
class RolloutFnTrainOutput:
    """The groups to train on, and metrics. An element of a group is a Sample, or a list of Samples
    (a fan-out).
    """

    samples: list[Group]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """The results of each data set by its name (``data``), and metrics."""

    data: dict[str, EvalResults] = field(default_factory=dict)
    metrics: dict[str, Any] | None = None


def function_name(fn: Callable[..., object]) -> str:
    """Return how messages name a user's function."""
    return f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', fn)}"


def call_rollout_fn(
    fn: Callable[..., object],
    args: Args,
    rollout_id: int,
    data_source: DataSource,
    evaluation: bool = False,
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Call ``fn(args, rollout_id, data_source, evaluation=...)`` and wrap older return types.

    The older types are a list of groups for training and a dict of data sets for evaluation.

    Raises:
        TypeError: The function returned something else.
    """
    output = fn(args, rollout_id, data_source, evaluation=evaluation)
    wanted = RolloutFnEvalOutput if evaluation else RolloutFnTrainOutput
    if isinstance(output, RolloutFnTrainOutput | RolloutFnEvalOutput) and isinstance(
        output, wanted
    ):
        return output
    if evaluation and isinstance(output, Mapping):
        return RolloutFnEvalOutput(data=dict(output))
    if not evaluation and isinstance(output, list):
        return RolloutFnTrainOutput(samples=output)
    older = "a dict of data sets" if evaluation else "a list of groups of samples"
    raise TypeError(
        f"{function_name(fn)}(evaluation={evaluation}) returned {type(output).__name__}, not "
        f"{wanted.__name__} or {older}"
    )


@functools.lru_cache(maxsize=256)
def parameters(fn: Callable[..., object]) -> tuple[frozenset[str], bool]:
    """Return the names of a function's parameters, and whether it accepts any keyword
    (``**kwargs``).
    """
    found = inspect.signature(fn).parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in found.values())
    return frozenset(found), anything


def supported_kwargs(fn: Callable[..., object], **keywords: object) -> dict[str, Any]:
    """Return the entries of ``keywords`` that ``fn`` accepts."""
    names, anything = parameters(fn)
    return {name: value for name, value in keywords.items() if anything or name in names}


async def call(
    fn: Callable[..., object], *args: object, threads: Executor | None = None, **keywords: object
) -> Any:
    """Await an async function; run a synchronous one in a thread, so that it cannot block the event
    loop.

    Args:
        threads: Executor for a synchronous function. Default: that of the event loop, which has
            only a few more threads than the machine has cores.
    """
    if is_async(fn):
        answer: Any = fn(*args, **keywords)
        return await answer
    # run_in_executor does not copy the context. Without the copy, context variables (traces, the
    # schedule of the run) would be unset in the user function.
    run = functools.partial(contextvars.copy_context().run, fn, *args, **keywords)
    result = await asyncio.get_running_loop().run_in_executor(threads, run)
    return await result if inspect.isawaitable(result) else result
