"""Which reward a sample gets, and getting it.

Precedence: the sample's own ``custom_rm_path`` (per data set in evaluation), ``--custom-rm-path``,
``metadata["rm_type"]``, ``--rm-type``. A ``boxed_`` prefix scores the last boxed part of the response.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from slime.config.hooks import load_function
from slime.data.sample import Sample
from slime.rollout.hooks import call
from slime.rollout.rm_hub import dapo, f1, gpqa, ifbench, last_number, math, model_rm, random_rm, remote_rm
from slime.rollout.rm_hub.text import last_boxed

REWARD_TYPES: dict[str, Callable[[Any, Sample], Any]] = {
    "math": math.math_reward,
    "deepscaler": math.deepscaler_reward,
    "dapo": lambda args, sample: dapo.dapo_reward(sample),
    "f1": lambda args, sample: f1.f1_reward(sample),
    "gpqa": lambda args, sample: gpqa.gpqa_reward(sample),
    "ifbench": ifbench.ifbench_reward,
    "last_number": lambda args, sample: last_number.last_number_reward(sample),
    "remote_rm": remote_rm.remote_reward,
    "random": random_rm.random_reward,
}
_BOXED = "boxed_"


async def async_rm(args: Any, sample: Sample, **kwargs: Any) -> Any:
    """The reward of one sample: a float or a dict; None (and the sample marked) when its verifier gave no answer.

    Raises:
        ValueError: no reward is configured, or an unknown type.
    """
    path = sample.custom_rm_path or getattr(args, "custom_rm_path", None)
    if path:
        function = load_reward(path)
        if model_rm.is_model_class(function):
            return (await model_rm.model_rewards(args, function, [sample]))[0]
        return await call(function, args, sample, **kwargs)
    return await _by_type(args, sample)


async def batched_async_rm(args: Any, samples: Sequence[Sample], **kwargs: Any) -> list[Any]:
    """Rewards of several samples, in their order: one call of ``--custom-rm-path`` with the list, else each by itself.

    Raises:
        ValueError: the hook gave another number of rewards than samples.
    """
    path = getattr(args, "custom_rm_path", None)
    if not path or any(sample.custom_rm_path for sample in samples):
        return list(await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples)))
    function = load_reward(path)
    if model_rm.is_model_class(function):
        rewards = await model_rm.model_rewards(args, function, samples)
    else:
        rewards = list(await call(function, args, list(samples), **kwargs))
    if len(rewards) != len(samples):
        raise ValueError(f"--custom-rm-path {path} gave {len(rewards)} rewards for {len(samples)} samples")
    return rewards


def scores_whole_groups(args: Any) -> bool:
    """Whether a group is scored in one call: ``--group-rm``, or a class-style reward model, which works in batches."""
    if getattr(args, "group_rm", False):
        return True
    path = getattr(args, "custom_rm_path", None)
    return path is not None and bool(path) and model_rm.is_model_class(load_reward(path))


def load_reward(path: str) -> Any:
    """What ``--custom-rm-path`` names; in a bare file ``CustomRewardModel`` or the only function or class."""
    return load_function(path, "CustomRewardModel")


async def _by_type(args: Any, sample: Sample) -> Any:
    name = str(sample.metadata.get("rm_type") or getattr(args, "rm_type", None) or "").strip()
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
    boxed = last_boxed(response)
    if boxed is None:
        return ""
    return {"math": f"\\boxed{{{boxed}}}", "deepscaler": response}.get(rm_type, boxed)
