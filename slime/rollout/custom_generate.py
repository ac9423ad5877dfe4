"""Calling users' generate functions, and making what they return fit to train on.

Two forms: ``async fn(args, sample, sampling_params[, evaluation]) -> Sample | list[Sample]``, and the
list form ``async fn(args, samples[, evaluation])`` that works on all samples of a prompt at once,
told apart by the parameter's name.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

from slime.config.hooks import load_function
from slime.data.sample import Sample, flatten
from slime.data.token_fields import UnsetMask, is_unset, take_arrays
from slime.rollout.generate import generate
from slime.rollout.hooks import accepted, call, parameters
from slime.rollout.state import GenerateState
from slime.rollout.text_only import conversation_ids

logger = logging.getLogger(__name__)
Generated = Sample | list[Sample]
_warned: set[Callable[..., Any]] = set()


def generate_function(args: Any, sample: Sample) -> Callable[..., Any]:
    """The sample's own generate function, else the run's, else the default."""
    path = sample.generate_function_path or getattr(args, "custom_generate_function_path", None)
    return load_function(path, "custom_generate") if path else generate


def takes_list(fn: Callable[..., Any]) -> bool:
    """Whether ``fn`` has the list form."""
    names, _ = parameters(fn)
    return "samples" in names and "sampling_params" not in names


async def call_single(
    fn: Callable[..., Any], args: Any, sample: Sample, params: dict[str, Any], evaluation: bool
) -> Generated:
    """Call the one-sample form and check what it gives."""
    if fn is generate:
        return await generate(args, sample, params)
    prompt = _prepare(sample)
    threads = GenerateState(args).threads
    result = await call(fn, args, sample, params, threads=threads, **accepted(fn, evaluation=evaluation))
    return _finish_all(fn, args, sample, prompt, result)


async def call_list(fn: Callable[..., Any], args: Any, samples: list[Sample], evaluation: bool) -> list[Generated]:
    """Call the list form on the samples of one prompt; None means that it changed them in place."""
    prompts = [_prepare(sample) for sample in samples]
    threads = GenerateState(args).threads
    result = await call(fn, args, list(samples), threads=threads, **accepted(fn, evaluation=evaluation))
    result = samples if result is None else result
    if not isinstance(result, list) or len(result) != len(samples):
        got = f"{len(result)} results" if isinstance(result, list) else type(result).__name__
        raise TypeError(
            f"generate function {_name(fn)} returned {got} for {len(samples)} samples: return the list of samples"
        )
    return [
        _finish_all(fn, args, sample, prompt, part)
        for sample, prompt, part in zip(samples, prompts, result, strict=True)
    ]


def _prepare(sample: Sample) -> str | list[dict[str, Any]]:
    """Return a copy of the prompt: functions that append turns to it would change it for good."""
    if sample.loss_mask is None and not sample.response_length:
        sample.loss_mask = UnsetMask()  # so that ``sample.loss_mask += [...]`` works
    if sample.status is Sample.Status.ABORTED and not sample.response_length:
        sample.status = Sample.Status.PENDING  # nothing to go on from: functions need not set a status
    return copy.deepcopy(sample.prompt)


def _finish_all(
    fn: Callable[..., Any], args: Any, asked: Sample, prompt: str | list[dict[str, Any]], result: Any
) -> Generated:
    if not isinstance(result, Sample) and not (
        isinstance(result, list) and result and all(isinstance(part, Sample) for part in result)
    ):
        raise TypeError(
            f"generate function {_name(fn)} returned {type(result).__name__}, not a Sample or a list of them"
        )
    for part in flatten(result):  # a function may return samples that it made itself
        part.group_index = asked.group_index if part.group_index is None else part.group_index
        part.index = asked.index if part.index is None else part.index
        _finish(fn, args, part, prompt)
    if isinstance(result, list) and len(result) > 1:
        _share_rollout_id(fn, asked, result)
    return result


def _finish(fn: Callable[..., Any], args: Any, sample: Sample, prompt: str | list[dict[str, Any]]) -> None:
    """Fill in what the function left out, and check that per-token fields are aligned."""
    conversation = sample.prompt
    if isinstance(prompt, list) and isinstance(conversation, list) and conversation[: len(prompt)] == prompt:
        sample.prompt = prompt  # turns were appended to it
    if sample.status is Sample.Status.PENDING:
        sample.status = Sample.Status.COMPLETED
    try:
        take_arrays(sample)
    except ValueError as error:
        raise ValueError(f"generate function {_name(fn)}: sample {sample.index}: {error}") from error
    only_text = not sample.response_length and (sample.response or not sample.num_tokens)
    if only_text and sample.status is not Sample.Status.ABORTED:
        _from_text(fn, args, sample, conversation)
    problem = _misaligned(sample)
    if problem and sample.status is Sample.Status.ABORTED:
        sample.reset_response()  # the function was interrupted while it filled the sample in: start again
        sample.status = Sample.Status.ABORTED
        return
    if problem:
        raise ValueError(f"generate function {_name(fn)}: sample {sample.index} has {problem}")
    if is_unset(vars(sample)["loss_mask"]) or not sample.response_length:
        sample.loss_mask = None
    if sample.response_length and not sample.response:
        sample.response = GenerateState(args).tokenizer.decode(sample.tokens[-sample.response_length :])


def _misaligned(sample: Sample) -> str | None:
    """What is wrong with the lengths of the per-token fields, in words; None where they fit."""
    length, held = sample.response_length, vars(sample)
    for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs"):
        values = held[name]
        if values is None or len(values) == length or (name == "loss_mask" and is_unset(values)):
            continue
        said = f"{len(values)} entries in {name}, but response_length is {length}"
        if name == "loss_mask" and not len(values):
            said += (
                ": an empty mask is no mask for all tokens. Let append_response_tokens fill sample.loss_mask, or set "
                "one entry per response token (None trains on all of them)"
            )
        return said
    if sample.num_tokens < length:
        return f"{sample.num_tokens} tokens, fewer than its response_length {length}"
    return None


def _from_text(fn: Callable[..., Any], args: Any, sample: Sample, conversation: str | list[dict[str, Any]]) -> None:
    """Token ids of a sample for which only text was set. No engine log-probs then: the trainer computes its own."""
    if sample.response and fn not in _warned:
        _warned.add(fn)
        logger.warning(
            "generate function %s sets no tokens: its text is tokenised here, and the trainer recomputes the old "
            "log-probs. Text that is tokenised again can differ from what the engine sampled; set tokens, "
            "response_length and rollout_log_probs (Sample.append_response_tokens) to train on exactly that.",
            _name(fn),
        )
    tokenizer = GenerateState(args).tokenizer
    prompt, response, mask = conversation_ids(tokenizer, sample, conversation)
    sample.tokens, sample.response_length = prompt + response, len(response)
    sample.loss_mask = None if all(mask) else mask
    sample.rollout_log_probs = None


def _share_rollout_id(fn: Callable[..., Any], asked: Sample, siblings: Sequence[Sample]) -> None:
    given = {sibling.rollout_id for sibling in siblings}
    if given == {None}:
        given = {asked.index}
    if len(given) != 1 or None in given:
        raise ValueError(
            f"generate function {_name(fn)}: fan-out samples of one rollout have different rollout_ids {given}"
        )
    for sibling in siblings:
        sibling.rollout_id = next(iter(given))


def _name(fn: Callable[..., Any]) -> str:
    return f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', fn)}"
