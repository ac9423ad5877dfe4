"""Generation outside of training rollouts: evaluations on all data sets, and responses to single
prompts.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import orjson

from slime.data.dataset import Dataset
from slime.data.eval_config import EvalDatasetConfig, resolve_eval_datasets
from slime.data.rewards import reward_number
from slime.data.sample import Group, Message, Sample, flatten
from slime.data.source import deep_copy
from slime.engines.http import HttpError
from slime.observability import progress
from slime.rollout.base_types import EvalResults, RolloutFnEvalOutput
from slime.rollout.generate import generate
from slime.rollout.group import gather_all, generate_to_the_end, snapshot
from slime.rollout.rm_hub.outcome import RAISED, check_raised, failure
from slime.rollout.state import GenerateState, seeded
from slime.types import SamplingParams

if TYPE_CHECKING:
    from slime.config.args import Args


async def eval_rollout(args: Args, rollout_id: int) -> RolloutFnEvalOutput:
    """Generate and score ``n_samples_per_eval_prompt`` samples for each prompt of each data set.

    The seed of a sample depends on the run seed, the name of the data set, the prompt and the
    position of the sample in its group, so evaluations at different steps differ only in the
    weights.

    Returns:
        The results of each data set, in the order of its file; see
        :class:`~slime.rollout.base_types.EvalResults`. The reward of a fan-out is the mean over its
        samples.

    Raises:
        TimeoutError: The evaluation did not finish within ``--phase-timeout``.
        RuntimeError: The reward raised too many exceptions (``--reward-max-error-share``).
    """
    state = GenerateState(args)
    state.eval_rollout_id = rollout_id
    # All groups of all data sets run at once; the semaphore of the state limits the requests.
    plans = [(config, eval_groups(state, config)) for config in resolve_eval_datasets(args)]
    tasks = {
        config.name: [asyncio.ensure_future(_generated(state, group, config)) for group in groups]
        for config, groups in plans
    }
    await _all([task for part in tasks.values() for task in part], args.phase_timeout)
    done = {name: [task.result() for task in part] for name, part in tasks.items()}
    for name, groups in done.items():
        samples = flatten(groups)
        raised = sum(failure(sample) == RAISED for sample in samples)
        check_raised(
            f"evaluation {name}", samples, raised, args.reward_max_error_share, len(samples)
        )
    key = args.eval_reward_key or args.reward_key
    return RolloutFnEvalOutput(
        data={config.name: _results(config, done[config.name], key) for config, _ in plans}
    )


async def _generated(state: GenerateState, group: Group, config: EvalDatasetConfig) -> Group:
    params = state.stopping_at_media(eval_sampling_params(config))
    purpose = f"eval {config.name}"
    return await generate_to_the_end(
        state, group, snapshot(group), params, evaluation=True, purpose=purpose
    )


async def _all(tasks: list[asyncio.Task[Group]], limit: float) -> None:
    """Wait for all tasks and report progress. The first error cancels the others and propagates."""
    deadline = time.monotonic() + limit
    pending: set[asyncio.Task[Group]] = set(tasks)
    try:
        while pending:
            progress.report("eval", len(tasks) - len(pending), len(tasks))
            done, pending = await asyncio.wait(
                pending,
                timeout=max(deadline - time.monotonic(), 0.0),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not done:
                raise TimeoutError(
                    f"the evaluation did not finish within {limit:g} s (--phase-timeout): "
                    f"{len(pending)} of {len(tasks)} prompts are unfinished"
                )
            for task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def eval_groups(state: GenerateState, config: EvalDatasetConfig) -> list[Group]:
    """Make new samples for all prompts of a data set. The file is read only once per run."""
    groups = []
    of_run = EvalDatasetConfig.from_args(state.args)
    count = config.n_samples_per_eval_prompt or 1
    for i, prompt in enumerate(_dataset(state, config).samples):
        group: Group = []
        for k in range(count):
            sample = deep_copy(prompt)
            sample.group_index = i
            sample.index = i * count + k
            _override(config, sample, of_run)
            group.append(sample)
        groups.append(group)
    return groups


def eval_sampling_params(config: EvalDatasetConfig) -> SamplingParams:
    """Return SGLang's sampling parameters for a data set."""
    assert config.max_response_len is not None, (
        "resolve_eval_datasets fills in what a data set does not set"
    )
    params: SamplingParams = {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "max_new_tokens": config.max_response_len,
        "stop": config.stop,
        "stop_token_ids": config.stop_token_ids,
        "skip_special_tokens": bool(config.skip_special_tokens),
        "no_stop_trim": True if config.no_stop_trim is None else config.no_stop_trim,
        "spaces_between_special_tokens": False,
    }
    if config.min_new_tokens is not None:
        params["min_new_tokens"] = config.min_new_tokens
    if config.repetition_penalty is not None:
        params["repetition_penalty"] = config.repetition_penalty
    return params


def _override(config: EvalDatasetConfig, sample: Sample, of_run: EvalDatasetConfig) -> None:
    """Set the reward, generate function and metadata of the data set on a sample, if they differ
    from those of the run.

    The sample carries them because training and evaluation go through the same functions with the
    same ``args``.
    """
    sample.metadata.update(config.metadata_overrides)
    if config.rm_type and config.rm_type != of_run.rm_type:
        sample.metadata.setdefault("rm_type", config.rm_type)
    if config.custom_rm_path != of_run.custom_rm_path:
        sample.custom_rm_path = config.custom_rm_path
    if config.custom_generate_function_path != of_run.custom_generate_function_path:
        sample.generate_function_path = config.custom_generate_function_path


def _dataset(state: GenerateState, config: EvalDatasetConfig) -> Dataset:
    key = orjson.dumps([state.args.hf_checkpoint, asdict(config)], default=str)
    if key not in state.eval_datasets:
        make = config.prompt_maker()
        if make.apply_chat_template or make.max_length is not None:
            make.tokenizer = state.tokenizer
        make.load_processor = lambda: state.processor
        state.eval_datasets[key] = Dataset(config.path, make=make)
    return state.eval_datasets[key]


def _results(config: EvalDatasetConfig, groups: list[Group], reward_key: str | None) -> EvalResults:
    # the samples of a fan-out count as one
    rollouts = [flatten([entry]) for group in groups for entry in group]
    rewards = [[eval_reward(sample, reward_key) for sample in rollout] for rollout in rollouts]
    known = [[reward for reward in part if not math.isnan(reward)] for part in rewards]
    return {
        "rewards": [sum(part) / len(part) if part else math.nan for part in known],
        "truncated": [any(sample.truncated for sample in rollout) for rollout in rollouts],
        "samples": flatten(groups),
        "n_samples_per_prompt": config.n_samples_per_eval_prompt or 1,
        "settings": {
            name: value for name, value in asdict(config).items() if value not in (None, {}, [])
        },
    }


def eval_reward(sample: Sample, key: str | None) -> float:
    """Return the reward of a sample as a number; NaN if its verifier gave no result.

    Args:
        key: The entry of a dict reward: ``--eval-reward-key``, or ``--reward-key`` if that flag is
            not set.

    Raises:
        ValueError: The reward is a dict without that entry.
    """
    reward = sample.reward
    if sample.reward_timed_out or reward is None:
        return math.nan
    if isinstance(reward, dict):
        if key is None or key not in reward:
            raise ValueError(
                f"sample {sample.index} has the reward {reward}: set --eval-reward-key to the "
                "entry to evaluate by"
            )
        reward = reward[key]
    return reward_number(sample, reward)


Prompt = str | list[Message]


class NotCompleted(ValueError):
    """A prompt or a sampling parameter was refused; nothing is wrong with the run."""


async def complete(
    state: GenerateState,
    prompts: Sequence[Prompt],
    n: int = 1,
    changes: Mapping[str, object] | None = None,
    first: int = 0,
    purpose: str = "complete",
) -> list[list[Sample]]:
    """Generate ``n`` responses to each prompt, with the sampling parameters of the run.

    Neither the user's generate function nor a reward is called. With ``--deterministic``, the same
    weights give the same responses.

    Args:
        prompts: Texts, which are sent as they are, or messages, which the chat template renders.
        changes: SGLang's sampling parameters that differ from those of the run (``temperature``,
            ``max_new_tokens``).
        first, purpose: The number of the first prompt, and the purpose, from which the seeds are
            derived.

    Returns:
        The samples of each prompt, with token ids and the engine's log-probs.

    Raises:
        NotCompleted: The chat template or the engine refused a prompt, or the engine refused a
            parameter.
    """
    args = state.args
    params = state.sampling_params.copy()
    params.update(changes or {})  # type: ignore[typeddict-item]  # the engine checks names that it does not know
    kwargs = dict(args.apply_chat_template_kwargs or {})

    async def one(place: int, position: int) -> Sample:
        group = first + place
        sample = Sample(prompt=prompts[place], group_index=group, index=group * n + position)
        sample.apply_chat_template_kwargs = kwargs
        async with state.semaphore:
            return await _answered(
                place,
                generate(args, sample, seeded(state.seed, params, sample, position, purpose)),
            )

    made = await gather_all(
        one(place, number) for place in range(len(prompts)) for number in range(n)
    )
    return [made[place * n : (place + 1) * n] for place in range(len(prompts))]


async def _answered(place: int, answer: Awaitable[Sample]) -> Sample:
    """Await a response to the prompt ``place``."""
    try:
        return await answer
    except HttpError as error:
        if error.retryable:
            raise
        raise NotCompleted(str(error)) from error
    except (TypeError, ValueError) as error:
        raise NotCompleted(f"prompt {place}: {type(error).__name__}: {error}") from error
