"""Call users' generate functions, and complete and check the samples that they return.

A generate function has one of two forms:

* ``async fn(args, sample, sampling_params[, evaluation]) -> Sample | list[Sample]`` generates one
  sample. A list means that the sample fanned out.
* ``async fn(args, samples[, evaluation])``, the list form, generates all samples of a prompt at
  once.

The form is recognized by the name of the parameter, ``sample`` or ``samples``.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from slime.config.hooks import load_function
from slime.data.sample import Message, Sample, flatten
from slime.data.token_fields import UnsetMask, is_unset, take_arrays
from slime.engines.http import HttpError
from slime.rollout.base_types import call, function_name, parameters, supported_kwargs
from slime.rollout.ends import text_of
from slime.rollout.generate import generate
from slime.rollout.prompts import encode, prompt_ids, render, render_first
from slime.rollout.rm_hub.outcome import mark_raised, mark_too_long, plain_reward, says_too_long
from slime.rollout.state import GenerateState
from slime.types import SamplingParams, Tokenizer

if TYPE_CHECKING:
    from slime.config.rollout import RolloutConfig

logger = logging.getLogger(__name__)
Generated = Sample | list[Sample]
_warned: set[Callable[..., Any]] = set()


def generate_function(rollout: RolloutConfig, sample: Sample) -> Callable[..., Any]:
    """Return the generate function of the sample if it has one, otherwise that of the run,
    otherwise the default.
    """
    path = sample.generate_function_path or rollout.custom_generate_function_path
    return load_function(path, "custom_generate") if path else generate


def takes_list(fn: Callable[..., object]) -> bool:
    """Whether ``fn`` has the list form."""
    names, _ = parameters(fn)
    return "samples" in names and "sampling_params" not in names


async def call_single(
    fn: Callable[..., object],
    state: GenerateState,
    sample: Sample,
    params: SamplingParams,
    evaluation: bool,
) -> Generated:
    """Call the one-sample form, and complete and check its result. What the function raises costs
    the sample.

    Raises:
        TypeError: The function returned neither a Sample nor a list of them.
        ValueError: The fields of a returned sample do not fit together.
    """
    # the default appends tokens itself and needs neither a copy of the prompt nor checks
    if fn is generate:
        return await generate(state.args, sample, params)
    prompt = _prepare(sample)
    media = sample.multimodal_inputs
    try:
        result = await call(
            fn,
            state.args,
            sample,
            params,
            threads=state.threads,
            **supported_kwargs(fn, evaluation=evaluation),
        )
    except Exception as error:
        return _failed(fn, state, error, sample, prompt, media)
    return _finish_all(fn, state, sample, prompt, result)


async def call_list(
    fn: Callable[..., object], state: GenerateState, samples: list[Sample], evaluation: bool
) -> list[Generated]:
    """Call the list form on the samples of one prompt, as :func:`call_single`. It may return None
    if it changed the samples in place.

    Raises:
        TypeError: The function returned something else than one Sample, or list of them, for each
            sample.
        ValueError: The fields of a returned sample do not fit together.
    """
    asked = [(sample, _prepare(sample), sample.multimodal_inputs) for sample in samples]
    keywords = supported_kwargs(fn, evaluation=evaluation)
    try:
        result = await call(fn, state.args, list(samples), threads=state.threads, **keywords)
    except Exception as error:
        return [_failed(fn, state, error, *of_sample) for of_sample in asked]
    result = samples if result is None else result
    if not isinstance(result, list) or len(result) != len(samples):
        got = f"{len(result)} results" if isinstance(result, list) else type(result).__name__
        raise TypeError(
            f"generate function {function_name(fn)} returned {got} for {len(samples)} samples; it must "
            "return one for each"
        )
    return [
        _finish_all(fn, state, sample, prompt, part)
        for (sample, prompt, _), part in zip(asked, result, strict=True)
    ]


def _failed(
    fn: Callable[..., object],
    state: GenerateState,
    error: Exception,
    sample: Sample,
    prompt: str | list[Message],
    media: dict[str, Any] | None,
) -> Sample:
    """Exclude a sample whose function raised, as a tool may when it reads what the model wrote, or
    let through that an engine refused it as too long; raise any other error of a request.

    It keeps the tokens of its prompt: the other samples of its group may be trained, and a batch
    holds it with them.
    """
    too_long = isinstance(error, HttpError) and error.status == 400 and says_too_long(error)
    # An engine concerns the whole rollout. Without a share for exceptions the first one is raised.
    fatal = isinstance(error, HttpError | ConnectionError) or not state.args.reward_max_error_share
    if fatal and not too_long:
        raise error
    sample.prompt = prompt
    sample.multimodal_inputs = media
    sample.reset_response()
    # the function may make the prompt
    sample.tokens = prompt_ids(state, sample) or [state.tokenizer.eos_token_id or 0]
    if too_long:
        mark_too_long(sample, state.context)
    else:
        sample.status = Sample.Status.FAILED
        mark_raised([sample], f"generate function {function_name(fn)}", error)
    return sample


def _prepare(sample: Sample) -> str | list[Message]:
    """Prepare a sample for a user function, and return a copy of its prompt.

    A function may append turns to ``sample.prompt``; with the copy, :func:`_finish` tells the
    prompt from the turns.
    """
    if sample.loss_mask is None and not sample.response_length:
        # not a mask yet, but a list, so that `sample.loss_mask += [...]` works
        sample.loss_mask = UnsetMask()
    if sample.status is Sample.Status.ABORTED and not sample.response_length:
        # Nothing was generated before the abort, so start as with a new sample: for a function that
        # sets no status, _finish turns PENDING into COMPLETED, but would leave the sample ABORTED.
        sample.status = Sample.Status.PENDING
    return copy.deepcopy(sample.prompt)


def _finish_all(
    fn: Callable[..., object],
    state: GenerateState,
    asked: Sample,
    prompt: str | list[Message],
    result: object,
) -> Generated:
    if not isinstance(result, Sample) and not (
        isinstance(result, list) and result and all(isinstance(part, Sample) for part in result)
    ):
        raise TypeError(
            f"generate function {function_name(fn)} returned {type(result).__name__}, not a Sample or a "
            "list of them"
        )
    for part in flatten(result):  # samples that the function made itself have no indices yet
        part.group_index = asked.group_index if part.group_index is None else part.group_index
        part.index = asked.index if part.index is None else part.index
        _finish(fn, state, part, prompt)
    if isinstance(result, list) and len(result) > 1:
        _share_rollout_id(fn, asked, result)
    return result


def _finish(
    fn: Callable[..., object], state: GenerateState, sample: Sample, prompt: str | list[Message]
) -> None:
    """Fill in what the function left out, and check that the per-token fields have the length of
    the response.
    """
    # The prompt stays what the data set gave; turns that the function appended to it are part of
    # the response, see split_conversation_ids.
    conversation = sample.prompt
    if (
        isinstance(prompt, list)
        and isinstance(conversation, list)
        and conversation[: len(prompt)] == prompt
    ):
        sample.prompt = prompt
    if sample.status is Sample.Status.PENDING:
        sample.status = Sample.Status.COMPLETED
    sample.reward = plain_reward(sample.reward)
    try:
        take_arrays(sample)
    except ValueError as error:
        raise ValueError(
            f"generate function {function_name(fn)}: sample {sample.index}: {error}"
        ) from error
    # A function may have set only text, which is then tokenized here.
    only_text = not sample.response_length and (sample.response or not sample.num_tokens)
    if only_text and sample.status is not Sample.Status.ABORTED:
        _from_text(fn, state, sample, conversation)
    # Lengths that do not fit are an error of the function, unless an abort interrupted it.
    problem = _misaligned(sample)
    if problem and sample.status is Sample.Status.ABORTED:
        # the abort interrupted the function while it filled the sample: generate it again
        sample.reset_response()
        sample.status = Sample.Status.ABORTED
        return
    if problem:
        raise ValueError(
            f"generate function {function_name(fn)}: sample {sample.index} has {problem}"
        )
    # An unset mask means that all tokens are trained. The text follows from the tokens if it is
    # missing.
    if is_unset(vars(sample)["loss_mask"]) or not sample.response_length:
        sample.loss_mask = None
    if sample.response_length and not sample.response:
        response = sample.tokens[-sample.response_length :]
        sample.response = text_of(state.tokenizer, state.end_token_ids, response)


def _misaligned(sample: Sample) -> str | None:
    """Describe what is wrong with the lengths of the per-token fields; None if they are
    consistent.
    """
    length = sample.response_length
    fields = vars(sample)
    for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs"):
        values = fields[name]
        if values is None or len(values) == length or (name == "loss_mask" and is_unset(values)):
            continue
        problem = f"{len(values)} entries in {name}, but response_length is {length}"
        if name == "loss_mask" and not len(values):
            problem += (
                ": an empty mask does not mean that all tokens are trained. Let "
                "append_response_tokens fill sample.loss_mask, set one entry per response token, "
                "or set None to train on all of them"
            )
        return problem
    if sample.num_tokens < length:
        return f"{sample.num_tokens} tokens, fewer than its response_length {length}"
    return None


def _from_text(
    fn: Callable[..., object],
    state: GenerateState,
    sample: Sample,
    conversation: str | list[Message],
) -> None:
    """Set the token ids of a sample for which only text was set.

    It has no engine log-probs, since they would not belong to these tokens: the trainer computes
    the old log-probs.
    """
    if sample.response and fn not in _warned:
        _warned.add(fn)
        logger.warning(
            "generate function %s sets no tokens, so its text is tokenized again, and the "
            "trainer recomputes the old log-probs. The new tokens can differ from those that the "
            "engine sampled. To train on exactly those, set tokens, response_length and "
            "rollout_log_probs (with Sample.append_response_tokens).",
            function_name(fn),
        )
    prompt, response, mask = split_conversation_ids(state.tokenizer, sample, conversation)
    sample.tokens = prompt + response
    sample.response_length = len(response)
    sample.loss_mask = None if all(mask) else mask
    sample.rollout_log_probs = None


def _share_rollout_id(fn: Callable[..., object], asked: Sample, siblings: Sequence[Sample]) -> None:
    # The samples of a fan-out count as one rollout in the loss, so they must share a rollout_id.
    rollout_ids = {sibling.rollout_id for sibling in siblings}
    if rollout_ids == {None}:
        # the data source numbers only groups; the conversion gives them a new id
        if asked.index is None:
            return
        rollout_ids = {asked.index}
    if len(rollout_ids) != 1 or None in rollout_ids:
        raise ValueError(
            f"generate function {function_name(fn)}: samples of a fan-out have different rollout_ids "
            f"{rollout_ids}; set one for all"
        )
    for sibling in siblings:
        (sibling.rollout_id,) = rollout_ids


def split_conversation_ids(
    tokenizer: Tokenizer, sample: Sample, conversation: str | list[Message]
) -> tuple[list[int], list[int], list[int]]:
    """Tokenize a conversation into prompt ids, response ids and the loss mask of the response.

    If the chat template does not render a conversation as a continuation of its beginning (some
    templates drop earlier reasoning), the turns belong to the prompt, and only the last response is
    trained.

    Args:
        sample: The sample with the original prompt and the last response.
        conversation: The message list as the function left it. Turns that the function appended to
            the prompt belong to the response: Assistant turns are trained, the others are masked.

    Returns:
        Prompt ids, response ids, and a mask with one entry per response id.
    """
    first = sample.prompt if isinstance(sample.prompt, str) else render_first(tokenizer, sample)
    # Turns are tokenized one by one, so that the mask is exact; a template that rewrites earlier
    # turns allows no such division.
    turns = _turns(sample, conversation)
    parts = _parts(tokenizer, sample, turns, first) if turns else []
    if parts is None:
        first = render(tokenizer, sample, [*sample.prompt, *turns])
        parts = []
    ids = []
    mask = []
    for text, trained in [*parts, (sample.response, 1)]:
        tokens = encode(tokenizer, text)
        ids += tokens
        mask += [trained] * len(tokens)
    return encode(tokenizer, first), ids, mask


def _turns(sample: Sample, conversation: str | list[Message]) -> list[Message]:
    """Return the messages that were appended to the prompt.

    If the last response was appended as well, it and everything after it are left out.
    """
    if not isinstance(conversation, list) or not isinstance(sample.prompt, list):
        return []
    turns = conversation[len(sample.prompt) :]
    answers = [i for i, message in enumerate(turns) if message.get("role") == "assistant"]
    if answers and turns[answers[-1]].get("content") == sample.response:
        del turns[answers[-1] :]
    return turns


def _parts(
    tokenizer: Tokenizer, sample: Sample, turns: list[Message], first: str
) -> list[tuple[str, int]] | None:
    """Split the text between prompt and last response into parts, each with its mask.

    Returns None if the chat template changes earlier text when a message is added, so that the
    parts would not add up to the rendered conversation.
    """
    parts: list[tuple[str, int]] = []
    messages: list[Any] = list(sample.prompt)
    text = first
    for message in turns:
        messages.append(message)
        if message.get("role") == "assistant":
            before = render(tokenizer, sample, messages[:-1])
            after = render(tokenizer, sample, messages, generation_prompt=False)
            if not before.startswith(text) or not after.startswith(before):
                return None
            parts += [(before[len(text) :], 0), (after[len(before) :], 1)]
            text = after
    before = render(tokenizer, sample, messages)
    if not before.startswith(text):
        return None
    return [*parts, (before[len(text) :], 0)]
