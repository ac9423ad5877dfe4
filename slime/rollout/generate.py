"""One request to an engine: the default generate function."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import numpy as np

from slime.data.sample import Sample
from slime.engines.http import HttpError
from slime.observability.trace_utils import trace_span
from slime.rollout.context import mark_too_long, says_too_long
from slime.rollout.prompts import media_fields, prompt_ids, prompt_text
from slime.rollout.sampling_params import cuts_off_tokens
from slime.rollout.schedule import SCHEDULE
from slime.rollout.state import GenerateState

ROUTING_KEY_HEADER = "X-SMG-Routing-Key"
_POLICIES_WITH_KEYS = ("consistent_hashing", "manual")
_REQUEST_SECONDS = 14400.0
_UNFINISHED = "\ufffd"  # what decoders show for a part of a character
_CHARACTER_TOKENS = 16  # more than a character can be divided into


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
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
    params = remaining(args, sample, sampling_params)
    if params is None:
        return without_room(args, sample)
    with trace_span(sample, "sglang_generate") as span:
        body, send = request(args, state, sample, params), functools.partial(ask_engine, args, state, sample)
        schedule = SCHEDULE.get()
        try:
            output = await (send(body) if schedule is None else schedule.ask(sample, body, send))
        except HttpError as error:
            if error.status != 400 or not says_too_long(error):
                raise
            return without_room(args, sample)  # media grow in the engine
        if output is None:
            sample.status = Sample.Status.ABORTED
            return sample
        span.set(tokens=len(output["meta_info"].get("output_token_logprobs") or []))
    append_output(args, sample, output)
    return sample


def request(args: Any, state: GenerateState, sample: Sample, params: dict[str, Any]) -> dict[str, Any]:
    """Body of ``POST /generate`` that continues ``sample``.

    Ids; for SGLang with media text, in which it places them itself (the embedded engine takes the ids that
    the processor made).
    """
    body: dict[str, Any] = {"sampling_params": params, "return_logprob": True, **media_fields(sample)}
    if sample.multimodal_inputs and getattr(args, "rollout_backend", None) != "embedded":
        body["text"] = prompt_text(state, sample) + sample.response
    else:
        body["input_ids"] = [] if (ids := sample.array("tokens")) is None else ids.tolist()
    if getattr(args, "use_rollout_routing_replay", False):
        body["return_routed_experts"] = True
    cuts = cuts_off_tokens(params.get("top_p"), params.get("top_k"))
    if cuts and getattr(args, "rollout_backend", None) == "embedded":
        body["return_top_p_token_ids"] = True  # training scores each token over these alone; SGLang has no such list
    return body


def append_output(args: Any, sample: Sample, output: dict[str, Any]) -> None:
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


def get_model_url(args: Any, model_name: str | None = None, path: str = "/generate") -> str:
    """Address of the router (or the only engine); of a named model's where ``--sglang-config`` serves several."""
    routers = getattr(args, "sglang_model_routers", None) or {}
    if model_name is not None and routers:
        if model_name not in routers:
            raise ValueError(f"no model {model_name!r} is served; there are {', '.join(sorted(routers))}")
        host, port = routers[model_name]
    else:
        host, port = args.sglang_router_ip, args.sglang_router_port
    if not host or not port:
        raise ValueError("args.sglang_router_ip and args.sglang_router_port are not set: no engine has been started")
    return f"http://{host}:{port}/{path.lstrip('/')}"


def routing_headers(args: Any, sample: Sample) -> dict[str, str] | None:
    """The header by which the router keeps a session on one engine, for policies that read it."""
    if sample.session_id and getattr(args, "router_policy", None) in _POLICIES_WITH_KEYS:
        return {ROUTING_KEY_HEADER: sample.session_id}
    return None


def request_seconds(args: Any) -> float:
    """Time limit of one request, in seconds."""
    return float(getattr(args, "sglang_router_request_timeout_secs", None) or _REQUEST_SECONDS)


def remaining(args: Any, sample: Sample, params: dict[str, Any]) -> dict[str, Any] | None:
    """``params`` with the number of new tokens that is left to the response, or None when there is none."""
    left = int(params["max_new_tokens"]) - sample.response_length
    context = GenerateState(args).context
    if context is not None:
        left = min(left, context - sample.num_tokens)
    return {**params, "max_new_tokens": left} if left > 0 else None


def without_room(args: Any, sample: Sample) -> Sample:
    """The sample at its end: TRUNCATED, and left out where not even an answer could begin."""
    if sample.response_length:
        sample.status = Sample.Status.TRUNCATED
    else:
        mark_too_long(sample, GenerateState(args).context)
    return sample


async def ask_engine(args: Any, state: GenerateState, sample: Sample, body: dict[str, Any]) -> dict[str, Any] | None:
    """The engine's answer to a body of :func:`request`; None when none could be reached until the rollout was over."""
    from slime.engines import http

    limit, headers = request_seconds(args), routing_headers(args, sample)
    try:
        async with asyncio.timeout(limit):
            # the address is looked up in each try: a router that was lost may come back elsewhere
            call = lambda: http.request("POST", get_model_url(args), body, limit, headers)  # noqa: E731
            return dict(await http.retrying(call, give_up=lambda: state.aborted))
    except http.HttpError as error:
        if state.aborted and error.retryable:
            return None
        raise
    except TimeoutError as error:
        raise TimeoutError(
            f"sample {sample.index} (group {sample.group_index}): {get_model_url(args)} did not answer in {limit:g} s "
            "(--sglang-router-request-timeout-secs)"
        ) from error
