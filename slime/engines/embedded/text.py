"""Tokens to text: answers, stop strings, and text while it streams."""

from __future__ import annotations

from typing import Any

from slime.engines.embedded.protocol import SamplingParams
from slime.engines.embedded.sequence import Sequence

_REPLACEMENT = "�"


class Detokenizer:
    """Wraps a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
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

    def match_stop(self, sequence: Sequence) -> str | None:
        """The stop string in the last tokens, enough of them to hold the longest (a token is a byte or more)."""
        params = sequence.request.params
        window = max(len(stop.encode()) for stop in params.stop) + 4
        tail = self.decode(sequence.tokens[max(sequence.prompt_len, len(sequence.tokens) - window) :], params)
        return next((stop for stop in params.stop if stop in tail), None)

    def output_text(self, sequence: Sequence, count: int, finish: dict[str, Any] | None) -> str:
        """Text of the first ``count`` output tokens, without what matched the stop (unless ``no_stop_trim``)."""
        params = sequence.request.params
        ids = sequence.tokens[sequence.prompt_len : sequence.prompt_len + count]
        matched = (finish or {}).get("matched")
        if isinstance(matched, int) and not params.no_stop_trim:
            ids = ids[:-1]
        text = self.decode(ids, params)
        if isinstance(matched, str) and (position := text.find(matched)) >= 0:
            text = text[: position + (len(matched) if params.no_stop_trim else 0)]
        return text.rstrip(_REPLACEMENT) if finish is None else text

    def token_texts(self, ids: list[int]) -> list[str]:
        return [str(self.tokenizer.decode([token])) for token in ids]
