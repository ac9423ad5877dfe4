"""Text of a stream, piece by piece, against the text of the whole answer."""

from __future__ import annotations

from typing import Any

import pytest
from engine_parts import make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from needs import of_all

from slime.plugins.embedded.protocol import GenerateRequest, SamplingParams
from slime.plugins.embedded.sequence import Detokenizer, Sequence, StreamedText, build_answer

TOKENIZER = make_tokenizer()
DETOKENIZER = Detokenizer(TOKENIZER)


def sequence_of(ids: list[int], **params: Any) -> Sequence:
    request = GenerateRequest("r", [5, 6], SamplingParams(**params), return_logprob=True)
    sequence = Sequence(request, order=0, seed=0)
    sequence.tokens += ids
    sequence.output_logprobs = [-float(i) for i in range(len(ids))]
    return sequence


def byte_ids(data: bytes) -> list[int]:
    """Ids of any bytes, of whole characters or not: the tokenizer has a token per byte."""
    ids: dict[int, int] = {}
    for byte in set(data):
        text = chr(byte) if byte < 128 else None
        if text is not None:
            ids[byte] = TOKENIZER(text, add_special_tokens=False)["input_ids"][0]
        else:
            pair = (
                bytes([0xC2 if byte < 0xC0 else 0xC3, byte]) if byte < 0xC0 else bytes([byte, 0x80])
            )
            known = TOKENIZER(pair.decode(errors="ignore") or "é", add_special_tokens=False)[
                "input_ids"
            ]
            ids[byte] = known[1] if byte < 0xC0 else known[0]
    return [ids[byte] for byte in data]


@settings(max_examples=of_all(300, 100), deadline=None)
@given(st.text("ab <é€😀\n", max_size=40), st.lists(st.integers(1, 7), min_size=1), st.booleans())
def test_the_pieces_are_the_whole(text: str, steps: list[int], cut: bool) -> None:
    ids = byte_ids(text.encode())
    ids = ids[: len(ids) - 1] if cut else ids  # perhaps within a character
    sequence = sequence_of(ids)
    stream, pieces, count = StreamedText(DETOKENIZER, sequence), [], 0
    for step in steps:
        if count + step >= len(ids):
            break
        count += step
        pieces.append(stream.piece(count, None))
    pieces.append(stream.piece(len(ids), {"type": "length", "length": len(ids)}))
    assert "".join(pieces) == DETOKENIZER.output_text(sequence, len(ids), {"type": "length"})


@settings(max_examples=100, deadline=None)
@given(st.text("ab", min_size=1, max_size=20), st.text("ab", min_size=1, max_size=4))
def test_a_stop_string_is_not_told_of(text: str, stop: str) -> None:
    end = text.find(stop)
    text = text[: end + len(stop)] if end >= 0 else text
    finish = {"type": "stop", "matched": stop} if end >= 0 else {"type": "length"}
    sequence = sequence_of(byte_ids(text.encode()), stop=[stop])
    stream = StreamedText(DETOKENIZER, sequence)
    pieces = [stream.piece(count, None) for count in range(1, len(text))] + [
        stream.piece(len(text), finish)
    ]
    assert "".join(pieces) == (text[:end] if end >= 0 else text)


def test_bytes_that_are_no_text_are_told_of_in_the_end() -> None:
    ids = byte_ids(b"ok" + b"\xa9" * 300 + b"end")
    sequence = sequence_of(ids)
    stream = StreamedText(DETOKENIZER, sequence)
    pieces = [stream.piece(count, None) for count in range(1, len(ids))]
    assert len("".join(pieces)) > 200, "not held back for ever"
    whole = "".join([*pieces, stream.piece(len(ids), {"type": "length"})])
    assert whole == DETOKENIZER.output_text(sequence, len(ids), {"type": "length"})


def test_the_work_of_a_long_stream_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = 0
    decode = Detokenizer.decode

    def counted(self: Detokenizer, ids: list[int], params: SamplingParams) -> str:
        nonlocal decoded
        decoded += len(ids)
        return decode(self, ids, params)

    monkeypatch.setattr(Detokenizer, "decode", counted)
    ids = byte_ids(("wörter " * 600).encode())
    sequence = sequence_of(ids)
    stream = StreamedText(DETOKENIZER, sequence)
    answers = [
        build_answer(sequence, DETOKENIZER, "1", count, None, count - 1, stream.piece(count, None))
        for count in range(1, len(ids) + 1)
    ]
    assert "".join(answer["text"] for answer in answers) == "wörter " * 600
    assert decoded < 10 * len(ids)
    assert sum(len(answer["meta_info"]["output_token_logprobs"]) for answer in answers) == len(ids)


def sentencepiece_like() -> Any:
    """A tokenizer as that of Llama 2 and Mistral 7B: ``▁`` stands for a space, and the first space
    of a text is cut.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", "▁The", "▁answer", "▁is", "▁42", "!", "▁", "<0xC3>", "<0xA9>"]
    inner = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.mark.parametrize(
    ("prompt", "output", "text"),
    [
        ([1, 3, 4, 5], [6, 7], " 42!"),  # after text, the space between prompt and response is kept
        ([1], [6, 7], "42!"),  # at the beginning of a text there is none
        # the prompt ends within a character: only the response is decoded
        ([1, 3, 9], [10, 6], "� 42"),
    ],
)
def test_the_text_of_a_response_goes_on_after_the_prompt(
    prompt: list[int], output: list[int], text: str
) -> None:
    """As with SGLang. Otherwise prompt and text together would lack a space."""
    detokenizer = Detokenizer(sentencepiece_like())
    sequence = Sequence(GenerateRequest("r", prompt, SamplingParams()), order=0, seed=0)
    sequence.tokens += output
    end: Any = {"type": "length", "length": len(output)}
    assert detokenizer.output_text(sequence, len(output), end) == text
    stream = StreamedText(detokenizer, sequence)
    assert (
        "".join(
            [
                *(stream.piece(n, None) for n in range(1, len(output))),
                stream.piece(len(output), end),
            ]
        )
        == text
    )
    assert detokenizer.output_text(sequence, 0, end) == ""
