"""Convert the prompt of a sample to text, token ids and media."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.data.media import (
    MultimodalTypes,
    encode_image_for_rollout_engine,
    load_image,
    processor_inputs,
)
from slime.data.sample import Message, Sample
from slime.data.tokenizers import render_chat, render_prompt
from slime.observability.files import warn
from slime.rollout.state import GenerateState
from slime.types import GenerateBody, Tokenizer

if TYPE_CHECKING:
    from transformers import ProcessorMixin


def render(
    renderer: Tokenizer | ProcessorMixin,
    sample: Sample,
    messages: Sequence[Message],
    generation_prompt: bool = True,
) -> str:
    """Render messages with the chat template of a tokenizer or processor.

    The tools and the template arguments of the sample are passed to the template.
    """
    return render_chat(
        renderer,
        messages,
        tools=sample.metadata.get("tools") or None,
        add_generation_prompt=generation_prompt,
        **sample.apply_chat_template_kwargs,
    )


def prompt_text(state: GenerateState, sample: Sample) -> str:
    """Return the prompt as text. A message list is rendered; with media, by the template of the
    processor.
    """
    if isinstance(sample.prompt, str):
        return sample.prompt
    return render_first(_renderer(state, sample), sample)


def render_first(renderer: Tokenizer | ProcessorMixin, sample: Sample) -> str:
    """Render the messages of a prompt. If the last of them is an assistant's, the model continues
    its words.
    """
    assert isinstance(sample.prompt, list), "a text needs no rendering"
    return render_prompt(
        renderer,
        sample.prompt,
        tools=sample.metadata.get("tools") or None,
        **sample.apply_chat_template_kwargs,
    )


def _renderer(state: GenerateState, sample: Sample) -> Any:
    return _processor(state, sample) if sample.multimodal_inputs else state.tokenizer


def _processor(state: GenerateState, sample: Sample) -> Any:
    if state.processor is None:
        raise ValueError(
            f"sample {sample.index} has media, but the model of --hf-checkpoint has no processor"
        )
    return state.processor


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokenize ``text`` without adding special tokens, because a rendered prompt already contains
    them.
    """
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def prompt_ids(state: GenerateState, sample: Sample) -> list[int]:
    """Return the token ids of the prompt.

    With media, the processor makes the ids, and its tensors are stored in
    ``sample.multimodal_train_inputs``.
    """
    return text_ids(state, sample, prompt_text(state, sample))


def encode_conversation(state: GenerateState, sample: Sample) -> list[int]:
    """Return the token ids of a whole conversation (a prompt that ends with the response), as
    :func:`prompt_ids`.
    """
    messages: list[dict[str, Any]] = sample.prompt  # type: ignore[assignment]
    text = render(_renderer(state, sample), sample, messages, generation_prompt=False)
    return text_ids(state, sample, text)


def text_ids(state: GenerateState, sample: Sample, text: str) -> list[int]:
    """Return the token ids of a text that refers to the media of ``sample``."""
    if not sample.multimodal_inputs:
        if state.encoded[0] != text:  # the samples of a group share a prompt: tokenize it once
            ids = encode(state.tokenizer, text)
            if not state.encoded[0]:
                _warn_without_bos(state.tokenizer, text, ids)
            state.encoded = text, ids
        return list(state.encoded[1])
    processor = _processor(state, sample)
    media = processor_inputs(sample.multimodal_inputs)
    made = dict(processor(text=[text], return_tensors="pt", **media))
    ids = made.pop("input_ids")[0].tolist()
    made.pop("attention_mask", None)
    sample.multimodal_train_inputs = made or None
    return ids


def _warn_without_bos(tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    """Warn if a prompt lacks the token that the tokenizer itself puts in front of texts."""
    first = list(tokenizer(text)["input_ids"][:1])
    if first == [tokenizer.bos_token_id] != ids[:1]:
        warn(
            f"prompts do not begin with {tokenizer.decode(first)}, with which this model's "
            "tokenizer begins texts; some base models are lost without it: write it into the prompts"
        )


def add_media(fields: GenerateBody, sample: Sample) -> None:
    """Add the media of a sample to an engine request. URLs and paths of videos and audio are passed
    on unchanged.
    """
    media = sample.multimodal_inputs or {}
    for kind in MultimodalTypes.ALL:
        if items := media.get(kind.processor_key):
            uris = [_as_uri(item, kind.name) for item in items]
            fields[f"{kind.name}_data"] = uris  # type: ignore[literal-required]


def folded_ids(state: GenerateState, sample: Sample) -> list[int] | None:
    """Return the token ids of a sample with images with one placeholder for each of them, as SGLang
    takes ids.

    SGLang repeats the placeholders as its processor does, and keeps all other ids
    (``SGLANG_MM_AVOID_RETOKENIZE``, its default). Ids whose placeholders are repeated already would
    be decoded and tokenized again, or refused.

    Returns:
        None if there is no such form: the sample has other media than images; the processor inserts
        more than repeated placeholders (Gemma 3's); or two images have no token between them.
    """
    # Only images have this form, and only with a processor that names its placeholder.
    media = sample.multimodal_inputs or {}
    processor = state.processor
    ids = sample.array("tokens")
    images = media.get("images") or []
    if (
        ids is None
        or processor is None
        or any(media.get(kind) for kind in media if kind != "images")
    ):
        return None
    word, token = (getattr(processor, name, None) for name in ("image_token", "image_token_id"))
    if not isinstance(word, str) or not isinstance(token, int) or not len(images):
        return None
    if state.repeats_placeholders is None:
        state.repeats_placeholders = _placeholder_alone(processor, word, images[0]) == {token}
    # The first placeholder of each run of them; two images without a token between them are one
    # run.
    first = (ids == token) & np.append(True, ids[:-1] != token)
    if not state.repeats_placeholders or int(first.sum()) != len(images):
        return None
    return [int(i) for i in ids[first | (ids != token)]]


def _placeholder_alone(processor: Any, word: str, image: object) -> set[int]:
    """Return which ids a processor makes of a text that is the placeholder of one image; none if it
    refuses it.
    """
    try:
        made = processor(text=[word], images=[load_image(image)], add_special_tokens=False)
    except ValueError:
        return set()
    return {int(token) for token in made["input_ids"][0]}


def cut_at_sampled_media(state: GenerateState, sample: Sample) -> None:
    """Cut the response before the first media placeholder token that the model sampled.

    There are no media for such a token, so no trainer can compute its log-prob. Placeholders in
    masked tokens, such as the output of tools, belong to real media and stay.
    """
    if not state.media_token_ids or not sample.response_length:
        return
    tokens = sample.array("tokens")
    mask = sample.array("loss_mask")
    assert tokens is not None
    response = tokens[len(tokens) - sample.response_length :]
    found = np.isin(response, list(state.media_token_ids))
    if mask is not None and len(mask):
        found &= mask != 0
    if found.any():
        length = int(found.argmax())
        skip = bool(state.sampling_params["skip_special_tokens"])
        sample.cut_response(
            length, state.tokenizer.decode(response[:length].tolist(), skip_special_tokens=skip)
        )


def _as_uri(item: object, kind: str) -> str:
    if isinstance(item, str) and (item.startswith("data:") or kind != "image"):
        return item
    if kind == "image":  # read it here, because the engine may run on another host
        return encode_image_for_rollout_engine(item)
    if isinstance(item, bytes):
        return f"data:{kind}/unknown;base64,{base64.b64encode(item).decode()}"
    raise TypeError(
        f"{kind} of type {type(item).__name__} cannot be sent to an engine: use a URL, a path or "
        "bytes"
    )
