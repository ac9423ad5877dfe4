"""Generate and score one sample, or one group (the samples of one prompt), in this process or in a
rollout worker.
"""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from slime.config.hooks import load_function
from slime.config.seeds import derive_seed
from slime.data.sample import Group, Sample, flatten
from slime.observability.trace_utils import trace_span
from slime.rollout.abort import retry_delay
from slime.rollout.base_types import call, supported_kwargs
from slime.rollout.custom_generate import (
    Generated,
    call_list,
    call_single,
    generate_function,
    takes_list,
)
from slime.rollout.prompts import cut_at_sampled_media
from slime.rollout.rm_hub.dispatch import async_rm, batched_async_rm, scores_whole_groups
from slime.rollout.rm_hub.outcome import combine_rewards
from slime.rollout.state import EVALUATION, GenerateState, seeded
from slime.rollout.weight_timeline import TIMELINE
from slime.types import SamplingParams

if TYPE_CHECKING:
    from slime.config.args import Args

T = TypeVar("T")
TURNS = "model_turns"
"""Key of ``sample.metadata``: the position of each turn of the model, from which an aborted sample
continues.
"""
_MASKED_IN = "masked_in_rollout_id"
_FINISHED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED, Sample.Status.FAILED)


def is_finished(group: Group) -> bool:
    """Whether no sample of a group is generated further. Groups from the buffer can be finished
    before submission.
    """
    leaves = flatten(group)
    return bool(leaves) and all(sample.status in _FINISHED for sample in leaves)


def index_of(group: Group) -> float:
    """The index of the group's first sample; that of the group if the data source numbers only
    groups.
    """
    first = flatten(group)[0]
    index = first.group_index if first.index is None else first.index
    return float("inf") if index is None else index


async def generate_and_rm(
    args: Args, sample: Sample, sampling_params: SamplingParams, evaluation: bool = False
) -> Generated:
    """Generate one sample and score it. A finished sample is not generated again.

    Args:
        evaluation: Evaluations ignore the abort flag of the rollout.

    Returns:
        The sample, or a list of samples if the generate function fanned out. A sample has no reward
        if it is ABORTED, if groups are scored as a whole, or if its verifier gave no result
        (``reward_timed_out``).

    Raises:
        ValueError: The reward function returned None.
    """
    EVALUATION.set(evaluation)
    state = GenerateState(args)
    # A group from the buffer may have some finished samples.
    if sample.status in _FINISHED:
        mask_earlier_rollouts(state, sample)
        _check_scored(state, sample)
        return sample
    with trace_span(sample, "generate_and_rm"):
        async with state.semaphore:
            # Checked after the wait for the semaphore, because the rollout may have been aborted in
            # the meantime.
            if state.aborted and not evaluation:
                sample.status = Sample.Status.ABORTED
                return sample
            mask_earlier_rollouts(state, sample)
            fn = generate_function(args, sample)
            if takes_list(fn):
                result = (await call_list(fn, state, [sample], evaluation))[0]
            else:
                result = await call_single(fn, state, sample, sampling_params, evaluation)
        # Scoring is outside of the semaphore: a slow verifier must not take slots from generation.
        _abort_custom(state, fn, result, evaluation)
        return await _hooks_and_reward(state, result, evaluation)


async def generate_and_rm_group(
    args: Args,
    group: Group,
    sampling_params: SamplingParams,
    evaluation: bool = False,
    purpose: str = "sampling",
) -> Group:
    """Generate and score the samples of one prompt, each with its own sampling seed.

    Args:
        purpose: Part of the seeds and session ids, so that training and each evaluation data set
            sample independently.
    """
    EVALUATION.set(evaluation)
    state = GenerateState(args)
    _assign_sessions(state.seed, group, purpose)
    # The list form gets all samples in one call, otherwise each sample has a task.
    with trace_span(group, "generate_and_rm_group"):
        unfinished = [
            entry for entry in group if isinstance(entry, Sample) and entry.status not in _FINISHED
        ]
        functions = {generate_function(args, sample) for sample in unfinished}
        # The list form is called with whole groups only. A group that an abort left partly finished
        # is generated sample by sample, so that its finished samples stay untouched.
        fn = next(iter(functions), None)
        result: Group
        if (
            fn is not None
            and len(unfinished) == len(group)
            and len(functions) == 1
            and takes_list(fn)
        ):
            result = [*await _whole_group(fn, state, unfinished, evaluation)]
        else:
            result = await gather_all(
                generate_and_rm(
                    args,
                    entry,
                    seeded(state.seed, sampling_params, entry, position, purpose),
                    evaluation,
                )
                if isinstance(entry, Sample)
                else _same(entry)
                for position, entry in enumerate(group)
            )
        if scores_whole_groups(args) and not _is_aborted(result):
            await _score(state, flatten(result), "group_reward_model")
    for sample in flatten(result):
        combine_rewards(args, sample)
    return result


async def gather_all(tasks: Iterable[Awaitable[T]]) -> list[T]:
    """Like :func:`asyncio.gather`, but if one task fails, the others are cancelled and awaited.

    Otherwise they would keep sending requests after the rollout has failed.
    """
    running = [asyncio.ensure_future(task) for task in tasks]
    try:
        return list(await asyncio.gather(*running))
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _same(entry: list[Sample]) -> list[Sample]:
    return entry


async def _whole_group(
    fn: Callable[..., object], state: GenerateState, samples: list[Sample], evaluation: bool
) -> Sequence[Generated]:
    """Generate with the list form of a function, which gets all samples of the prompt at once."""
    async with state.semaphore:
        if state.aborted and not evaluation:
            for sample in samples:
                sample.status = Sample.Status.ABORTED
            return samples
        results = await call_list(fn, state, samples, evaluation)
    for result in results:
        _abort_custom(state, fn, result, evaluation)
    return await gather_all(_hooks_and_reward(state, result, evaluation) for result in results)


def _assign_sessions(seed: int, group: Group, purpose: str) -> None:
    """Assign session ids derived from the seed, so that a repeated run routes each session to the
    same engine.
    """
    for position, entry in enumerate(group):
        for sample in flatten(entry):
            if sample.session_id is None:
                prompt = sample.group_index or 0
                parts = [
                    derive_seed(seed, f"session {purpose} {word}", prompt, position)
                    for word in range(4)
                ]
                number = sum(part << (32 * i) for i, part in enumerate(parts))
                sample.session_id = str(uuid.UUID(int=number, version=4))


def mask_earlier_rollouts(state: GenerateState, sample: Sample) -> None:
    """For ``--mask-offpolicy-in-partial-rollout``, mask the tokens that an earlier rollout
    generated.

    Each rollout masks a sample at most once, before it generates. A later call in the same rollout
    (after an engine was lost) must not mask the tokens that this rollout has generated since.
    """
    known = (
        sample.metadata.get("start_rollout_id", state.rollout_id),
        sample.metadata.get(_MASKED_IN),
    )
    if (
        state.args.mask_offpolicy_in_partial_rollout
        and sample.response_length
        and state.rollout_id not in known
    ):
        sample.loss_mask = [0] * sample.response_length
        sample.metadata[_MASKED_IN] = state.rollout_id


def _abort_custom(
    state: GenerateState, fn: Callable[..., object], result: Generated, evaluation: bool
) -> None:
    """Mark the samples of a custom function that returned after the abort: their responses may have
    been cut short.

    Such a function may report a finished response although the abort cut it, and the response may
    just as well end with the model's end token, after which nothing may be generated. The two look
    the same, so the response is discarded, unless its turns are recorded: a
    :class:`~slime.rollout.multi_turn.Conversation` continues after a finished turn.
    """
    if getattr(fn, "reports_aborts", False) or not state.aborted or evaluation:
        return
    for sample in flatten(result):
        recorded = (
            sample.status in _FINISHED and TURNS in sample.metadata and not sample.reward_timed_out
        )
        if sample.status is not Sample.Status.ABORTED and not recorded:
            sample.reset_response()
        sample.status = Sample.Status.ABORTED


def _is_aborted(result: Generated | Group) -> bool:
    return any(sample.status is Sample.Status.ABORTED for sample in flatten(result))


async def _hooks_and_reward(state: GenerateState, result: Generated, evaluation: bool) -> Generated:
    # before the hooks and the verifier: they must see the response that is trained
    for sample in flatten(result):
        cut_at_sampled_media(state, sample)
    # the response is continued or generated again, and the hooks see it when it is complete
    if _is_aborted(result):
        return result
    if isinstance(result, list):
        result = [await _sample_hooks(state, sample, evaluation) for sample in result]
    else:
        result = await _sample_hooks(state, result, evaluation)
    # Groups that are scored as a whole get their rewards when all of their samples are there.
    if scores_whole_groups(state.args) or _is_aborted(result):
        return result
    if isinstance(result, list):
        await _score(state, result, "group_reward_model")
    elif result.reward is None and not result.reward_timed_out:
        with trace_span(result, "reward_model"):
            result.reward = await async_rm(state.args, result)
        _check_scored(state, result)
    return result


async def _sample_hooks(state: GenerateState, sample: Sample, evaluation: bool) -> Sample:
    for path in state.args.rollout_sample_hook_path:
        hook = load_function(path)
        rollout_id = state.eval_rollout_id if evaluation else state.rollout_id
        keywords = supported_kwargs(hook, rollout_id=rollout_id, evaluation=evaluation)
        answer = await call(hook, state.args, sample, threads=state.threads, **keywords)
        if answer is not None and not isinstance(answer, Sample):
            raise TypeError(
                f"sample hook {path} returned {type(answer).__name__}, but it must return None or "
                "a Sample"
            )
        sample = sample if answer is None else answer
    return sample


async def _score(state: GenerateState, samples: Sequence[Sample], span: str) -> None:
    """Score the samples that have no reward yet, in one batched call."""
    todo = [sample for sample in samples if sample.reward is None and not sample.reward_timed_out]
    if not todo:
        return
    with trace_span(todo, span):
        rewards = await batched_async_rm(state.args, todo)
    for sample, reward in zip(todo, rewards, strict=True):
        sample.reward = reward
        _check_scored(state, sample, scored=True)


def _check_scored(state: GenerateState, sample: Sample, scored: bool = False) -> None:
    args = state.args
    if (
        sample.reward is None
        and not sample.reward_timed_out
        and (scored or not scores_whole_groups(args))
    ):
        name = (
            sample.custom_rm_path
            or args.custom_rm_path
            or sample.metadata.get("rm_type")
            or args.rm_type
        )
        raise ValueError(
            f"sample {sample.index} (group {sample.group_index}) is {sample.status.value}, but "
            f"{name!r} returned None"
        )


def snapshot(group: Group) -> Group:
    """Copy a group so that generate functions, which change samples in place, cannot change the
    copy.

    Prompt and metadata are copied deeply. Media are shared, since they are large and no function
    changes them in place.
    """
    return with_copies(group, _copied)


def with_copies(group: Group, copied: Callable[[Sample], Sample]) -> Group:
    """Return a group with a copy of each sample, also of each one of a fan-out."""
    return [
        copied(entry) if isinstance(entry, Sample) else [*map(copied, entry)] for entry in group
    ]


def _copied(sample: Sample) -> Sample:
    kept = copy.copy(sample)
    kept.prompt = copy.deepcopy(sample.prompt)
    kept.metadata = copy.deepcopy(sample.metadata)
    return kept


def continuable(group: Group, original: Group, partial: bool) -> Group:
    """Return the group from which generation continues.

    Args:
        group: The group after an abort, with the tokens so far.
        original: The same group before generation.
        partial: Whether tokens are kept (``--partial-rollout``).

    Returns:
        ``group``, or ``original`` if tokens are not kept or a sample fanned out.
    """
    if not partial or not all(isinstance(entry, Sample) for entry in group):
        return original
    for sample, before in zip(flatten(group), flatten(original), strict=False):
        if sample.status is not Sample.Status.ABORTED:
            continue
        log_probs = sample.array("rollout_log_probs")
        if sample.response_length and (
            log_probs is None or len(log_probs) != sample.response_length
        ):
            # without a log-prob for every token the response so far cannot be trained
            sample.reset_response()
        if not sample.response_length and not before.response_length:
            # without the media of the response that is discarded
            sample.multimodal_inputs = before.multimodal_inputs
    return group


class GroupGenerator(Protocol):
    """Generates and scores groups. It is called on the event loop of the rollout."""

    async def generate(
        self,
        state: GenerateState,
        group: Group,
        params: SamplingParams,
        evaluation: bool = False,
        purpose: str = "sampling",
    ) -> Group:
        """Do what :func:`~slime.rollout.group.generate_and_rm_group` does.

        ``group`` itself may or may not have changed afterwards: use the returned one.
        """

    async def abort(self) -> None:
        """Let groups in progress, other than those of evaluations, end without further requests.

        The caller has set ``GenerateState.aborted``, and ends the requests that the engines work
        on.
        """


async def _generate_once(
    state: GenerateState, group: Group, params: SamplingParams, evaluation: bool, purpose: str
) -> Group:
    if state.generator is not None:
        return await state.generator.generate(
            state, group, params, evaluation=evaluation, purpose=purpose
        )
    if not evaluation:
        # A task has its own copy of the context, so this reaches the requests of this group and no
        # evaluation.
        TIMELINE.set(state.schedule)
    return await generate_and_rm_group(state.args, group, params, evaluation, purpose)


async def generate_to_the_end(
    state: GenerateState,
    group: Group,
    original: Group,
    params: SamplingParams,
    evaluation: bool = False,
    purpose: str = "sampling",
    on_continue: Callable[[Group], None] | None = None,
) -> Group:
    """Generate and score a group until it is finished, or until its rollout is aborted.

    Engines may end its requests without that (a weight update, a restart, the abort of a rollout,
    which ends all requests of an engine). Generation then continues from the tokens so far.

    Args:
        original: The group before generation.
        on_continue: Called with the group each time before it continues.
    """
    tries = 0
    while True:
        before = _tokens(group)
        group = await _generate_once(state, group, params, evaluation, purpose)
        if (state.aborted and not evaluation) or not _is_aborted(group):
            return group
        if on_continue is not None:
            on_continue(group)
        # Only attempts without progress count: frequent weight updates may interrupt a long
        # response many times.
        tries = 0 if _tokens(group) > before else tries + 1
        group = continuable(group, snapshot(original), partial=True)
        await asyncio.sleep(retry_delay(f"{purpose}: group of sample {index_of(original)}", tries))


def _tokens(group: Group) -> int:
    return sum(sample.response_length for sample in flatten(group))
