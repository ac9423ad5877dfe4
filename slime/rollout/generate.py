"""One request to an engine: the default generate function."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from slime.config.rollout import restricts_vocabulary
from slime.data.sample import Sample
from slime.engines.http import BadAnswer, HttpError, retrying
from slime.observability.files import warn
from slime.observability.trace_utils import trace_span
from slime.rollout.ends import UNFINISHED, cut_at_stop, end_text
from slime.rollout.prompts import add_media, folded_ids, prompt_ids, prompt_text
from slime.rollout.rm_hub.outcome import mark_too_long, says_too_long
from slime.rollout.state import GenerateState
from slime.rollout.weight_timeline import TIMELINE
from slime.types import GenerateBody, GenerateOutput, MetaInfo, SamplingParams

if TYPE_CHECKING:
    from slime.config.args import Args

T = TypeVar("T")
ROUTING_KEY_HEADER = "X-SMG-Routing-Key"
CHARACTER_TOKENS = 16  # more tokens than one character can be divided into


async def generate(args: Args, sample: Sample, sampling_params: SamplingParams) -> Sample:
    """Generate one response, or the rest of it, and append the token ids and log-probs of the
    engine to ``sample``.

    Generation of an aborted sample continues from its tokens so far. The limits ``max_new_tokens``
    and ``--rollout-max-context-len`` (default: the context length of the engines) apply to the
    whole response, not to one request. A prompt that leaves no room for a response is not sent, and
    its sample is excluded from training.

    Args:
        sample: A PENDING or ABORTED sample. It is changed in place.
        sampling_params: SGLang's sampling parameters.

    Returns:
        ``sample``, with status COMPLETED, TRUNCATED or ABORTED.

    Raises:
        ValueError: The sample is already finished.
        BadAnswer: What the engine answered was no answer, :data:`~slime.engines.http.BAD_ANSWERS`
            times.
        TimeoutError: The engine did not reply within ``--sglang-router-request-timeout-secs``.
        HttpError: The engine refused the request.
    """
    return await respond(GenerateState(args), sample, sampling_params, _ask_on_schedule)


# The rollout loop discards what other functions return after an abort: it may have been cut short.
generate.reports_aborts = True  # type: ignore[attr-defined]


Ask = Callable[[GenerateState, Sample, GenerateBody], Awaitable[GenerateOutput | None]]
"""Sends a body and returns the engine's reply, or None if the rollout was aborted before one
came.
"""


async def respond(
    state: GenerateState, sample: Sample, sampling_params: SamplingParams, ask: Ask
) -> Sample:
    """Do what :func:`generate` says, with a request that ``ask`` sends."""
    if sample.status not in (Sample.Status.PENDING, Sample.Status.ABORTED):
        raise ValueError(
            f"sample {sample.index} is {sample.status.value}: there is nothing left to generate"
        )
    if not sample.num_tokens:
        sample.tokens = prompt_ids(state, sample)
        # the response is then appended as arrays, which need far less memory than lists
        sample.pack()
    params = remaining(state, sample, sampling_params)
    if params is None:
        return without_room(state, sample)
    # The request, and the three ways in which it can end without a response.
    body = build_generate_body(state, sample, params)
    with trace_span(sample, "sglang_generate") as span:
        try:
            output = await ask(state, sample, body)
        except HttpError as error:
            if error.status != 400 or not says_too_long(error):
                raise
            # With media, the engine may count more tokens than the sample has, so only it knows the
            # real length.
            return without_room(state, sample)
        if output is None:
            sample.status = Sample.Status.ABORTED
            return sample
        span.set(tokens=len(output["meta_info"].get("output_token_logprobs") or []))
    # The reply.
    compare_read(state, sample, body, output["meta_info"])
    append_output(state, sample, output, params)
    return sample


async def _ask_on_schedule(
    state: GenerateState, sample: Sample, body: GenerateBody
) -> GenerateOutput | None:
    schedule = TIMELINE.get()
    if schedule is None:
        return await ask_engine(state, sample, body)
    return await schedule.ask(sample, body, functools.partial(ask_engine, state, sample))


def compare_read(state: GenerateState, sample: Sample, body: GenerateBody, meta: MetaInfo) -> None:
    """Warn once if the engine read another number of prompt tokens than ``sample`` has.

    This can happen only to samples with media, whose placeholders SGLang repeats itself, or whose
    text it tokenizes. The log-probs of its response then have another context than the tokens that
    are trained.
    """
    read = meta.get("prompt_tokens")
    if (
        not sample.multimodal_inputs
        or read is None
        or read == sample.num_tokens
        or state.warned_of_media
    ):
        return
    state.warned_of_media = True
    hint = (
        ". A continued response or a tool's text may be tokenized differently"
        if "text" in body
        else ""
    )
    warn(
        f"sample {sample.index} has media and {sample.num_tokens} tokens, but the engine, which "
        f"inserts the tokens of media itself, read {read}: its log-probs belong to other tokens. "
        f"Compare the processor of --hf-checkpoint with the engine's{hint}"
    )


def build_generate_body(
    state: GenerateState, sample: Sample, params: SamplingParams
) -> GenerateBody:
    """Build the body of the ``POST /generate`` request that continues ``sample``.

    The body contains token ids. SGLang repeats the placeholders of media itself, so it gets the ids
    with one of them for each image (:func:`~slime.rollout.prompts.folded_ids`), or text where that
    is not possible. The embedded engine always gets the ids that the processor made.
    """
    body: GenerateBody = {"sampling_params": params, "return_logprob": True}
    add_media(body, sample)
    folds = bool(sample.multimodal_inputs) and not state.requests.embedded
    if not folds:
        body["input_ids"] = [] if (ids := sample.array("tokens")) is None else ids.tolist()
    elif (folded := folded_ids(state, sample)) is not None:
        body["input_ids"] = folded
    else:
        body["text"] = prompt_text(state, sample) + sample.response
    if state.requests.adapter is not None:
        body["lora_path"] = state.requests.adapter
    if state.requests.returns_experts:
        body["return_routed_experts"] = True
    cuts = restricts_vocabulary(params.get("top_p"), params.get("top_k"))
    if cuts and state.requests.embedded:
        # Training normalizes each token over the kept part of the vocabulary. SGLang cannot report
        # that part.
        body["return_top_p_token_ids"] = True
    return body


def append_output(
    state: GenerateState,
    sample: Sample,
    output: GenerateOutput,
    params: SamplingParams | None = None,
) -> None:
    """Append an engine's reply to ``sample``: token ids, log-probs, text, status, weight version
    and counters.

    The token that ends the response is appended, but its text is not.

    Args:
        params: The parameters of the request. A reply that continues an interrupted response is cut
            at a stop string of theirs that is divided between the two.
    """
    # What the interruption divided is joined first: a stop string, then a character.
    if params is not None and sample.response_length and sample.status is Sample.Status.ABORTED:
        known = sample.array("tokens")
        assert known is not None
        response = known[len(known) - sample.response_length :].tolist()
        output = cut_at_stop(state.tokenizer, response, output, params)
    meta = output["meta_info"]
    scored = meta.get("output_token_logprobs") or []
    tokens = np.array([item[1] for item in scored], np.int32)
    text = output["text"]
    if sample.response_length and (
        text.startswith(UNFINISHED) or sample.response.endswith(UNFINISHED)
    ):
        text = _finish_character(state, sample, tokens, text)
    # The token that ended the response is trained, but its text is not part of what the model said.
    finish = meta.get("finish_reason")
    kind = finish.get("type") if isinstance(finish, Mapping) else finish
    if text and len(tokens) and kind in ("stop", "length") and state.args.hf_checkpoint:
        text = text.removesuffix(end_text(state, int(tokens[-1]), kind == "stop"))
    log_probs = np.array([item[0] for item in scored], np.float64)
    sample.append_response_tokens(
        state.args, tokens=tokens, log_probs=log_probs, meta_info=meta, text=text
    )


def _finish_character(state: GenerateState, sample: Sample, tokens: np.ndarray, text: str) -> str:
    """Join a character whose bytes are split between the response so far and a reply that continues
    it.

    The first part contains U+FFFD in place of the character. So does the second one if it was
    decoded separately; SGLang decodes it together with the ids before it, and leaves the character
    out. The complete character is appended to ``sample.response``.

    Args:
        tokens: The token ids of the reply.
        text: The text of the reply.

    Returns:
        The text of the reply after the joined character.
    """
    ids = sample.array("tokens")
    assert ids is not None
    before = ids[len(ids) - min(sample.response_length, CHARACTER_TOKENS) :].tolist()
    skip = bool(state.sampling_params["skip_special_tokens"])
    kept = state.tokenizer.decode(before, skip_special_tokens=skip).rstrip(UNFINISHED)
    rest = state.tokenizer.decode(tokens.tolist(), skip_special_tokens=skip).lstrip(UNFINISHED)
    whole = state.tokenizer.decode([*before, *tokens.tolist()], skip_special_tokens=skip)
    if not whole.startswith(kept) or not whole.endswith(rest) or len(whole) < len(kept) + len(rest):
        return text  # this tokenizer's text is not the concatenation of the bytes of its tokens
    sample.response = sample.response.rstrip(UNFINISHED) + whole[len(kept) : len(whole) - len(rest)]
    return text.lstrip(UNFINISHED)


def get_model_url(
    args: Args,
    model_name: str | None = None,
    path: str = "/generate",
    *,
    endpoint: str | None = None,
) -> str:
    """Return the URL of the router, or of the engine if there is only one.

    Args:
        model_name: A model of ``--sglang-config``, if it serves several. Default: the trained
            model.
        endpoint: Another name of ``path``.

    Raises:
        ValueError: The model is not served, or no engine has been started.
    """
    routers = args.sglang_model_routers or {}
    if model_name is not None and routers:
        if model_name not in routers:
            raise ValueError(
                f"model {model_name!r} is not served; the served models are "
                f"{', '.join(sorted(routers))}"
            )
        host, port = routers[model_name]
    else:
        host = args.sglang_router_ip
        port = args.sglang_router_port
    if not host or not port:
        raise ValueError(
            "args.sglang_router_ip and args.sglang_router_port are not set: no engine has been "
            "started"
        )
    return f"http://{host}:{port}/{(path if endpoint is None else endpoint).lstrip('/')}"


def routing_headers(state: GenerateState, sample: Sample) -> dict[str, str] | None:
    """Return the header by which the router keeps a session on one engine, or None if its policy
    does not use it.
    """
    if sample.session_id and state.requests.has_routing_key:
        return {ROUTING_KEY_HEADER: sample.session_id}
    return None


def remaining(
    state: GenerateState, sample: Sample, params: SamplingParams
) -> SamplingParams | None:
    """Return ``params`` with ``max_new_tokens`` set to what is left for the response, or None if
    nothing is left.
    """
    left = int(params["max_new_tokens"]) - sample.response_length
    if state.context is not None:
        left = min(left, state.context - sample.num_tokens)
    return {**params, "max_new_tokens": left} if left > 0 else None


def without_room(state: GenerateState, sample: Sample) -> Sample:
    """Mark a sample that reached its length limit as TRUNCATED. Without any response it is excluded
    from training.
    """
    if sample.response_length:
        sample.status = Sample.Status.TRUNCATED
    else:
        mark_too_long(sample, state.context)
    return sample


async def ask_engine(
    state: GenerateState, sample: Sample, body: GenerateBody
) -> GenerateOutput | None:
    """Send a body of :func:`build_generate_body`, with retries while no engine can be reached.

    Returns:
        The engine's reply, or None if no engine could be reached before the rollout was aborted.

    Raises:
        HttpError: The engine refused the request.
        TimeoutError: The engine did not reply within ``--sglang-router-request-timeout-secs``,
            retries included.
    """
    from slime.engines import http

    limit = state.requests.timeout
    headers = routing_headers(state, sample)

    async def call() -> GenerateOutput:
        # read from args in each attempt: a restarted router may have another address
        url = get_model_url(state.args)
        answer = await http.request("POST", url, body, limit, headers, form=dict)
        if problem := answer_problem(answer, state.requests.vocabulary) or _version_problem(
            state, answer
        ):
            raise BadAnswer(f"POST {url} answered 200, but {problem}")
        return cast(GenerateOutput, answer)

    return await with_retries(state, sample, call)


def answer_problem(answer: object, vocabulary: int | None, part: bool = False) -> str:
    """Return what keeps an answer to ``POST /generate`` from being one; empty if nothing does.

    Args:
        vocabulary: The number of token ids of the model, if it is known.
        part: Whether it is a part of a streamed answer, which may have no end yet.
    """
    # The form of the answer.
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if (
        not isinstance(answer, dict)
        or not isinstance(meta, dict)
        or not isinstance(answer.get("text"), str)
    ):
        return f"without text or meta_info: {str(answer)[:200]}"
    finish = meta.get("finish_reason")
    kind = finish.get("type") if isinstance(finish, dict) else None
    if not isinstance(kind, str) and not (part and finish is None):
        return f"its finish_reason is {finish!r}"
    # Tokens and log-probs, which are trained as they are: each id must be one of the model, each
    # log-prob a number.
    scored = meta.get("output_token_logprobs")
    if scored is None and not part and kind != "abort":
        return f"it has no output_token_logprobs; its meta_info has {', '.join(sorted(meta))}"
    scored = scored or []
    try:
        ids = [item[1] for item in scored]
        log_probs = np.array([item[0] for item in scored], np.float64)
        wrong = [
            token
            for token in ids
            if type(token) is not int or not 0 <= token < (vocabulary or 2**31)
        ]
    except (TypeError, ValueError, LookupError):
        return (
            f"its output_token_logprobs are no pairs of a log-prob and an id: {str(scored)[:200]}"
        )
    if wrong:
        return f"its token id {wrong[0]} is none of the {vocabulary or 2**31} of the model"
    if np.isnan(log_probs).any():
        return f"the log-prob of its token {int(np.isnan(log_probs).argmax())} is null or NaN"
    # Two lists of the same tokens must agree.
    sampled = answer.get("output_ids")
    # An engine may count a token of an aborted request that it has not scored.
    if sampled and not part and kind != "abort" and len(sampled) != len(ids):
        return f"it has {len(sampled)} tokens and {len(ids)} log-probs"
    return ""


def _version_problem(state: GenerateState, answer: Mapping[str, Any]) -> str:
    """Return a text if the answer comes from older weights than another one. Between two updates of
    the synchronous loop all engines have the same weights, which answers of the asynchronous loop
    need not have."""
    attempt, _, step = str(answer["meta_info"].get("weight_version")).partition(".")
    if TIMELINE.get() is not None or state.schedule is not None or not (attempt + step).isdigit():
        return ""
    weights = int(attempt), int(step or 0)
    newest = state.weights_seen = max(state.weights_seen, weights)
    return (
        ""
        if weights == newest
        else f"with the weights {attempt}.{step}, older than {newest[0]}.{newest[1]}"
    )


async def with_retries(
    state: GenerateState, sample: Sample, call: Callable[[], Awaitable[T]]
) -> T | None:
    """Await ``call``, which sends a request for ``sample``, with retries while no engine can be
    reached.

    Returns:
        Its result, or None if no engine could be reached before the rollout was aborted.

    Raises:
        HttpError: The engine refused the request.
        TimeoutError: The engine did not reply within ``--sglang-router-request-timeout-secs``,
            retries included.
    """
    try:
        async with asyncio.timeout(state.requests.timeout):
            return await retrying(call, give_up=lambda: state.aborted)
    except HttpError as error:
        if state.aborted and error.retryable:
            return None
        raise
    except TimeoutError as error:
        raise TimeoutError(
            f"sample {sample.index} (group {sample.group_index}): {get_model_url(state.args)} did "
            f"not reply within {state.requests.timeout:g} s (--sglang-router-request-timeout-secs)"
        ) from error
