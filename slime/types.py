"""Types that several rooms name and no library provides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
"""What :func:`json.loads` returns."""
JsonObject: TypeAlias = dict[str, JsonValue]


class Tokenizer(Protocol):
    """The part of Hugging Face's ``PreTrainedTokenizerBase`` that slime uses.

    Transformers annotates these methods with unions over all their return formats; here they have the types that
    slime's calls get.
    """

    chat_template: str | dict[str, str] | None
    all_special_ids: list[int]
    all_special_tokens: list[str]
    eos_token_id: int | None
    pad_token_id: int | None
    unk_token_id: int | None
    model_max_length: int

    def __len__(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: int | Sequence[int], *, skip_special_tokens: bool = False) -> str: ...

    def convert_tokens_to_ids(self, tokens: str) -> int: ...

    def get_vocab(self) -> dict[str, int]: ...

    def apply_chat_template(self, conversation: Sequence[Mapping[str, object]], **kwargs: object) -> Any:
        """Text with ``tokenize=False``, token ids otherwise."""
