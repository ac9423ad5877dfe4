"""Types that several rooms name and no library provides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Required, TypeAlias, TypedDict

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
"""What :func:`json.loads` returns."""
JsonObject: TypeAlias = dict[str, JsonValue]


class VersionSpan(TypedDict):
    """Consecutive tokens of an answer that were sampled with the same weights: ``start`` to
    ``end``, exclusive.
    """

    version: str | int
    start: int
    end: int


class MetaInfo(TypedDict, total=False):
    """``meta_info`` of an engine's answer to ``POST /generate``. An engine leaves out what it does
    not measure, or says None; ``finish_reason`` is None in a stream until the answer is complete.

    Log-probs are ``(log-prob, token id, text)``. Arrays of ids travel as base64 of int32, or as
    lists.
    """

    finish_reason: dict[str, Any]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str | int
    weight_versions: list[VersionSpan]
    output_token_logprobs: list[Sequence[Any]]
    input_token_logprobs: list[Sequence[Any]]
    output_token_ids_logprobs: list[list[Sequence[Any]]]
    top_p_token_ids: str | list[int]
    top_p_token_offsets: str | list[int]
    routed_experts: str | list[int]
    spec_accept_token_num: int
    spec_draft_token_num: int
    spec_verify_ct: int


class SamplingParams(TypedDict, total=False):
    """SGLang's ``sampling_params`` of a request, as far as slime sets them."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    max_new_tokens: Required[int]
    min_new_tokens: int | None
    repetition_penalty: float | None
    stop: str | list[str] | None
    stop_token_ids: list[int] | None
    skip_special_tokens: bool
    no_stop_trim: bool
    spaces_between_special_tokens: bool
    sampling_seed: int
    ignore_eos: bool


class GenerateBody(TypedDict, total=False):
    """Body of ``POST /generate``: SGLang's, and ``weight_version_plan``, which only the embedded
    engine knows.

    Images are data URIs, because an engine, whose port others may reach, fetches nothing.
    """

    sampling_params: Required[SamplingParams]
    return_logprob: bool
    input_ids: list[int]
    text: str
    stream: bool
    return_routed_experts: bool
    return_top_p_token_ids: bool
    weight_version_plan: list[list[int | str]]
    image_data: list[str]
    video_data: list[str]
    audio_data: list[str]
    lora_path: str


class GenerateOutput(TypedDict):
    """An engine's answer to ``POST /generate``."""

    text: str
    meta_info: MetaInfo


class Tokenizer(Protocol):
    """The part of Hugging Face's ``PreTrainedTokenizerBase`` that slime uses.

    Transformers annotates these methods with unions over all their return formats; here they have
    the types that slime's calls get.
    """

    chat_template: str | dict[str, str] | None
    all_special_ids: list[int]
    added_tokens_decoder: Mapping[int, Any]
    """Id -> token of each added token; its ``special`` says whether it is no text."""
    eos_token: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    unk_token_id: int | None
    model_max_length: int

    def __len__(self) -> int: ...

    def __call__(self, text: str | Sequence[str], **kwargs: object) -> Mapping[str, Any]:
        """``input_ids`` (one list for a text, a list of lists for several), and what ``kwargs`` ask
        for besides.
        """

    def save_pretrained(self, save_directory: str | Path) -> object: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(
        self, token_ids: int | Sequence[int], *, skip_special_tokens: bool = False
    ) -> str: ...

    def convert_tokens_to_ids(self, tokens: str) -> int: ...

    def get_vocab(self) -> dict[str, int]: ...

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, object]], **kwargs: object
    ) -> Any:
        """Text with ``tokenize=False``, token ids otherwise."""


@dataclass(frozen=True)
class AdamSettings:
    """The settings of one step of AdamW, in place of those of the flags.

    Attributes:
        weight_decay: Not applied to vectors (norms, biases).
        clip_grad: The largest norm of the gradient; 0 for no clipping.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 0.0
