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
from slime.rollout.generate import generate
from slime.rollout.hooks import accepted, call, parameters
from slime.rollout.prompts import encode
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
    prompt = _prepare(sample)
    result = await call(fn, args, sample, params, **accepted(fn, evaluation=evaluation))
    return _finish_all(fn, args, sample, prompt, result)


async def call_list(fn: Callable[..., Any], args: Any, samples: list[Sample], evaluation: bool) -> list[Generated]:
    """Call the list form on the samples of one prompt; None means that it changed them in place."""
    prompts = [_prepare(sample) for sample in samples]
    result = await call(fn, args, list(samples), **accepted(fn, evaluation=evaluation))
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
        sample.loss_mask = []  # so that ``sample.loss_mask += [...]`` works
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
    if fn is generate:
        return result
    for part in flatten(result):
        _finish(fn, args, part, prompt)
    if isinstance(result, list) and len(result) > 1:
        _share_rollout_id(fn, asked, result)
    return result


def _finish(fn: Callable[..., Any], args: Any, sample: Sample, prompt: str | list[dict[str, Any]]) -> None:
    """Fill in what the function left out, and check that per-token fields are aligned."""
    conversation = sample.prompt
    if isinstance(prompt, list) and isinstance(conversation, list) and conversation[: len(prompt)] == prompt:
        sample.prompt = prompt  # turns were appended to it
    if not sample.response_length:
        _from_text(fn, args, sample, conversation)
    if not sample.loss_mask:
        sample.loss_mask = None
    if sample.status is Sample.Status.PENDING:
        sample.status = Sample.Status.COMPLETED
    for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs"):
        values = getattr(sample, name)
        if values is not None and len(values) != sample.response_length:
            raise ValueError(
                f"generate function {_name(fn)}: sample {sample.index} has {len(values)} entries in {name}, "
                f"but response_length is {sample.response_length}"
            )
    if len(sample.tokens) < sample.response_length:
        raise ValueError(
            f"generate function {_name(fn)}: sample {sample.index} has {len(sample.tokens)} tokens, "
            f"fewer than its response_length {sample.response_length}"
        )
    if sample.response_length and not sample.response:
        sample.response = GenerateState(args).tokenizer.decode(sample.tokens[-sample.response_length :])


def _from_text(fn: Callable[..., Any], args: Any, sample: Sample, conversation: str | list[dict[str, Any]]) -> None:
    """Token ids of a sample for which only text was set. No engine log-probs then: the trainer computes its own."""
    if sample.status is Sample.Status.ABORTED:
        return
    if fn not in _warned:
        _warned.add(fn)
        logger.warning(
            "generate function %s sets no tokens: its text is tokenised here, and the trainer recomputes the old "
            "log-probs. Text that is tokenised again can differ from what the engine sampled; set tokens, "
            "response_length and rollout_log_probs (Sample.append_response_tokens) to train on exactly that.",
            _name(fn),
        )
    tokenizer = GenerateState(args).tokenizer
    prompt, response, mask = conversation_ids(tokenizer, sample, conversation)
    if not response:  # an empty answer: its only token is the end
        response, mask = (
            ([tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else encode(tokenizer, "\n")),
            [1],
        )
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
        sibling.group_index = asked.group_index if sibling.group_index is None else sibling.group_index
        sibling.index = asked.index if sibling.index is None else sibling.index


def _name(fn: Callable[..., Any]) -> str:
    return f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', fn)}"
