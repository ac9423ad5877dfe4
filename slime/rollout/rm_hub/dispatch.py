"""Select the reward function of a sample and call it, and check before the start that the rewards
can be used.

The first of these that is set decides: the sample's own ``custom_rm_path`` (set by a data set of an
evaluation), ``--custom-rm-path``, ``metadata["rm_type"]``, ``--rm-type``. An empty
``custom_rm_path`` of a sample means that it is scored by its type, although ``--custom-rm-path`` is
set; evaluation sets with their own type use this. The prefix ``boxed_`` of a type scores only the
last boxed part of the response. A built-in type reads the response without an end token, and what a
model says while it still reasons is not paid. A custom function must return within
``--reward-timeout``; otherwise its samples are marked as unscored and do not get the reward 0.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from inspect import isawaitable, isclass
from typing import TYPE_CHECKING, Any

from slime.config.hooks import load_function
from slime.data.eval_config import resolve_eval_datasets
from slime.data.reasoning import Tags, after_thinking, opened_by, opened_by_ids
from slime.data.sample import Sample
from slime.engines.background import ENDS_A_LOOP
from slime.registry import parts
from slime.rollout.base_types import parameters
from slime.rollout.ends import local_tokenizer, spoken
from slime.rollout.prompts import render
from slime.rollout.rm_hub.custom import (
    DEFAULT_CLASS,
    RewardTimeout,
    call_bounded,
    check_class,
    model_rewards,
)
from slime.rollout.rm_hub.outcome import (
    ABSTAINED,
    accept_rewards,
    mark_raised,
    mark_unscored,
)
from slime.rollout.rm_hub.reward import BOXED, Reward, last_boxed, reward_of

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.config.data import RewardConfig
    from slime.types import Tokenizer


async def async_rm(args: Args, sample: Sample, **kwargs: object) -> Any:
    """Score one sample.

    Returns:
        The reward, a float or a dict. None if the verifier gave no result, or the user's function
        returned None: it abstains. The sample is then marked as unscored.

    Raises:
        ValueError: No reward is configured, or its type is unknown.
    """
    path = args.custom_rm_path if sample.custom_rm_path is None else sample.custom_rm_path
    # no time limit here: that of a built-in type begins when its verifier starts, not while it is
    # queued
    if not path:
        return await by_type(args, sample)
    reward = await _call_custom(args, path, sample, [sample], kwargs)
    if isclass(load_reward(path)):  # a model returns a list, or None if it failed
        reward = reward[0] if reward else None
    return accept_rewards(path, [sample], [reward])[0]


async def batched_async_rm(args: Args, samples: Sequence[Sample], **kwargs: object) -> list[Any]:
    """Score several samples: in one call with the list of samples if the function supports it, else
    one by one.

    One call is used for ``--custom-rm-path``. It is also used if all samples name the same function
    (that of their evaluation set), ``--group-rm`` is set, and the function has no parameter named
    ``sample``.

    Returns:
        The rewards in the order of the samples, with None for each sample that was marked as
        unscored.

    Raises:
        ValueError: The function returned another number of rewards than it got samples.
    """
    # One function for all samples: that of the run, or the one that all of them name.
    path = args.custom_rm_path
    own_paths = {sample.custom_rm_path for sample in samples}
    names_none = own_paths <= {None}
    if not names_none:
        path = own_paths.pop() if len(own_paths) == 1 else None
    if not path or not (names_none or _takes_lists(args.group_rm, load_reward(path))):
        return list(await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples)))
    rewards = await _call_custom(args, path, list(samples), samples, kwargs)
    if rewards is None:
        return [None] * len(samples)
    if (
        not hasattr(rewards, "__len__")
        or isinstance(rewards, dict | str)
        or len(rewards) != len(samples)
    ):
        got = f"{len(rewards)} rewards" if isinstance(rewards, list | tuple) else repr(rewards)
        raise ValueError(f"--custom-rm-path {path} returned {got} for {len(samples)} samples")
    return accept_rewards(path, samples, rewards)


def _takes_lists(group_rm: bool, reward: Any) -> bool:
    return isclass(reward) or (group_rm and "sample" not in parameters(reward)[0])


async def _call_custom(
    args: Args,
    path: str,
    subject: Sample | list[Sample],
    samples: Sequence[Sample],
    kwargs: dict[str, object],
) -> Any:
    """Call a user's function with ``subject``, or a model class. If it takes too long, mark
    ``samples`` as unscored and return None."""
    reward = load_reward(path)
    if isclass(reward):
        responses = [
            spoken(sample, args.hf_checkpoint, args.trust_remote_code).response
            for sample in samples
        ]
        return await model_rewards(args, path, reward, samples, responses)
    # A function of slime may name another flag.
    limit = float(getattr(args, getattr(reward, "deadline", "reward_timeout")))
    try:
        return await call_bounded(limit, args.reward_workers, reward, args, subject, **kwargs)
    except RewardTimeout as error:
        for sample in samples:
            mark_unscored(sample, "timeout", f"{path}: {error}")
        return None
    # The user's code can raise anything, also by sys.exit; it costs these samples.
    except (Exception, *ENDS_A_LOOP) as error:
        mark_raised(samples, path, error)
        return None


def scores_whole_groups(reward: RewardConfig) -> bool:
    """Whether a group is scored in one call: with ``--group-rm``, or by a reward model class, which
    scores batches.
    """
    path = reward.custom_rm_path
    return reward.group_rm or (bool(path) and isclass(load_reward(str(path))))


def load_reward(path: str) -> Any:
    """Load the object that ``--custom-rm-path`` names.

    If it names only a file, the object is ``CustomRewardModel``, or the only function or class of
    the file.
    """
    return load_function(path, DEFAULT_CLASS)


async def by_type(args: Args, sample: Sample) -> Any:
    """Score a sample by ``metadata["rm_type"]`` or ``--rm-type``; ``--custom-rm-path`` is
    ignored.
    """
    name = str(sample.metadata.get("rm_type") or args.rm_type or "").strip()
    reward_type = _reward_type(name, sample)
    # What is judged: the text without end tokens, and nothing that the model said while it still
    # reasoned.
    scored = spoken(sample, args.hf_checkpoint, args.trust_remote_code)
    if not reward_type.reads_reasoning or name.startswith(BOXED):
        opened = opened_reasoning(
            local_tokenizer(args.hf_checkpoint, args.trust_remote_code), sample
        )
        if opened is not None and opened.end not in scored.response:
            scored.response = ""  # it never leaves the reasoning
    if name.startswith(BOXED):
        boxed = last_boxed(after_thinking(scored.response))
        scored.response = "" if boxed is None else reward_type.boxed(boxed, scored.response)
    # The reward of a plug-in may be async and may take the arguments or not.
    takes_args = "args" in parameters(reward_type.score)[0]
    try:
        result = reward_type.score(args, scored) if takes_args else reward_type.score(scored)
        reward = await result if isawaitable(result) else result
    except Exception as error:  # a verifier can raise anything; it costs this sample
        mark_raised([scored], name, error)
        reward = None
    if reward is None and not scored.reward_timed_out:
        mark_unscored(scored, ABSTAINED, f"{name} returned None")
    if scored.reward_timed_out:
        sample.reward = None
        sample.reward_timed_out = True
        sample.remove_sample = True
    return reward


def _reward_type(name: str, sample: Sample) -> Reward:
    """Return the reward type of a sample.

    Raises:
        ValueError: The sample has none, or an unknown one, or one that needs a label.
    """
    known = ", ".join(parts("reward"))
    if not name:
        raise ValueError(
            f"sample {sample.index} has no reward: set --rm-type ({known}), --custom-rm-path or "
            'metadata {"rm_type": ...} in its row'
        )
    reward_type = reward_of(name)
    if reward_type is None:
        raise ValueError(
            f"unknown reward type {name!r} of sample {sample.index} (known: {known}, each also "
            f"with prefix {BOXED})"
        )
    if reward_type.needs_label and sample.label is None:
        raise ValueError(
            f"reward type {name}: sample {sample.index} has no label to compare with (--label-key)"
        )
    return reward_type


def opened_reasoning(tokenizer: Tokenizer | None, sample: Sample) -> Tags | None:
    """Return the tags of the reasoning that the prompt of a sample has opened, or None.

    The tokens of the prompt decide, if the sample has them, because an agent's program writes its
    own prompts.
    """
    ids = sample.array("tokens")
    if tokenizer is not None and ids is not None and 0 < sample.response_length < len(ids):
        return opened_by_ids(tokenizer, ids[: -sample.response_length].tolist())
    if isinstance(sample.prompt, str):
        return opened_by(sample.prompt)
    if tokenizer is None or not tokenizer.chat_template:
        return None
    return opened_by(render(tokenizer, sample, sample.prompt))


def check_rewards(args: Args) -> list[str]:
    """Return one line for each reward that cannot be used.

    A function that cannot be imported is not reported here, because the check of the hooks reports
    it.
    """
    if args.loss_type == "sft_loss" or args.load_debug_rollout_data:
        return []
    rewards = [("", args.custom_rm_path)]
    with contextlib.suppress(ValueError, TypeError, OSError):  # the check of the data reports these
        rewards += [
            (f"evaluation set {one.name}: ", one.custom_rm_path)
            for one in resolve_eval_datasets(args)
        ]
    problems = [
        line
        for where, path in rewards
        if path
        for line in _class_problem(where, path, args.rm_model_path)
    ]
    reward = None if args.custom_rm_path else reward_of(args.rm_type or "")
    if reward is not None and reward.check is not None:
        problems += reward.check(args)
    return list(dict.fromkeys(problems))


def _class_problem(where: str, path: str, model_path: str | None) -> list[str]:
    try:
        function = load_reward(path)
    except BaseException:
        return []
    if not isclass(function):
        return (
            [] if callable(function) else [f"{where}--custom-rm-path {path}: it is not a function"]
        )
    try:
        check_class(function, model_path)
    except (TypeError, ValueError) as error:
        return [f"{where}--custom-rm-path {path}: {error}"]
    return []
