"""Requests and answers of ``/generate``, with the names, defaults and checks of SGLang 0.5.23."""

from __future__ import annotations

import math
import uuid
from dataclasses import dataclass, field
from typing import Any

API_VERSION = "0.5.23"
"""The generation of SGLang's native HTTP surface that this engine speaks."""

MAX_STOP_STRINGS = 64
_GREEDY_BELOW = 1e-6
_NOT_SUPPORTED = ("json_schema", "regex", "ebnf", "structural_tag", "stop_regex", "beam_width", "watermark")


class BadRequest(ValueError):
    """The request cannot be served as it is; answered with status 400 and this message."""


@dataclass(frozen=True)
class SamplingParams:
    """What one sequence may look like and when it ends. Names and defaults are SGLang's."""

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
        """Whether top-k, top-p or min-p cut the distribution."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def penalised(self) -> bool:
        """Whether logits depend on the tokens so far."""
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0


@dataclass
class GenerateRequest:
    """One sequence to generate; a batch or ``n > 1`` becomes several."""

    rid: str
    input_ids: list[int]
    params: SamplingParams
    return_logprob: bool = False
    logprob_start_len: int = -1  # first prompt position with a log-prob; -1: none
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] = field(default_factory=list)
    return_text_in_logprobs: bool = False
    return_top_p_token_ids: bool = False  # what each token was drawn from; its log-prob is then over these alone
    stream: bool = False
    images: list[Any] = field(default_factory=list)
    version_plan: tuple[tuple[int, str], ...] = ()  # (output token, weight version that makes it and those after it)


@dataclass
class GenerateBody:
    """A ``/generate`` body cut into single requests, still with text where text was given."""

    requests: list[GenerateRequest]
    texts: list[str | None]
    is_single: bool
    stream: bool


def parse_sampling_params(raw: dict[str, Any] | None, vocab_size: int) -> SamplingParams:
    """Check one ``sampling_params`` object.

    Raises:
        BadRequest: an unknown name, a value out of range, or a constraint this engine has not got.
    """
    given = {key: value for key, value in (raw or {}).items() if value is not None}
    for name in _NOT_SUPPORTED:
        if given.pop(name, None):
            raise BadRequest(f"sampling_params.{name} is not supported by the embedded engine")
    for name in ("custom_params", "stream_interval"):
        given.pop(name, None)
    unknown = sorted(set(given) - set(SamplingParams.__dataclass_fields__))
    if unknown:
        raise BadRequest(f"unknown sampling_params: {', '.join(unknown)}")
    stop = given.pop("stop", ())
    given["stop"] = tuple(text for text in ((stop,) if isinstance(stop, str) else stop) if text)
    given["stop_token_ids"] = frozenset(int(token) for token in given.pop("stop_token_ids", ()))
    bias = given.pop("logit_bias", {})
    given["logit_bias"] = tuple(sorted((int(token), float(value)) for token, value in bias.items()))
    params = SamplingParams(**given)
    _check_sampling(params, vocab_size)
    return params


def _check_sampling(params: SamplingParams, vocab_size: int) -> None:
    low_top_k = params.top_k == 0 or params.top_k < -1
    checks = [
        (not math.isfinite(params.temperature) or params.temperature < 0, "temperature", "must be finite and >= 0"),
        (not 0 < params.top_p <= 1, "top_p", "must be in (0, 1]"),
        (not 0 <= params.min_p <= 1, "min_p", "must be in [0, 1]"),
        (low_top_k, "top_k", "must be -1 (off) or at least 1"),
        (not -2 <= params.frequency_penalty <= 2, "frequency_penalty", "must be in [-2, 2]"),
        (not -2 <= params.presence_penalty <= 2, "presence_penalty", "must be in [-2, 2]"),
        (not 0 < params.repetition_penalty <= 2, "repetition_penalty", "must be in (0, 2]"),
        (params.max_new_tokens < 0, "max_new_tokens", "must be at least 0"),
        (not 0 <= params.min_new_tokens <= params.max_new_tokens, "min_new_tokens", "must be in [0, max_new_tokens]"),
        (params.n < 1, "n", "must be at least 1"),
        (len(params.stop) > MAX_STOP_STRINGS, "stop", f"takes at most {MAX_STOP_STRINGS} strings"),
        (any(not 0 <= t < vocab_size for t, _ in params.logit_bias), "logit_bias", f"keys lie in [0, {vocab_size})"),
        (not -(2**63) <= (params.sampling_seed or 0) < 2**63, "sampling_seed", "must fit in 64 bits"),
    ]
    for wrong, name, rule in checks:
        if wrong:
            raise BadRequest(f"sampling_params.{name} {rule}, got {getattr(params, name)!r}")


def parse_generate(body: dict[str, Any], vocab_size: int) -> GenerateBody:
    """Cut a ``/generate`` body into single requests.

    ``text`` or ``input_ids`` may hold one prompt or a list of them; every other field holds one value for
    all or a list with one per prompt. ``n > 1`` repeats each prompt, answers in prompt-major order; sample
    ``i`` of a seeded request draws with ``sampling_seed + i``.
    """
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    text, input_ids = body.get("text"), body.get("input_ids")
    if (text is None) == (input_ids is None):
        raise BadRequest("give either text or input_ids")
    if body.get("input_embeds") is not None:
        raise BadRequest("input_embeds is not supported by the embedded engine")
    is_single = isinstance(text, str) if text is not None else _is_flat(input_ids)
    prompts: list[Any] = [text if text is not None else input_ids] if is_single else list(text or input_ids or ())
    if not prompts:
        raise BadRequest("an empty batch of prompts")
    requests: list[GenerateRequest] = []
    texts: list[str | None] = []
    for index, prompt in enumerate(prompts):
        one = {key: _pick(body, key, index, len(prompts), is_single) for key in _PER_PROMPT}
        one["rid_is_shared"] = not is_single and isinstance(body.get("rid"), str)
        params = parse_sampling_params(one["sampling_params"], vocab_size)
        if text is None:
            _check_ids(prompt, vocab_size)
        elif not isinstance(prompt, str):
            raise BadRequest("text must be a string or a list of strings")
        for sample in range(params.n):
            requests.append(_one_request(one, prompt if text is None else [], params, sample, index))
            texts.append(prompt if text is not None else None)
    single = is_single and len(requests) == 1
    return GenerateBody(requests, texts, single, bool(body.get("stream", False)))


_PER_PROMPT = (
    "rid",
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "token_ids_logprob",
    "image_data",
    "return_text_in_logprobs",
    "return_top_p_token_ids",
    "stream",
    "weight_version_plan",
)


def _one_request(
    one: dict[str, Any], ids: list[int], params: SamplingParams, sample: int, index: int
) -> GenerateRequest:
    rid = one["rid"] or uuid.uuid4().hex
    if one["rid"] and one["rid_is_shared"]:
        rid = f"{rid}_{index}"
    if params.n > 1:
        rid = f"{rid}_{sample}"
        seed = None if params.sampling_seed is None else params.sampling_seed + sample
        params = SamplingParams(**{**params.__dict__, "sampling_seed": seed})
    start = one["logprob_start_len"]
    images = one["image_data"]
    return GenerateRequest(
        rid=rid,
        input_ids=list(ids),
        params=params,
        return_logprob=bool(one["return_logprob"]),
        logprob_start_len=-1 if start is None else int(start),
        top_logprobs_num=int(one["top_logprobs_num"] or 0),
        token_ids_logprob=list(one["token_ids_logprob"] or ()),
        return_text_in_logprobs=bool(one["return_text_in_logprobs"]),
        return_top_p_token_ids=bool(one["return_top_p_token_ids"]) and params.filtered,
        stream=bool(one["stream"]),
        images=[] if images is None else images if isinstance(images, list) else [images],
        version_plan=tuple((int(start), str(version)) for start, version in one["weight_version_plan"] or ()),
    )


def _pick(body: dict[str, Any], key: str, index: int, count: int, is_single: bool) -> Any:
    """The value for prompt ``index`` of a field that holds one value or one per prompt."""
    value = body.get(key)
    if is_single or not isinstance(value, list):
        return value
    if key == "token_ids_logprob" and value and not isinstance(value[0], list):
        return value
    if len(value) != count:
        raise BadRequest(f"{key} has {len(value)} values for {count} prompts")
    return value[index]


def _is_flat(input_ids: Any) -> bool:
    if not isinstance(input_ids, list) or not input_ids:
        raise BadRequest("input_ids cannot be empty; give a list of token ids, or a list of such lists")
    return not isinstance(input_ids[0], list)


def _check_ids(ids: Any, vocab_size: int) -> None:
    if not isinstance(ids, list) or not ids:
        raise BadRequest("input_ids cannot be empty")
    for position, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise BadRequest(f"input_ids[{position}] is {token!r}; token ids are integers in [0, {vocab_size})")
