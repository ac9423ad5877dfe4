"""Where a response ends: at an end token of the model, or at a stop string.

The end token is trained, but the text that people and verifiers read ends before it. An engine
looks for stop strings only in the text that it generates for one request, so one that is divided
between the part of a response before an interruption and the part after it is found here.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence, Set

from slime.config.hf_config import read_chat_template
from slime.data.sample import Sample
from slime.data.token_fields import decode_int32
from slime.data.tokenizers import end_ids, load_tokenizer
from slime.rollout.state import GenerateState
from slime.types import GenerateOutput, MetaInfo, SamplingParams, Tokenizer

_OF_OTHERS = (
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>", "<end_of_turn>", "<eos>",
    "<|end|>", "<|return|>", "<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>",
)  # fmt: skip
"""What other models end with. A user's function may set the text of such a model."""


def end_text(state: GenerateState, token: int, stopped: bool) -> str:
    """Return the text of the last token of a response if it is an end token, else an empty text.

    Args:
        stopped: Whether the engine stopped at this token. Then every special token is an end token,
            also one that only the request named.
    """
    text = state.tokenizer.decode([token])
    if token in state.end_token_ids or (
        stopped and not state.tokenizer.decode([token], skip_special_tokens=True)
    ):
        return text
    return ""


def text_of(tokenizer: Tokenizer, ends: Set[int], ids: Sequence[int], skip: bool = False) -> str:
    """Return the text of a response without the end token.

    Args:
        ends: The ids of the end tokens.
        skip: Whether all other special tokens are left out as well.
    """
    ended = bool(ids) and ids[-1] in ends
    return tokenizer.decode(list(ids[:-1] if ended else ids), skip_special_tokens=skip)


def spoken(sample: Sample, checkpoint: str | None, trust: bool) -> Sample:
    """Return a copy of a sample for a verifier, without end tokens that a user's function left in
    the response.
    """
    heard = copy.copy(sample)
    text = sample.response or ""
    ends = _end_texts(checkpoint, trust)
    while (whole := text.rstrip()).endswith(ends):
        text = next(whole.removesuffix(end) for end in ends if whole.endswith(end))
    heard.response = text
    return heard


@functools.cache
def local_tokenizer(checkpoint: str | None, trust: bool) -> Tokenizer | None:
    """Return the tokenizer of a model, or None without a model on this machine: samples are also
    scored by hand.
    """
    if not checkpoint or read_chat_template(checkpoint) is None:
        return None
    return load_tokenizer(checkpoint, trust)


@functools.cache
def _end_texts(checkpoint: str | None, trust: bool) -> tuple[str, ...]:
    tokenizer = local_tokenizer(checkpoint, trust)
    if tokenizer is None:
        return _OF_OTHERS
    ends = sorted(end_ids(tokenizer, checkpoint))
    return *filter(None, map(tokenizer.decode, ends)), *_OF_OTHERS


UNFINISHED = "\ufffd"  # decoders write it in place of an incomplete UTF-8 character
# tokens of extra context: a tokenizer may decode the first token of a sequence differently
_MARGIN = 4


def cut_at_stop(
    tokenizer: Tokenizer, before: Sequence[int], output: GenerateOutput, params: SamplingParams
) -> GenerateOutput:
    """Return an engine's reply up to a stop string that began before the request, or the whole
    reply.

    Args:
        before: The ids of the interrupted response that the reply continues, or more of its
            conversation.
        params: The parameters of the request.
    """
    # Nothing can be divided if nothing came before, nothing came now, or there is nothing to stop
    # at.
    given = params.get("stop") or []
    skip = bool(params.get("skip_special_tokens"))
    stops = [stop for stop in ([given] if isinstance(given, str) else given) if stop]
    meta = output["meta_info"]
    new = [int(item[1]) for item in meta.get("output_token_logprobs") or ()]
    if not stops or not before or not new:
        return output

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=skip))

    found = divided_stop(decode, before, new, stops)
    if found is None:
        return output
    count, stop = found
    text = decode(new[:count])
    begin = max(output["text"].find(text), 0)  # some tokenizers leave out a space at the beginning
    return {"text": output["text"][:begin] + text, "meta_info": _first_tokens(meta, count, stop)}


def divided_stop(
    decode: Callable[[list[int]], str],
    before: Sequence[int],
    new: Sequence[int],
    stops: Sequence[str],
) -> tuple[int, str] | None:
    """Find the first stop string that begins in the text of ``before`` and ends in the text of
    ``new``.

    Since a token has at least one byte, a stop string of ``b`` bytes spans at most ``b`` tokens.

    Returns:
        The number of new ids up to its end, and the stop string. None if there is none.
    """
    # Only the last tokens before the request can be the beginning of a stop string.
    longest = max(len(stop.encode()) for stop in stops) + _MARGIN
    tail = [*before[-longest:]]
    known = len(decode(tail).rstrip(UNFINISHED))

    def stopped(count: int) -> str | None:
        text = decode([*tail, *new[:count]])
        # "known" itself is a possible beginning too: there may be a character that is divided
        # between the two parts.
        return next(
            (s for s in stops if text.find(s, max(known - len(s) + 1, 0), known + len(s)) >= 0),
            None,
        )

    end = min(len(new), longest)
    if stopped(end) is None:
        return None
    return next(
        (count, stop) for count in range(1, end + 1) if (stop := stopped(count)) is not None
    )


def _first_tokens(meta: MetaInfo, count: int, stop: str) -> MetaInfo:
    """Return the ``meta_info`` of a reply that ends with a stop string after ``count`` tokens.

    Routed experts stay whole, because the number of the sample's tokens says which of them are
    read.
    """
    scored = (meta.get("output_token_logprobs") or [])[:count]
    cut: MetaInfo = {
        **meta,
        "output_token_logprobs": scored,
        "finish_reason": {"type": "stop", "matched": stop},
    }
    if "top_p_token_ids" in meta:
        ids = decode_int32(meta["top_p_token_ids"])
        offsets = decode_int32(meta["top_p_token_offsets"])[: count + 1]
        cut["top_p_token_ids"] = ids[: offsets[-1] - offsets[0]].tolist()
        cut["top_p_token_offsets"] = offsets.tolist()
    if meta.get("weight_versions"):
        spans = [span for span in meta["weight_versions"] if span["start"] < count]
        spans[-1] = {**spans[-1], "end": min(spans[-1]["end"], count)}
        cut["weight_versions"] = spans
    return cut
