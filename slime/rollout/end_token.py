"""The token with which a model ends what it says.

It is trained, but the text that people and verifiers read ends before it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence, Set

from slime.config.hf_config import read_chat_template
from slime.data.sample import Sample
from slime.data.tokenizers import end_ids, load_tokenizer
from slime.rollout.state import GenerateState
from slime.types import Tokenizer

_OF_OTHERS = (
    *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>", "<end_of_turn>", "<eos>"),
    *("<|end|>", "<|return|>", "<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>"),
)
"""What other models end with. A user's function may set the text of such a model."""


def end_text(state: GenerateState, token: int, stopped: bool) -> str:
    """Return the text of the last token of a response if it is an end token, else an empty text.

    Args:
        stopped: Whether the engine stopped at this token. Then every special token is an end token, also one that only
            the request named.
    """
    text = state.tokenizer.decode([token])
    if token in state.end_token_ids or (stopped and not state.tokenizer.decode([token], skip_special_tokens=True)):
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
    """Return a copy of a sample for a verifier, without end tokens that a user's function left in the response."""
    heard, text, ends = copy.copy(sample), sample.response or "", _end_texts(checkpoint, trust)
    while (whole := text.rstrip()).endswith(ends):
        text = next(whole.removesuffix(end) for end in ends if whole.endswith(end))
    heard.response = text
    return heard


@functools.cache
def local_tokenizer(checkpoint: str | None, trust: bool) -> Tokenizer | None:
    """Return the tokenizer of a model, or None without a model on this machine: samples are also scored by hand."""
    if not checkpoint or read_chat_template(checkpoint) is None:
        return None
    return load_tokenizer(checkpoint, **({"trust_remote_code": True} if trust else {}))


@functools.cache
def _end_texts(checkpoint: str | None, trust: bool) -> tuple[str, ...]:
    tokenizer = local_tokenizer(checkpoint, trust)
    if tokenizer is None:
        return _OF_OTHERS
    ends = sorted(end_ids(tokenizer, checkpoint))
    return *filter(None, map(tokenizer.decode, ends)), *_OF_OTHERS
