"""Requests of ``/generate``, with the names, defaults and checks of SGLang 0.5.23."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slime.plugins.http.server import (
    BadRequest,
    Check,
    json_object,
    list_of,
    number,
    one_or_list,
    refuse,
    string,
    take,
    truth,
    whole,
)

API_VERSION = "0.5.23"
"""The version of SGLang's native HTTP interface that this engine serves."""

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 4096
MAX_SAMPLES = 1024  # the largest n of one prompt
MAX_SCORES = 2**22  # per body: alternatives at all positions
MAX_REQUESTS = 8192  # per body: the number of prompts times n
_GREEDY_BELOW = 1e-6
_NOT_READ = ("input_embeds", "audio_data", "video_data", "custom_logit_processor", "session_params")
_INT32 = 2**31 - 1
_PENALTY = number(-2, 2)
SAMPLING_CHECKS: dict[str, Check[object]] = {
    "max_new_tokens": whole(0, _INT32),
    "min_new_tokens": whole(0, _INT32),
    "stop": one_or_list(string(MAX_STOP_CHARACTERS), MAX_STOP_STRINGS),
    "stop_token_ids": list_of(whole(0, _INT32), 4096),
    "temperature": number(0, 1e6),
    "top_p": number(0, 1, above=True),
    "top_k": whole(-1, _INT32, "must be -1 (off) or at least 1"),
    "min_p": number(0, 1),
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
    "repetition_penalty": number(0, 2, above=True),
    "ignore_eos": truth,
    "skip_special_tokens": truth,
    "spaces_between_special_tokens": truth,
    "no_stop_trim": truth,
    "logit_bias": json_object,
    "sampling_seed": whole(-(2**63), 2**63 - 1, "must be a whole number that fits in 64 bits"),
    "n": whole(1, MAX_SAMPLES, f"must be at least 1 and at most {MAX_SAMPLES}"),
}
"""The check for type and range of each sampling parameter."""


@dataclass(frozen=True)
class SamplingParams:
    """Parameters for sampling the tokens of one sequence and for its end, with SGLang's names and
    defaults.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    sampling_seed: int | None = None
    n: int = 1

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW or self.top_k == 1

    @property
    def filtered(self) -> bool:
        """Whether top-k, top-p or min-p restrict the distribution."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def penalised(self) -> bool:
        """Whether a penalty changes the logits depending on the tokens so far."""
        return (
            self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


@dataclass
class GenerateRequest:
    """The request for one sequence. A batch or ``n > 1`` becomes several of them."""

    rid: str
    input_ids: list[int]
    params: SamplingParams
    return_logprob: bool = False
    logprob_start_len: int = -1  # the first prompt position with a log-prob; -1 for none
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] = field(default_factory=list)
    return_text_in_logprobs: bool = False
    # ids each token was sampled from; its log-prob is then over these ids only
    return_top_p_token_ids: bool = False
    stream: bool = False
    # encoded, as in the body; empty after they have been read
    image_data: list[object] = field(default_factory=list)
    # the tensors that the processor made from the images
    image_inputs: Mapping[str, object] | None = None
    lora_path: str | None = None  # the name of the adapter; None for the engine's own
    # (output token, weight version from this token on)
    weight_version_plan: tuple[tuple[int, str], ...] = ()


@dataclass
class GenerateBody:
    """A ``/generate`` body, divided into single requests. ``texts`` has None for prompts given as
    token ids.
    """

    requests: list[GenerateRequest]
    texts: list[str | None]
    is_single: bool
    stream: bool


def parse_sampling_params(
    raw: object, vocab_size: int, where: str = "sampling_params."
) -> SamplingParams:
    """Check one ``sampling_params`` object.

    Args:
        where: A prefix of the field names in error messages.

    Raises:
        BadRequest: A name is unknown to this engine, or a value has the wrong type or is out of
            range.
    """
    raw = {} if raw is None else json_object(raw, where.rstrip("."))
    present = {key: value for key, value in raw.items() if value is not None}
    unknown = sorted(set(present) - set(SAMPLING_CHECKS))
    if unknown:
        raise BadRequest(f"unknown {where.rstrip('.')}: {', '.join(unknown)[:200]}")
    values: dict[str, Any] = {
        name: SAMPLING_CHECKS[name](value, where + name) for name, value in present.items()
    }
    values["stop"] = tuple(text for text in values.get("stop", ()) if text)
    values["stop_token_ids"] = frozenset(values.get("stop_token_ids", ()))
    values["logit_bias"] = _logit_bias(values.get("logit_bias", {}), vocab_size, where)
    params = SamplingParams(**values)
    if params.top_k == 0:
        raise refuse(f"{where}top_k", "must be -1 (off) or at least 1", 0)
    if params.min_new_tokens > params.max_new_tokens:
        raise refuse(
            f"{where}min_new_tokens", "must be in [0, max_new_tokens]", params.min_new_tokens
        )
    return params


def _logit_bias(
    given: Mapping[str, object], vocab_size: int, where: str
) -> tuple[tuple[int, float], ...]:
    finite = number(-1e9, 1e9)
    bias = []
    for key, value in given.items():
        token = int(key) if key.isascii() and key.isdigit() and len(key) < 20 else -1
        if not 0 <= token < vocab_size:
            raise refuse(f"{where}logit_bias", f"keys must be token ids in [0, {vocab_size})", key)
        bias.append((token, finite(value, f"{where}logit_bias[{key}]")))
    return tuple(sorted(bias))


def parse_generate(body: object, vocab_size: int) -> GenerateBody:
    """Divide a ``/generate`` body into single requests.

    ``text`` or ``input_ids`` is one prompt or a list of prompts. Every other field is one value for
    all prompts or a list with one value per prompt. With ``n > 1`` each prompt is repeated, and all
    samples of a prompt follow one another in the response. If the request has a seed, sample ``i``
    uses ``sampling_seed + i``.

    Raises:
        BadRequest: A field is missing, unknown, or has a wrong value.
    """
    body = json_object(body, "the body")
    # One prompt or several, as text or as token ids.
    text = body.get("text")
    input_ids = body.get("input_ids")
    if (text is None) == (input_ids is None):
        raise BadRequest("pass either text or input_ids")
    for name in _NOT_READ:
        if body.get(name):
            raise BadRequest(f"{name} is not supported by this engine")
    raw: Any = input_ids if text is None else text
    # A list of token ids is one prompt; a list of such lists, or of texts, is several.
    first = raw[0] if isinstance(raw, list) and raw else None
    is_single = not isinstance(raw, list) or (text is None and not isinstance(first, list))
    prompts: list[object] = [raw] if is_single else raw
    if not prompts:
        raise BadRequest("the batch of prompts is empty")
    # The fields besides the prompts, and one request for each sample of each prompt.
    stream = take(body, "stream", truth, False)
    checks = _checks(vocab_size)
    per_prompt = ("rid", "sampling_params", *checks)
    requests: list[GenerateRequest] = []
    texts: list[str | None] = []
    for index, prompt in enumerate(prompts):
        # Each field is one value for all prompts, or a list with one for each.
        one = {name: _pick(body, name, index, len(prompts), is_single) for name in per_prompt}
        params = parse_sampling_params(one.pop("sampling_params"), vocab_size)
        rid = take(one, "rid", string(1024), "")
        if rid and not is_single and isinstance(body["rid"], str):
            rid = f"{rid}_{index}"
        values = {
            name: check(one[name], name) for name, check in checks.items() if one[name] is not None
        }
        if len(requests) + params.n > MAX_REQUESTS:
            raise BadRequest(
                f"one request can have at most {MAX_REQUESTS} sequences (prompts times "
                "sampling_params.n)"
            )
        ids = _checked_ids(prompt, vocab_size) if text is None else []
        prompt_text = None if text is None else string()(prompt, "text")
        for sample in range(params.n):
            requests.append(_one_request(values, rid, ids, params, sample))
            texts.append(prompt_text)
    single = is_single and len(requests) == 1
    return GenerateBody(requests, texts, single, stream)


def check_scores(requests: Sequence[GenerateRequest], context_len: int) -> None:
    """Refuse a body that asks for so many log-probs that computing and sending them would hold up
    all other requests.

    Raises:
        BadRequest: It asks for more than :data:`MAX_SCORES`.
    """
    scores = 0
    for one in requests:
        read = len(one.input_ids) - one.logprob_start_len if one.logprob_start_len >= 0 else 0
        positions = max(read, 0) + min(one.params.max_new_tokens, context_len)
        scores += positions * (one.top_logprobs_num + len(one.token_ids_logprob))
    if scores > MAX_SCORES:
        raise BadRequest(
            f"the request asks for up to {scores} log-probs (positions times top_logprobs_num and "
            f"token_ids_logprob), but at most {MAX_SCORES} are computed: lower max_new_tokens or "
            "their number, or send fewer prompts"
        )


def _checks(vocab_size: int) -> dict[str, Check[object]]:
    """Return the checks of the fields of a body that a :class:`GenerateRequest` has under the same
    names.
    """
    return {
        "return_logprob": truth,
        "logprob_start_len": whole(-1, _INT32),
        "top_logprobs_num": whole(0, vocab_size),
        "token_ids_logprob": list_of(whole(0, vocab_size - 1)),
        "return_text_in_logprobs": truth,
        "return_top_p_token_ids": truth,
        "stream": truth,
        "lora_path": string(4096),
        "weight_version_plan": _version_plan,
        "image_data": lambda value, name: value if isinstance(value, list) else [value],
    }


def _one_request(
    values: Mapping[str, Any], rid: str, ids: list[int], params: SamplingParams, sample: int
) -> GenerateRequest:
    """Return the request of one sample of a prompt, with the checked ``values`` of
    :func:`_checks`.
    """
    rid = rid or uuid.uuid4().hex
    if params.n > 1:
        rid = f"{rid}_{sample}"
        seed = None if params.sampling_seed is None else _wrapped(params.sampling_seed + sample)
        params = replace(params, sampling_seed=seed)
    request = GenerateRequest(rid, list(ids), params, **values)
    request.return_top_p_token_ids &= params.filtered
    return request


def _wrapped(seed: int) -> int:
    """Wrap a seed around to a signed 64-bit integer."""
    return (seed + 2**63) % 2**64 - 2**63


def _version_plan(value: object, name: str) -> tuple[tuple[int, str], ...]:
    def step(pair: object, where: str) -> tuple[int, str]:
        if isinstance(pair, list) and len(pair) == 2:
            token, version = pair
            if type(token) is int and token >= 0 and isinstance(version, str):
                return token, version
        raise refuse(where, "must be [output token, weight version]", pair)

    return tuple(list_of(step)(value, name))


def _pick(body: Mapping[str, object], key: str, index: int, count: int, is_single: bool) -> object:
    """Return the value for prompt ``index`` of a field that has one value for all prompts or one
    per prompt.
    """
    value = body.get(key)
    if is_single or not isinstance(value, list):
        return value
    # Here one value is a list itself: a flat list of ids is one value for all prompts.
    if key == "token_ids_logprob" and value and not isinstance(value[0], list):
        return value
    if len(value) != count:
        raise BadRequest(f"{key} has {len(value)} values for {count} prompts")
    return value[index]


def _checked_ids(ids: object, vocab_size: int) -> list[int]:
    if not isinstance(ids, list) or not ids:
        raise refuse("input_ids", "must be a list of token ids, which is not empty", ids)
    # With type() and not isinstance(), because True and False are instances of int.
    for position, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise BadRequest(
                f"input_ids[{position}] is {token!r}, but token ids are integers in [0, "
                f"{vocab_size})"
            )
    return ids
