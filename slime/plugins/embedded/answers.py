"""Build the JSON responses of ``/generate``, with SGLang's field names."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterable
from typing import Any, TypedDict

import numpy as np

from slime.plugins.embedded.sequence import FinishReason, Sequence, version_spans
from slime.plugins.embedded.text import Detokenizer

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
        start: The first token to include. In a stream, each response begins where the last one ended.
        text: The text of these tokens, if it is known.
    """
    request = sequence.request
    spans = version_spans(sequence.version_events, weight_version, count)
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": finish,
        "prompt_tokens": sequence.prompt_len,
        "weight_version": spans[-1]["version"],
        "num_retractions": sequence.retractions,
    }
    if request.return_logprob:
        meta.update(_logprobs(sequence, detokenizer, start, count))
    if request.return_top_p_token_ids:
        meta["top_p_token_ids"], meta["top_p_token_offsets"] = _nuclei(sequence.output_nuclei[start:count])
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
    """Return ids and offsets, as int32 in base64. Token ``t`` was sampled from ``ids[offsets[t]:offsets[t + 1]]``."""
    ids = np.array([token for nucleus in nuclei for token in nucleus], np.int32)
    offsets = np.cumsum([0, *map(len, nuclei)]).astype(np.int32)
    return base64.b64encode(ids.tobytes()).decode(), base64.b64encode(offsets.tobytes()).decode()


def _logprobs(sequence: Sequence, detokenizer: Detokenizer, start: int, count: int) -> dict[str, Any]:
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
        fields["output_top_logprobs"] = [_pairs(entry, texts) for entry in sequence.output_top[start:count]]
        fields["input_top_logprobs"] = []
        if sequence.wants_input_logprobs:
            fields["input_top_logprobs"] = [None, *(_pairs(entry, texts) for entry in sequence.input_top)]
    if request.token_ids_logprob:
        fields["output_token_ids_logprobs"] = [_pairs(entry, texts) for entry in sequence.output_chosen[start:count]]
    return fields


def _triples(values: Iterable[float | None], ids: list[int], texts: Detokenizer | None) -> list[Scored]:
    words: Iterable[str | None] = texts.token_texts(ids) if texts else [None] * len(ids)
    return list(zip(values, ids, words, strict=False))


def _pairs(entry: list[tuple[float, int]], texts: Detokenizer | None) -> list[Scored]:
    return _triples([value for value, _ in entry], [token for _, token in entry], texts)
