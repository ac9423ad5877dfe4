"""From a sample's prompt to text, token ids and media."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.data.media import load_image, processor_inputs
from slime.data.sample import Message, Sample
from slime.rollout.state import GenerateState
from slime.types import GenerateBody, Tokenizer

if TYPE_CHECKING:
    from transformers import ProcessorMixin


def render(
    renderer: Tokenizer | ProcessorMixin, sample: Sample, messages: Sequence[Message], generation_prompt: bool = True
) -> str:
    """Messages as text by the chat template of a tokenizer or processor, with the sample's tools and template
    arguments."""
    text = renderer.apply_chat_template(
        list(messages),
        tools=sample.metadata.get("tools") or None,
        tokenize=False,
        add_generation_prompt=generation_prompt,
        **sample.apply_chat_template_kwargs,
    )
    return str(text)


def prompt_text(state: GenerateState, sample: Sample) -> str:
    """The prompt as text: as it is, or rendered when it is a message list (with media by the processor's template)."""
    if isinstance(sample.prompt, str):
        return sample.prompt
    return render(_renderer(state, sample), sample, sample.prompt)


def _renderer(state: GenerateState, sample: Sample) -> Any:
    return _processor(state, sample) if sample.multimodal_inputs else state.tokenizer


def _processor(state: GenerateState, sample: Sample) -> Any:
    if state.processor is None:
        raise ValueError(f"sample {sample.index} has media, but the model of --hf-checkpoint has no processor")
    return state.processor


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of ``text``, no special tokens added: a rendered prompt holds its own."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def prompt_ids(state: GenerateState, sample: Sample) -> list[int]:
    """Ids of the prompt; with media, the processor's, and its tensors go to ``multimodal_train_inputs``."""
    return text_ids(state, sample, prompt_text(state, sample))


def encode_conversation(state: GenerateState, sample: Sample) -> list[int]:
    """Ids of a whole conversation (a prompt that ends with its answer), as :func:`prompt_ids`."""
    return text_ids(state, sample, render(_renderer(state, sample), sample, sample.prompt, generation_prompt=False))  # type: ignore[arg-type]


def text_ids(state: GenerateState, sample: Sample, text: str) -> list[int]:
    """Ids of a text with the media of ``sample`` in it."""
    if not sample.multimodal_inputs:
        if state.encoded[0] != text:  # the samples of a group come one after the other
            state.encoded = text, encode(state.tokenizer, text)
        return list(state.encoded[1])
    processor, media = _processor(state, sample), processor_inputs(sample.multimodal_inputs)
    made = dict(processor(text=[text], return_tensors="pt", **media))
    ids = made.pop("input_ids")[0].tolist()
    made.pop("attention_mask", None)
    sample.multimodal_train_inputs = made or None
    return ids


def add_media(fields: GenerateBody, sample: Sample) -> None:
    """Add the media to an engine request. Videos and audio given as URLs or paths go as they are."""
    media = sample.multimodal_inputs or {}
    if media.get("images"):
        fields["image_data"] = [_as_uri(item, "image") for item in media["images"]]
    if media.get("videos"):
        fields["video_data"] = [_as_uri(item, "video") for item in media["videos"]]
    if media.get("audio"):
        fields["audio_data"] = [_as_uri(item, "audio") for item in media["audio"]]


def cut_at_sampled_media(state: GenerateState, sample: Sample) -> None:
    """End the response before a token that stands for an image (or video, audio) and that the model itself sampled:
    there are no features to put in its place, so no trainer can score it. Those of tools' answers stay."""
    if not state.media_token_ids or not sample.response_length:
        return
    tokens, mask = sample.array("tokens"), sample.array("loss_mask")
    assert tokens is not None
    response = tokens[len(tokens) - sample.response_length :]
    found = np.isin(response, list(state.media_token_ids))
    if mask is not None and len(mask):
        found &= mask != 0
    if found.any():
        length = int(found.argmax())
        skip = bool(state.sampling_params["skip_special_tokens"])
        sample.cut_response(length, state.tokenizer.decode(response[:length].tolist(), skip_special_tokens=skip))


def _as_uri(item: object, kind: str) -> str:
    if isinstance(item, str) and (item.startswith("data:") or kind != "image"):
        return item
    if kind == "image":  # read here: the engine may be on another host
        buffer = io.BytesIO()
        load_image(item).save(buffer, format="PNG")
        return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    if isinstance(item, bytes):
        return f"data:{kind}/unknown;base64,{base64.b64encode(item).decode()}"
    raise TypeError(f"{kind} of type {type(item).__name__} cannot be sent: give a URL, a path or bytes")
