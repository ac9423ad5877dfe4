"""Flags of rollouts: sampling, the context length, hooks of the rollout loop, and asynchronous
training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.config.algorithm import AlgorithmConfig, registered_loss
from slime.config.engine import readable_models
from slime.config.flag import Section, flag, hook_flag, path_flag
from slime.config.hf_config import context_length, model_config, rotary_limit
from slime.config.passthrough import given_options, programs

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.config.data import EvalConfig

DEFAULT_ROLLOUT_FUNCTION = "slime.rollout.sglang_rollout.generate_rollout"


FULLY_ASYNC_FUNCTION = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
SFT_FUNCTION = "slime.rollout.sft_rollout.generate_rollout"
FORGE_FUNCTION = "slime.rollout.forge_load.generate_rollout"
OWN_FUNCTIONS = (DEFAULT_ROLLOUT_FUNCTION, FULLY_ASYNC_FUNCTION)
"""The rollout functions that account for every group, and that can generate in rollout workers."""


def has_rewards(algorithm: AlgorithmConfig, rollout_function_path: str) -> bool:
    """Whether samples have rewards. Answers of a data set that are only imitated have none."""
    loss = registered_loss(algorithm)
    imitates = (algorithm.loss_type, rollout_function_path) == ("sft_loss", SFT_FUNCTION)
    return bool(loss.has_rewards) if loss else not imitates


@dataclass
class RolloutConfig(Section):
    _title = "rollout"

    rollout_function_path: str = flag(DEFAULT_ROLLOUT_FUNCTION, kind="hook")
    """Function that generates a rollout"""
    rollout_workers: int = flag(1, low=1)
    """Processes that generate and score, for many engines; 1 does this in the rollout manager"""
    custom_generate_function_path: str | None = hook_flag()
    """Function that generates one sample, for example over several turns or with tools. Default:
    one request to an engine"""
    max_turns: int | None = flag(low=1)
    """Maximum number of turns of a multi-turn sample, for generate functions. Default: no limit"""
    rollout_temperature: float = flag(1.0, low=0)
    """Sampling temperature of rollouts; must be above 0"""
    rollout_top_p: float = flag(1.0, above=0, high=1)
    """Nucleus sampling threshold (top-p) of rollouts. Below 1, the embedded engine with FSDP trains
    tokens over the nucleus they were sampled from"""
    rollout_top_k: int = flag(-1, low=1, off=-1)
    """Top-k: number of most likely tokens to sample from; -1 disables it"""
    allow_truncated_sampling: bool = False
    """Allow --rollout-top-p and --rollout-top-k with SGLang or Megatron, with wrong importance
    ratios"""
    rollout_max_response_len: int = flag(1024, low=1)
    """Maximum number of tokens of a response, per sample"""
    rollout_max_prompt_len: int | None = flag(low=1)
    """Maximum tokens of a prompt; longer ones are dropped. Default: --rollout-max-context-len minus
    1
    """
    rollout_max_context_len: int | None = flag(low=2)
    """Maximum number of tokens of prompt and response together. Default and upper limit: the
    context length of the engines (--sglang-context-length or the model's)"""
    rollout_skip_special_tokens: bool = False
    """Remove special tokens from the text of responses"""
    rollout_stop: list[str] | None = None
    """Strings that end a response"""
    rollout_stop_token_ids: list[int] | None = flag(low=0)
    """Token ids that end a response besides the model's own"""
    over_sampling_batch_size: int = flag(low=1, same_as="rollout_batch_size")
    """Prompts that a rollout takes at a time. Default: --rollout-batch-size"""
    dynamic_sampling_filter_path: str | None = hook_flag()
    """Function that keeps or drops a finished group, as in DAPO's dynamic sampling. Default: all
    groups are kept
    """
    partial_rollout: bool = False
    """Continue groups that a rollout aborted at its end in a later rollout"""
    mask_offpolicy_in_partial_rollout: bool = False
    """Do not train tokens of an earlier rollout or, in the fully asynchronous rollout, of earlier
    weights
    """
    rollout_sample_hook_path: list[str] = flag([], kind="repeat")
    """Function that is called with each sample before it is scored; the flag can be repeated"""
    rollout_sample_filter_path: str | None = hook_flag()
    """Function that marks samples of a finished rollout that are not to be trained"""
    rollout_all_samples_process_path: str | None = hook_flag()
    """Function that is called with all groups of a rollout, including dropped ones"""
    rollout_data_postprocess_path: str | None = hook_flag()
    """Function that is called in the trainer after advantages are computed, with the rank's
    training data
    """
    custom_rollout_log_function_path: str | None = hook_flag()
    """Function that logs the metrics of a rollout instead of the built-in one"""
    custom_eval_rollout_log_function_path: str | None = hook_flag()
    """Function that logs the metrics of an evaluation instead of the built-in one"""
    custom_convert_samples_to_train_data_path: str | None = hook_flag()
    """Function that converts samples to training data instead of the built-in one"""


@dataclass
class AsyncConfig(Section):
    _title = "asynchrony (train_async.py)"

    async_buffer_size: int = flag(1, low=1)
    """train_async.py: maximum number of rollouts that are in progress or wait while another is
    trained
    """
    max_weight_staleness: int | None = flag(low=0)
    """Maximum number of steps between the weights that sampled a token and those that train on it
    (train_async.py). Default: the bound implied by --async-buffer-size and
    --update-weights-interval"""
    replay_schedule: str | None = path_flag()
    """File schedule.jsonl of an earlier asynchronous run, to repeat that run exactly with the
    embedded engine
    """


def staleness_bound(
    buffer_size: int, update_interval: int, max_staleness: int | None = None
) -> int:
    """Return the maximum number of steps between the weights that sampled a token and the step that
    trains on it.

    With ``N`` buffered rollouts and an update every ``K`` steps: while step ``s`` trains, no
    rollout after that of step ``s + N`` is started, and the engines' weights are at most ``K - 1``
    steps older than those that ``s`` trains. This gives ``N + K - 1``.
    """
    implied = buffer_size + update_interval - 1
    return implied if max_staleness is None else min(implied, max_staleness)


def old_actor_lag(asynchrony: AsyncConfig, interval: int, fully_async: bool = False) -> int | None:
    """Return by how many weight updates a rollout of ``train_async.py`` is behind, when it is the
    first one that is trained after an update: its weights compared to those that the engines hold
    then.

    Let ``N`` be the number of buffered rollouts (``--async-buffer-size``), ``K`` the steps between
    two updates, and ``M`` the maximum age in steps (``--max-weight-staleness``). With ``M = K -
    1``, the rollout starts after the latest update before its step. With ``N = 1`` or ``M = K``, it
    starts after the update before that one, and before the previous step ends.

    Returns:
        0 or 1; None if it depends on the speed of rollouts and steps, or if groups continue across
        an update.
    """
    bound = asynchrony.max_weight_staleness
    # The rollout may not start before the update that its step needs.
    if bound is not None and bound < interval:
        return 0
    # Several rollouts are in progress then, and which of them an update interrupts depends on their
    # speed.
    several = asynchrony.async_buffer_size > 1 and (bound is None or bound > interval)
    return None if fully_async or several else 1


def is_fully_async(rollout: RolloutConfig) -> bool:
    return rollout.rollout_function_path == FULLY_ASYNC_FUNCTION


def may_use_workers(*functions: str | None) -> bool:
    """Whether rollouts or evaluations, of which these are the functions, hand groups to rollout
    workers; a user's function generates them itself.
    """
    return any(path in OWN_FUNCTIONS for path in functions)


def restricts_vocabulary(top_p: float | None, top_k: int | None) -> bool:
    """Whether tokens are sampled from a part of the vocabulary. None and a ``top_k`` below 1 do not
    restrict it.
    """
    return (top_p or 1.0) < 1 or (top_k or -1) > 0


def samples_whole_vocabulary(rollout: RolloutConfig, evaluation: EvalConfig) -> bool:
    """Whether no flag asks for top-p or top-k. Data sets of ``--eval-config`` may ask for them."""
    return not (
        restricts_vocabulary(rollout.rollout_top_p, rollout.rollout_top_k)
        or restricts_vocabulary(evaluation.eval_top_p, evaluation.eval_top_k)
        or evaluation.eval_config
    )


def trains_late(rollout: RolloutConfig, batch_size: int) -> bool:
    """Whether groups that a rollout does not need are kept for a later one, which may be any of
    those that follow.
    """
    samples_more = (rollout.over_sampling_batch_size or 0) > batch_size
    return (samples_more or rollout.partial_rollout) and not is_fully_async(rollout)


ENGINES_OWN = 8
"""Tokens of the context length that SGLang reserves for itself: 7 in 0.5.23."""


def served_context(args: Args) -> int | None:
    """Return the maximum number of tokens of prompt and response that the engines accept; None if
    it is not known.

    It is ``--sglang-context-length`` or the option of a registered engine
    (:class:`slime.config.passthrough.ProgramOptions`), or else the value in the model's config.json,
    and at most the size of the KV cache if that is given. With ``--sglang-config`` it
    is the minimum over the groups of the first model, whose router gets the requests of a rollout;
    the overrides of a group take precedence over the flags.
    """
    path: str | None = args.hf_checkpoint
    # The embedded engine computes in the rotary frequencies of the trainer, so it must also keep
    # their limit.
    if args.rollout_backend == "embedded":
        limits = [
            context_length(model_config(path), scaled=False),
            rotary_limit(model_config(path)),
            args.embedded_max_total_tokens,
        ]
    else:
        overrides: list[dict[str, Any]] = [{}]
        # without any if --sglang-config is invalid, which the checks report
        for model in readable_models(args)[:1]:
            path = model.model_path
            groups = [group for group in model.groups if group.worker_type != "placeholder"]
            overrides = [group.overrides for group in groups]
        limits = []
        registered = programs().get(args.rollout_backend)
        name = "context_length" if registered is None else registered.context_length
        for options in (
            {**given_options(vars(args), args.rollout_backend), **group} for group in overrides
        ):
            length = options.get(name)
            length = length if str(length).isdigit() else context_length(model_config(path))
            limits += [length, options.get("max_total_tokens")]
    return min((int(limit) for limit in limits if limit), default=None)


def context_limit(served: int | None, given: int | None) -> int | None:
    """Return the maximum number of tokens of prompt and response together: ``given``, the value of
    ``--rollout-max-context-len`` or ``--eval-max-context-len``, limited by what the engines accept
    (:func:`served_context`). None if there is no limit."""
    # SGLang refuses requests that would use its last tokens.
    limits = [given, None if served is None else served - ENGINES_OWN]
    return min((int(limit) for limit in limits if limit is not None), default=None)


def longest_sample(rollout: RolloutConfig, served: int | None, ranks: int = 1) -> int:
    """Return the number of tokens of the longest possible sample on one GPU. Prompts without a limit
    count as empty ones.

    Args:
        served: See :func:`served_context`.
        ranks: The number of context parallel ranks, which share a sample.
    """
    longest = rollout.rollout_max_response_len + (rollout.rollout_max_prompt_len or 0)
    limit = context_limit(served, rollout.rollout_max_context_len)
    return math.ceil((longest if limit is None else min(longest, limit)) / max(ranks, 1))


def check_rotary(rollout: RolloutConfig, served: int | None, checkpoint: str | None) -> list[str]:
    """Refuse samples of a rollout that may be longer than what the trainer computes independently
    of their batch.
    """
    limit = rotary_limit(model_config(checkpoint))
    if limit is None:
        return []
    served_limit = context_limit(served, rollout.rollout_max_context_len)
    # Without a limit of prompts, only the context of the engines bounds a sample.
    is_known = rollout.rollout_max_prompt_len is not None or (
        served_limit is not None and served_limit <= limit
    )
    if is_known and longest_sample(rollout, served) <= limit:
        return []
    return [
        f"samples may have more than {limit} tokens. Beyond that, the rotary frequencies of this "
        "model (longrope or dynamic in config.json) would change for all samples in a batch: use "
        f"--rollout-max-context-len {limit}"
    ]


def context_notice(rollout: RolloutConfig, served: int | None) -> list[str]:
    """Return a notice if the longest prompt and the longest response together exceed the context
    length.
    """
    asked = rollout.rollout_max_context_len
    limit = context_limit(served, asked)
    response = rollout.rollout_max_response_len
    if (
        limit is None
        or response is None
        or response + (rollout.rollout_max_prompt_len or 1) <= limit
    ):
        return []
    given = asked is not None and asked <= limit
    return [
        f"prompt and response can have at most {limit} tokens together "
        f"({'--rollout-max-context-len' if given else 'the context length of the engines'}): "
        f"responses are truncated there before --rollout-max-response-len {response}, and prompts "
        "that leave no room are dropped and counted"
    ]
