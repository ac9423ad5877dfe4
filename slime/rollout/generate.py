"""One request to an engine: the default generate function."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING

import numpy as np

from slime.data.sample import Sample
from slime.engines.http import HttpError
from slime.observability.best_effort import warn
from slime.observability.trace_utils import trace_span
from slime.rollout.prompts import add_media, prompt_ids, prompt_text
from slime.rollout.rm_hub.outcome import mark_too_long, says_too_long
from slime.rollout.settings import restricts_vocabulary
from slime.rollout.state import GenerateState
from slime.rollout.weight_timeline import TIMELINE
from slime.types import GenerateBody, GenerateOutput, MetaInfo, SamplingParams

if TYPE_CHECKING:
    from slime.config.args import Args

ROUTING_KEY_HEADER = "X-SMG-Routing-Key"
_UNFINISHED = "\ufffd"  # what decoders show for a part of a character
_CHARACTER_TOKENS = 16  # more than a character can be divided into


async def generate(args: Args, sample: Sample, sampling_params: SamplingParams) -> Sample:
    """Generate (the rest of) one response and append it to ``sample``, token by token as the engine sampled it.

    A sample that was aborted goes on from its tokens so far. Its length limits,
    ``max_new_tokens`` and ``--rollout-max-context-len`` (default: what the engines take), count the whole response.
    A prompt that leaves no room for an answer is not sent: its sample is left out.

    Raises:
        ValueError: the sample is finished already, or the engine gave no log-probs.
        TimeoutError: no answer within ``--sglang-router-request-timeout-secs``.
    """
    if sample.status not in (Sample.Status.PENDING, Sample.Status.ABORTED):
        raise ValueError(f"sample {sample.index} is {sample.status.value}: there is nothing left to generate")
    state = GenerateState(args)
    if not sample.num_tokens:
        sample.tokens = prompt_ids(state, sample)
        sample.pack()  # so that the answer is appended as arrays
    params = remaining(state, sample, sampling_params)
    if params is None:
        return without_room(state, sample)
    with trace_span(sample, "sglang_generate") as span:
        body, send = (build_generate_body(state, sample, params), functools.partial(ask_engine, state, sample))
        schedule = TIMELINE.get()
        try:
            output = await (send(body) if schedule is None else schedule.ask(sample, body, send))
        except HttpError as error:
            if error.status != 400 or not says_too_long(error):
                raise
            return without_room(state, sample)  # media grow in the engine
        if output is None:
            sample.status = Sample.Status.ABORTED
            return sample
        span.set(tokens=len(output["meta_info"].get("output_token_logprobs") or []))
    compare_read(state, sample, body, output["meta_info"])
    append_output(args, sample, output)
    return sample


def compare_read(state: GenerateState, sample: Sample, body: GenerateBody, meta: MetaInfo) -> None:
    """Warn, once, where an engine that tokenised a text with media itself read another number of tokens than
    ``sample`` has: the log-probs of its answer then follow other tokens than those that are trained."""
    read = meta.get("prompt_tokens")
    if "text" not in body or read is None or read == sample.num_tokens or state.warned_of_media:
        return
    state.warned_of_media = True
    warn(
        f"sample {sample.index} has media and {sample.num_tokens} tokens, but the engine, which tokenises the text of "
        f"such samples itself, read {read}: its log-probs belong to other tokens (told once). Compare the processor of "
        "--hf-checkpoint with the engine's; a continued answer or a tool's text may divide into tokens otherwise"
    )


def build_generate_body(state: GenerateState, sample: Sample, params: SamplingParams) -> GenerateBody:
    """Body of ``POST /generate`` that continues ``sample``.

    Ids; for SGLang with media text, in which it places them itself (the embedded engine takes the ids that
    the processor made).
    """
    body: GenerateBody = {"sampling_params": params, "return_logprob": True}
    add_media(body, sample)
    if sample.multimodal_inputs and not state.requests.embedded:
        body["text"] = prompt_text(state, sample) + sample.response
    else:
        body["input_ids"] = [] if (ids := sample.array("tokens")) is None else ids.tolist()
    if state.requests.returns_experts:
        body["return_routed_experts"] = True
    cuts = restricts_vocabulary(params.get("top_p"), params.get("top_k"))
    if cuts and state.requests.embedded:
        body["return_top_p_token_ids"] = True  # training scores each token over these alone; SGLang has no such list
    return body


def append_output(args: Args, sample: Sample, output: GenerateOutput) -> None:
    """Append an engine's answer: ids, log-probs, text, status, weight version, counters."""
    meta = output["meta_info"]
    scored = meta.get("output_token_logprobs")
    if scored is None:
        raise ValueError(
            f"the engine's answer for sample {sample.index} has no output_token_logprobs; "
            f"meta_info has {', '.join(sorted(meta))}"
        )
    tokens, text = np.array([item[1] for item in scored], np.int32), output["text"]
    if sample.response_length and text.startswith(_UNFINISHED):
        text = _finish_character(GenerateState(args), sample, tokens, text)
    log_probs = np.array([item[0] for item in scored], np.float64)
    if np.isnan(log_probs).any():
        raise ValueError(f"the engine gave no number as the log-prob of a token of sample {sample.index}")
    sample.append_response_tokens(args, tokens=tokens, log_probs=log_probs, meta_info=meta, text=text)


def _finish_character(state: GenerateState, sample: Sample, tokens: np.ndarray, text: str) -> str:
    """Put a character together whose bytes are divided between the response so far and an answer that continues it.

    Both parts were decoded on their own and show U+FFFD there. The character is added to ``sample.response``.

    Args:
        tokens: of the answer.
        text: of the answer.

    Returns:
        The rest of the text.
    """
    ids = sample.array("tokens")
    assert ids is not None
    before = ids[len(ids) - min(sample.response_length, _CHARACTER_TOKENS) :].tolist()
    skip = bool(state.sampling_params["skip_special_tokens"])
    kept = state.tokenizer.decode(before, skip_special_tokens=skip).rstrip(_UNFINISHED)
    rest = state.tokenizer.decode(tokens.tolist(), skip_special_tokens=skip).lstrip(_UNFINISHED)
    whole = state.tokenizer.decode([*before, *tokens.tolist()], skip_special_tokens=skip)
    if not whole.startswith(kept) or not whole.endswith(rest) or len(whole) < len(kept) + len(rest):
        return text  # not a tokenizer whose text is the sum of its tokens' bytes
    sample.response = sample.response.rstrip(_UNFINISHED) + whole[len(kept) : len(whole) - len(rest)]
    return text.lstrip(_UNFINISHED)


def get_model_url(args: Args, model_name: str | None = None, path: str = "/generate") -> str:
    """Address of the router (or the only engine); of a named model's where ``--sglang-config`` serves several."""
    routers = args.sglang_model_routers or {}
    if model_name is not None and routers:
        if model_name not in routers:
            raise ValueError(f"no model {model_name!r} is served; there are {', '.join(sorted(routers))}")
        host, port = routers[model_name]
    else:
        host, port = args.sglang_router_ip, args.sglang_router_port
    if not host or not port:
        raise ValueError("args.sglang_router_ip and args.sglang_router_port are not set: no engine has been started")
    return f"http://{host}:{port}/{path.lstrip('/')}"


def routing_headers(state: GenerateState, sample: Sample) -> dict[str, str] | None:
    """The header by which the router keeps a session on one engine, for policies that read it."""
    if sample.session_id and state.requests.has_routing_key:
        return {ROUTING_KEY_HEADER: sample.session_id}
    return None


def remaining(state: GenerateState, sample: Sample, params: SamplingParams) -> SamplingParams | None:
    """``params`` with the number of new tokens that is left to the response, or None when there is none."""
    left = int(params["max_new_tokens"]) - sample.response_length
    if state.context is not None:
        left = min(left, state.context - sample.num_tokens)
    return {**params, "max_new_tokens": left} if left > 0 else None


def without_room(state: GenerateState, sample: Sample) -> Sample:
    """The sample at its end: TRUNCATED, and left out where not even an answer could begin."""
    if sample.response_length:
        sample.status = Sample.Status.TRUNCATED
    else:
        mark_too_long(sample, state.context)
    return sample


async def ask_engine(state: GenerateState, sample: Sample, body: GenerateBody) -> GenerateOutput | None:
    """POST a body of :func:`build_generate_body`.

    Returns:
        The engine's answer; None when no engine could be reached until the rollout was over.
    """
    from slime.engines import http

    limit, headers = state.requests.timeout, routing_headers(state, sample)
    try:
        async with asyncio.timeout(limit):
            # The address is read from args in each try: a router that was lost may come back at another address.
            call = lambda: http.request("POST", get_model_url(state.args), body, limit, headers)  # noqa: E731
            output: GenerateOutput = await http.retrying(call, give_up=lambda: state.aborted)
            return output
    except http.HttpError as error:
        if state.aborted and error.retryable:
            return None
        raise
    except TimeoutError as error:
        raise TimeoutError(
            f"sample {sample.index} (group {sample.group_index}): {get_model_url(state.args)} did not answer in "
            f"{limit:g} s (--sglang-router-request-timeout-secs)"
        ) from error
