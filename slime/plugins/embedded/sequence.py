"""The state of one request in the engine, the version spans of its tokens, its text, and its JSON
response.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Required, TypedDict

import numpy as np

from slime.plugins.embedded.protocol import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class FinishReason(TypedDict, total=False):
    """The reason why a sequence ended, in SGLang's format."""

    type: Required[str]  # "stop", "length" or "abort"
    matched: int | str  # for "stop": the token or the stop string
    length: int  # for "length": the number of output tokens
    message: str  # for "abort"
    status_code: int | None
    err_type: str | None


class VersionSpan(TypedDict):
    """Output tokens ``start`` to ``end - 1`` were generated with the weights ``version``."""

    version: str
    start: int
    end: int


def aborted(message: str, status_code: int | None = None) -> FinishReason:
    """Return the finish reason of a sequence that was aborted."""
    return {"type": "abort", "message": message, "status_code": status_code, "err_type": None}


@dataclass
class VersionEvent:
    """A change of the weights after the first ``num_output_tokens`` output tokens, the last with
    ``old_version``.
    """

    old_version: str
    num_output_tokens: int


@dataclass(eq=False)
class Sequence:
    """The state of one request.

    Attributes:
        order: The number of the request in the order of arrival.
        tokens: The tokens of prompt and output.
        slot: The slot of the KV cache; -1 while the sequence is queued.
        computed: The number of tokens with KV in the slot. The next forwards compute
            ``tokens[computed:]``, and the next token is sampled from the logits of the last one.
        cached_tokens: The most prompt tokens whose KV was copied instead of computed.
        retractions: How often a pause has put the sequence back into the queue.
        adapter_key: The key of the adapter that the request has chosen; see
            :mod:`slime.plugins.embedded.linear`.
        position_shift: The difference between rotary position and token position after a prompt
            with images.
    """

    request: GenerateRequest
    order: int
    seed: int
    created: float = field(default_factory=time.perf_counter)
    tokens: list[int] = field(default_factory=list)
    slot: int = -1
    computed: int = 0
    cached_tokens: int = 0
    output_logprobs: list[float] = field(default_factory=list)
    output_top: list[list[tuple[float, int]]] = field(default_factory=list)
    # for token_ids_logprob
    output_chosen: list[list[tuple[float, int]]] = field(default_factory=list)
    output_nuclei: list[list[int]] = field(default_factory=list)
    # of the tokens from logprob_start_len + 1 on
    input_logprobs: list[float] = field(default_factory=list)
    input_top: list[list[tuple[float, int]]] = field(default_factory=list)
    version_events: list[VersionEvent] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    retractions: int = 0
    position_shift: int = 0
    adapter_key: int = 0

    def __post_init__(self) -> None:
        if not self.tokens:
            self.tokens = list(self.request.input_ids)

    @property
    def has_images(self) -> bool:
        return self.request.image_inputs is not None

    @property
    def contents(self) -> np.ndarray:
        """The tokens, int64, in a form that is equal only for sequences with the same adapter, so
        that they share KV with no other."""
        return np.asarray(self.tokens, dtype=np.int64) + (self.adapter_key << 32)

    @property
    def prompt_len(self) -> int:
        return len(self.request.input_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def planned_version(self) -> str | None:
        """In a replay, the weight version that must generate the next token; None if any version
        may.
        """
        return next(
            (
                v
                for start, v in reversed(self.request.weight_version_plan)
                if start <= self.num_output
            ),
            None,
        )

    @property
    def wants_input_logprobs(self) -> bool:
        return self.request.return_logprob and 0 <= self.request.logprob_start_len < self.prompt_len

    @property
    def score_from(self) -> int:
        """The first position whose logits are still needed for prompt log-probs; ``prompt_len`` if
        there is none.
        """
        if not self.wants_input_logprobs:
            return self.prompt_len
        return self.request.logprob_start_len + len(self.input_logprobs)

    def reserve(self, context_len: int) -> int:
        """Return the largest number of tokens that the slot may have to hold."""
        return min(self.prompt_len + self.request.params.max_new_tokens, context_len)


def version_spans(events: list[VersionEvent], current: str, num_output: int) -> list[VersionSpan]:
    """Return the weight versions of the output tokens as spans without gaps, in the format of
    SGLang 0.5.23.

    Args:
        current: The version after the last event.
        num_output: The number of output tokens to describe.
    """
    spans: list[VersionSpan] = []
    for version, count in [
        *((e.old_version, e.num_output_tokens) for e in events),
        (current, num_output),
    ]:
        end = min(count, num_output)
        if spans and end <= spans[-1]["end"]:
            continue
        if spans and version == spans[-1]["version"]:
            spans[-1]["end"] = end
            continue
        spans.append({"version": version, "start": spans[-1]["end"] if spans else 0, "end": end})
    return spans


# --- text, for responses, stop strings and streaming ---

_REPLACEMENT = "�"
_MOST_BYTES = 4  # the most bytes of one character in UTF-8
_BEFORE = 5  # as SGLang's INIT_INCREMENTAL_DETOKENIZATION_OFFSET
_MOST_UNREAD = 64  # after so many tokens without a complete character, they are not text


class Detokenizer:
    """Decodes tokens with a Hugging Face tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def decode(self, ids: list[int], params: SamplingParams) -> str:
        return str(
            self.tokenizer.decode(
                ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )

    def before(self, sequence: Sequence) -> tuple[list[int], str]:
        """Return the last tokens of the prompt, and their text. The output is decoded together with
        them, because the decoder of many tokenizers removes the space at the beginning of a text.

        Both are empty if the prompt may end within a character, whose text would depend on the
        output.
        """
        ids = sequence.request.input_ids[-_BEFORE:]
        text = self.decode(ids, sequence.request.params)
        return ([], "") if text.endswith(_REPLACEMENT) else (ids, text)

    def match_stop(self, sequence: Sequence) -> str | None:
        """Return the stop string in the last tokens of the output, or None."""
        params = sequence.request.params
        # A token is at least one byte, so the window contains the longest stop string.
        window = max(len(stop.encode()) for stop in params.stop) + 4
        tail = self.decode(
            sequence.tokens[max(sequence.prompt_len, len(sequence.tokens) - window) :], params
        )
        return next((stop for stop in params.stop if stop in tail), None)

    def output_text(self, sequence: Sequence, count: int, finish: FinishReason | None) -> str:
        """Return the text of the first ``count`` output tokens.

        The stop string or stop token at the end is removed unless the request has ``no_stop_trim``.
        """
        params = sequence.request.params
        ids = sequence.tokens[sequence.prompt_len : sequence.prompt_len + count]
        matched = None if finish is None else finish.get("matched")
        if isinstance(matched, int) and not params.no_stop_trim:
            ids = ids[:-1]
        before, known = self.before(sequence) if ids else ([], "")
        text = self.decode([*before, *ids], params)[len(known) :]
        if isinstance(matched, str) and (position := text.find(matched)) >= 0:
            text = text[: position + (len(matched) if params.no_stop_trim else 0)]
        return text.rstrip(_REPLACEMENT) if finish is None else text

    def token_texts(self, ids: list[int]) -> list[str]:
        return [str(self.tokenizer.decode([token])) for token in ids]


class StreamedText:
    """Decodes the text of one sequence piece by piece, in time linear in its length.

    Each piece is decoded together with the tokens of the piece before it, because a tokenizer may
    decode a token differently at the beginning of a text. An incomplete character and a possible
    beginning of a stop string are held back, so that all pieces together are the text of
    :meth:`Detokenizer.output_text`.
    """

    def __init__(self, detokenizer: Detokenizer, sequence: Sequence) -> None:
        self.detokenizer = detokenizer
        self.sequence = sequence
        params = sequence.request.params
        self._stops = () if params.no_stop_trim else tuple(params.stop)
        # Output tokens: the window that is decoded starts at _start, and its tokens before _read
        # are returned already. Negative numbers are the last tokens of the prompt.
        before, known = detokenizer.before(sequence)
        self._start = -len(before)
        self._read = 0
        self._done = len(known)  # the number of characters of the window that are returned already
        self._held = ""
        self._parts: list[str] = []

    def piece(self, count: int, finish: FinishReason | None) -> str:
        """Return the new text of the tokens up to ``count``; with ``finish``, all text that is
        left.
        """
        if finish is not None:
            whole = self.detokenizer.output_text(self.sequence, count, finish)
            sent = "".join(self._parts)
            return whole[len(sent) :]
        text = self._held + self._new_text(count)
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        piece = text[: len(text) - keep]
        self._held = text[len(text) - keep :]
        self._parts.append(piece)
        return piece

    def _new_text(self, count: int) -> str:
        window = self._decode(self._start, count)
        half = min(len(window) - len(window.rstrip(_REPLACEMENT)), _MOST_BYTES)
        if half and count - self._read <= _MOST_UNREAD:
            end = max(len(window) - half, self._done)
            new = window[self._done : end]
            self._done = end
            return new
        new = window[self._done :]
        self._start = self._read
        self._read = count
        self._done = len(self._decode(self._start, count))
        return new

    def _decode(self, start: int, end: int) -> str:
        first = self.sequence.prompt_len
        ids = self.sequence.tokens[first + start : first + end]
        return self.detokenizer.decode(ids, self.sequence.request.params)


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of ``text`` are a beginning of ``stop``."""
    return next(
        (n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0
    )


# --- the JSON responses of /generate, with SGLang's field names ---

Scored = tuple[float | None, int, str | None]
"""The log-prob of a token, its id, and its text if the request asked for it."""


class Answer(TypedDict):
    """The response of ``/generate`` for one prompt."""

    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]  # SGLang's fields, without those that the request did not ask for


def build_answer(
    sequence: Sequence,
    detokenizer: Detokenizer,
    weight_version: str,
    count: int,
    finish: FinishReason | None,
    start: int = 0,
    text: str | None = None,
) -> Answer:
    """Return the response with the first ``count`` output tokens.

    Args:
        finish: The finish reason; None while the sequence still runs.
        start: The first token to include. In a stream, each response begins where the last one
            ended.
        text: The text of these tokens, if it is known.
    """
    # Fields that every response has.
    request = sequence.request
    spans = version_spans(sequence.version_events, weight_version, count)
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": finish,
        "prompt_tokens": sequence.prompt_len,
        "weight_version": spans[-1]["version"],
        "num_retractions": sequence.retractions,
    }
    # Fields that the request has asked for.
    if request.return_logprob:
        meta.update(_logprobs(sequence, detokenizer, start, count))
    if request.return_top_p_token_ids:
        meta["top_p_token_ids"], meta["top_p_token_offsets"] = _nuclei(
            sequence.output_nuclei[start:count]
        )
    # Counts and versions, in the order of SGLang.
    meta["reasoning_tokens"] = 0
    meta["completion_tokens"] = count
    meta["cached_tokens"] = sequence.cached_tokens
    meta["weight_versions"] = spans
    if finish is not None:
        meta["e2e_latency"] = time.perf_counter() - sequence.created
    return {
        "text": detokenizer.output_text(sequence, count, finish) if text is None else text,
        "output_ids": sequence.tokens[sequence.prompt_len + start : sequence.prompt_len + count],
        "meta_info": meta,
    }


def _nuclei(nuclei: list[list[int]]) -> tuple[str, str]:
    """Return ids and offsets, as int32 in base64. Token ``t`` was sampled from
    ``ids[offsets[t]:offsets[t + 1]]``.
    """
    ids = np.array([token for nucleus in nuclei for token in nucleus], np.int32)
    offsets = np.cumsum([0, *map(len, nuclei)]).astype(np.int32)
    return base64.b64encode(ids.tobytes()).decode(), base64.b64encode(offsets.tobytes()).decode()


def _logprobs(
    sequence: Sequence, detokenizer: Detokenizer, start: int, count: int
) -> dict[str, Any]:
    """Return the log-prob fields, each a list ``[[log-prob, id, text or null], ...]``.

    The log-prob of the first input token is null, as in SGLang.
    """
    request = sequence.request
    texts = detokenizer if request.return_text_in_logprobs else None
    output_ids = sequence.tokens[sequence.prompt_len + start : sequence.prompt_len + count]
    fields: dict[str, Any] = {
        "input_token_logprobs": [],
        "output_token_logprobs": _triples(sequence.output_logprobs[start:count], output_ids, texts),
        "output_token_logprobs_length": count,
    }
    if sequence.wants_input_logprobs:
        ids = request.input_ids[request.logprob_start_len :]
        fields["input_token_logprobs"] = _triples([None, *sequence.input_logprobs], ids, texts)
    if request.top_logprobs_num:
        fields["output_top_logprobs"] = [
            _pairs(entry, texts) for entry in sequence.output_top[start:count]
        ]
        fields["input_top_logprobs"] = []
        if sequence.wants_input_logprobs:
            fields["input_top_logprobs"] = [
                None,
                *(_pairs(entry, texts) for entry in sequence.input_top),
            ]
    if request.token_ids_logprob:
        fields["output_token_ids_logprobs"] = [
            _pairs(entry, texts) for entry in sequence.output_chosen[start:count]
        ]
    return fields


def _triples(
    values: Iterable[float | None], ids: list[int], texts: Detokenizer | None
) -> list[Scored]:
    token_texts: Iterable[str | None] = texts.token_texts(ids) if texts else [None] * len(ids)
    return list(zip(values, ids, token_texts, strict=False))


def _pairs(entry: list[tuple[float, int]], texts: Detokenizer | None) -> list[Scored]:
    return _triples([value for value, _ in entry], [token for _, token in entry], texts)
