"""Convert tokens to text, for responses, stop strings and streaming."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.plugins.embedded.protocol import SamplingParams
from slime.plugins.embedded.sequence import FinishReason, Sequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
        """Return the last tokens of the prompt, and their text. The output is decoded together with them, because the
        decoder of many tokenizers removes the space at the beginning of a text.

        Both are empty if the prompt may end within a character, whose text would depend on the output.
        """
        ids = sequence.request.input_ids[-_BEFORE:]
        text = self.decode(ids, sequence.request.params)
        return ([], "") if text.endswith(_REPLACEMENT) else (ids, text)

    def match_stop(self, sequence: Sequence) -> str | None:
        """Return the stop string in the last tokens of the output, or None."""
        params = sequence.request.params
        # A token is at least one byte, so the window contains the longest stop string.
        window = max(len(stop.encode()) for stop in params.stop) + 4
        tail = self.decode(sequence.tokens[max(sequence.prompt_len, len(sequence.tokens) - window) :], params)
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

    Each piece is decoded together with the tokens of the piece before it, because a tokenizer may decode a token
    differently at the beginning of a text. An incomplete character and a possible beginning of a stop string are held
    back, so that all pieces together are the text of :meth:`Detokenizer.output_text`.
    """

    def __init__(self, detokenizer: Detokenizer, sequence: Sequence) -> None:
        self.detokenizer, self.sequence = detokenizer, sequence
        params = sequence.request.params
        self._stops = () if params.no_stop_trim else tuple(params.stop)
        # Output tokens: the window that is decoded starts at _start, and its tokens before _read are returned already.
        # Negative numbers are the last tokens of the prompt.
        before, known = detokenizer.before(sequence)
        self._start, self._read = -len(before), 0
        self._done = len(known)  # the number of characters of the window that are returned already
        self._held = ""
        self._parts: list[str] = []

    def piece(self, count: int, finish: FinishReason | None) -> str:
        """Return the new text of the tokens up to ``count``; with ``finish``, all text that is left."""
        if finish is not None:
            whole, sent = self.detokenizer.output_text(self.sequence, count, finish), "".join(self._parts)
            return whole[len(sent) :]
        text = self._held + self._new_text(count)
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        piece, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self._parts.append(piece)
        return piece

    def _new_text(self, count: int) -> str:
        window = self._decode(self._start, count)
        half = min(len(window) - len(window.rstrip(_REPLACEMENT)), _MOST_BYTES)
        if half and count - self._read <= _MOST_UNREAD:
            end = max(len(window) - half, self._done)
            new, self._done = window[self._done : end], end
            return new
        new = window[self._done :]
        self._start, self._read = self._read, count
        self._done = len(self._decode(self._start, count))
        return new

    def _decode(self, start: int, end: int) -> str:
        first = self.sequence.prompt_len
        ids = self.sequence.tokens[first + start : first + end]
        return self.detokenizer.decode(ids, self.sequence.request.params)


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of ``text`` are a beginning of ``stop``."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
