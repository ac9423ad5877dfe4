"""Which reward a sample gets, and getting it.

Precedence: the sample's own ``custom_rm_path`` (per data set in evaluation), ``--custom-rm-path``,
``metadata["rm_type"]``, ``--rm-type``. A sample whose ``custom_rm_path`` is empty is scored by its type, whatever
``--custom-rm-path`` says: an evaluation set that has a type of its own asks for that. A ``boxed_`` prefix scores the
last boxed part of the response. A custom function has ``--reward-timeout`` for its answer; without one its samples are
marked, not scored 0.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from slime.config.data import RM_TYPES
from slime.config.hooks import load_function
from slime.data.sample import Sample
from slime.rollout.hooks import parameters
from slime.rollout.rm_hub import dapo, f1, gpqa, ifbench, last_number, math, model_rm, random_rm, remote_rm
from slime.rollout.rm_hub.custom import RewardTimeout, call_bounded
from slime.rollout.rm_hub.outcome import mark_unscored
from slime.rollout.rm_hub.text import after_thinking, last_boxed

if TYPE_CHECKING:
    from slime.config.args import Args

_MODULES = (dapo, f1, gpqa, ifbench, last_number, math, random_rm, remote_rm)


def _built_in(name: str) -> Callable[[Args, Sample], Any]:
    """``<name>_reward`` of one of the modules, which takes ``(args, sample)`` or the sample alone."""
    function = next(getattr(module, f"{name}_reward") for module in _MODULES if hasattr(module, f"{name}_reward"))
    return function if "args" in parameters(function)[0] else lambda _, sample: function(sample)


REWARD_TYPES = {name: _built_in(name) for name in RM_TYPES}
_BOXED = "boxed_"
_COMPARED = ("math", "deepscaler", "dapo", "f1")  # with the label; those that read it otherwise say what it lacks


async def async_rm(args: Args, sample: Sample, **kwargs: object) -> Any:
    """The reward of one sample: a float or a dict; None (and the sample marked) when its verifier gave no answer.

    Raises:
        ValueError: no reward is configured, or an unknown type.
    """
    path = args.custom_rm_path if sample.custom_rm_path is None else sample.custom_rm_path
    if not path:  # the built-in types have limits of their own, which begin when a verifier does
        return await by_type(args, sample)
    if model_rm.is_model_class(load_reward(path)):
        rewards = await model_rm.model_rewards(args, path, load_reward(path), [sample])
        return None if rewards is None else rewards[0]
    return await _custom(args, path, sample, [sample], kwargs)


async def batched_async_rm(args: Args, samples: Sequence[Sample], **kwargs: object) -> list[Any]:
    """Rewards of several samples, in their order: one call of the function with the list, else each by itself.

    The function is ``--custom-rm-path``, or the one that all samples name (a data set's own in evaluation;
    with ``--group-rm`` only, and not where its parameter is called ``sample``: then it scores one by one).
    None for every sample that was marked because no answer came.

    Raises:
        ValueError: the hook gave another number of rewards than samples.
    """
    own = {sample.custom_rm_path for sample in samples}
    path = own.pop() if len(own) == 1 else None
    listed = path is not None and args.group_rm and "sample" not in _names(path)
    if not own and path is None:
        path, listed = args.custom_rm_path, True
    if not path or not (listed or model_rm.is_model_class(load_reward(path))):
        return list(await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples)))
    if model_rm.is_model_class(load_reward(path)):
        rewards = await model_rm.model_rewards(args, path, load_reward(path), samples)
    else:
        rewards = await _custom(args, path, list(samples), samples, kwargs)
    if rewards is None:
        return [None] * len(samples)
    if not hasattr(rewards, "__len__") or isinstance(rewards, dict | str) or len(rewards) != len(samples):
        got = f"{len(rewards)} rewards" if isinstance(rewards, list | tuple) else repr(rewards)
        raise ValueError(f"--custom-rm-path {path} gave {got} for {len(samples)} samples")
    return list(rewards)


async def _custom(
    args: Args, path: str, subject: Sample | list[Sample], samples: Sequence[Sample], kwargs: dict[str, object]
) -> Any:
    """The answer of a custom function; None and ``samples`` marked when it took too long."""
    function = load_reward(path)
    deadline = getattr(function, "deadline", None)
    limit = float(deadline(args)) if deadline is not None else args.reward_timeout
    try:
        return await call_bounded(limit, args.reward_workers, function, args, subject, **kwargs)
    except RewardTimeout as error:
        for sample in samples:
            mark_unscored(sample, "timeout", f"{path}: {error}")
        return None


def _names(path: str) -> frozenset[str]:
    function = load_reward(path)
    return frozenset() if model_rm.is_model_class(function) else parameters(function)[0]


def scores_whole_groups(args: Args) -> bool:
    """Whether a group is scored in one call: ``--group-rm``, or a class-style reward model, which works in batches."""
    if args.group_rm:
        return True
    path = args.custom_rm_path
    return path is not None and bool(path) and model_rm.is_model_class(load_reward(path))


def load_reward(path: str) -> Any:
    """What ``--custom-rm-path`` names; in a bare file ``CustomRewardModel`` or the only function or class."""
    return load_function(path, "CustomRewardModel")


async def by_type(args: Args, sample: Sample) -> Any:
    """The reward by ``metadata["rm_type"]`` or ``--rm-type``, whatever ``--custom-rm-path`` says."""
    name = str(sample.metadata.get("rm_type") or args.rm_type or "").strip()
    if not name:
        raise ValueError(
            f"sample {sample.index} has no reward: give --rm-type ({', '.join(REWARD_TYPES)}), --custom-rm-path, "
            'or metadata {"rm_type": ...} in its row'
        )
    plain = name.removeprefix(_BOXED)
    if plain not in REWARD_TYPES:
        known = ", ".join(REWARD_TYPES)
        raise ValueError(
            f"unknown reward type {name!r} of sample {sample.index} (known: {known}; each also as {_BOXED}...)"
        )
    if plain in _COMPARED and sample.label is None:
        raise ValueError(f"reward type {name}: sample {sample.index} has no label to compare with (--label-key)")
    scored = sample
    if plain != name:
        scored = copy.copy(sample)
        scored.response = _boxed_only(plain, sample.response)
    result = REWARD_TYPES[plain](args, scored)
    reward = await result if inspect.isawaitable(result) else result
    if scored is not sample and scored.reward_timed_out:
        sample.reward, sample.reward_timed_out, sample.remove_sample = None, True, True
    return reward


def _boxed_only(rm_type: str, response: str) -> str:
    """The boxed part, in the form that the reward type reads: some of them look for a box themselves."""
    boxed = last_boxed(after_thinking(response))
    if boxed is None:
        return ""
    forms = {"math": f"\\boxed{{{boxed}}}", "deepscaler": response, "dapo": f"Answer: {boxed}"}
    return forms.get(rm_type, boxed)
