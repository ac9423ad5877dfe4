"""Stop strings that are divided between the part of a response before an interruption and the part after it.

An engine looks for stop strings only in the text that it generates for one request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slime.data.token_fields import decode_int32
from slime.types import GenerateOutput, MetaInfo, SamplingParams, Tokenizer

UNFINISHED = "\ufffd"  # decoders write it in place of an incomplete UTF-8 character
_MARGIN = 4  # tokens of extra context: a tokenizer may decode the first token of a sequence differently


def cut_at_stop(
    tokenizer: Tokenizer, before: Sequence[int], output: GenerateOutput, params: SamplingParams
) -> GenerateOutput:
    """Return an engine's reply up to a stop string that began before the request, or the whole reply.

    Args:
        before: The ids of the interrupted response that the reply continues, or more of its conversation.
        params: The parameters of the request.
    """
    given, skip = params.get("stop") or [], bool(params.get("skip_special_tokens"))
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
    decode: Callable[[list[int]], str], before: Sequence[int], new: Sequence[int], stops: Sequence[str]
) -> tuple[int, str] | None:
    """Find the first stop string that begins in the text of ``before`` and ends in the text of ``new``.

    Since a token has at least one byte, a stop string of ``b`` bytes spans at most ``b`` tokens.

    Returns:
        The number of new ids up to its end, and the stop string. None if there is none.
    """
    longest = max(len(stop.encode()) for stop in stops) + _MARGIN
    tail = [*before[-longest:]]
    known = len(decode(tail).rstrip(UNFINISHED))

    def stopped(count: int) -> str | None:
        text = decode([*tail, *new[:count]])
        # "known" itself is a possible beginning too: there may be a character that is divided between the two parts.
        return next((s for s in stops if text.find(s, max(known - len(s) + 1, 0), known + len(s)) >= 0), None)

    end = min(len(new), longest)
    if stopped(end) is None:
        return None
    return next((count, stop) for count in range(1, end + 1) if (stop := stopped(count)) is not None)


def _first_tokens(meta: MetaInfo, count: int, stop: str) -> MetaInfo:
    """Return the ``meta_info`` of a reply that ends with a stop string after ``count`` tokens.

    Routed experts stay whole, because the number of the sample's tokens says which of them are read.
    """
    scored = (meta.get("output_token_logprobs") or [])[:count]
    cut: MetaInfo = {**meta, "output_token_logprobs": scored, "finish_reason": {"type": "stop", "matched": stop}}
    if "top_p_token_ids" in meta:
        ids, offsets = decode_int32(meta["top_p_token_ids"]), decode_int32(meta["top_p_token_offsets"])[: count + 1]
        cut["top_p_token_ids"] = ids[: offsets[-1] - offsets[0]].tolist()
        cut["top_p_token_offsets"] = offsets.tolist()
    if meta.get("weight_versions"):
        spans = [span for span in meta["weight_versions"] if span["start"] < count]
        spans[-1] = {**spans[-1], "end": min(spans[-1]["end"], count)}
        cut["weight_versions"] = spans
    return cut
