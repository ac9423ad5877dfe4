"""A cut-down random model with the structure of a Hugging Face model."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slime.cli.command import CommandError
from slime.models.loading import plain_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

VOCAB = 61
"""Not divisible by any parallel size, so that vocabulary-parallel layers are padded."""
LIMITS = {
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "sliding_window": 6,
    "attention_chunk_size": 6,
    "floor_scale": 4,
    "index_topk": 6,
}
"""The largest value of each size. A smaller value of the model itself is kept."""
SPECIAL = {"pad_token_id": 7, "bos_token_id": 1, "eos_token_id": 2}
"""Where the special tokens go if the small vocabulary does not contain them; a model without one
keeps none.
"""
HEAD = 8
"""The size of an attention head, and 12 if the model's heads together are not as wide as its hidden
states.
"""
MOST_GROUP = 8


class VerifyError(CommandError):
    """A model or a layout cannot be verified. The message says why."""


UNKNOWN = (
    ArithmeticError,
    AttributeError,
    IndexError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What transformers raises for a small config whose sizes do not fit together."""


def unknown_family(model: str, family: str, error: Exception) -> VerifyError:
    """The error for a model whose config has sizes that :data:`LIMITS` does not know."""
    reason = next(iter(str(error).splitlines()), "")[:300]
    return VerifyError(
        f"{model}: slime verify cannot make a small model of this family ({family}) that "
        f"transformers runs: {type(error).__name__}: {reason}"
    )


@dataclass(frozen=True)
class SmallModel:
    """The folder of a cut-down model, and what was changed to make it."""

    folder: Path
    layers: int
    description: str


def cut_down(config: PreTrainedConfig, layers: int, heads: int = 2) -> PreTrainedConfig:
    """Return a small config with the structure of another. ``config`` is that of a language model.

    The ratio of query to key heads, biases, norms, tied embeddings, the kinds of layers and
    experts, the scaling of positions and the presence of special tokens are kept.

    Args:
        layers: The number of layers. It is the least number that has every kind of layer, if that
            is larger.
        heads: The number of key heads, if the model has as many. A tensor-parallel size must divide
            it.
    """
    small = copy.deepcopy(config)
    given: dict[str, Any] = config.to_dict()
    # Sizes shrink, ratios stay.
    for name, most in LIMITS.items():
        value = given.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            setattr(small, name, min(value, most))
    _set_heads(small, given, heads)
    _set_layers(small, given, max(layers, _least_layers(given)))
    small.vocab_size = VOCAB  # the tokens of the batch, also if the model has fewer
    # Special tokens must be in the small vocabulary.
    for name, place in SPECIAL.items():
        token = given.get(name)
        token = token[0] if isinstance(token, list) and token else token
        if isinstance(token, int) and token >= VOCAB:
            setattr(small, name, place)
    if "initializer_range" in given:
        # otherwise the outputs of a small model hardly depend on its weights
        small.initializer_range = 0.2
    small.dtype = torch.float32
    return small


def _set_heads(small: PreTrainedConfig, given: dict[str, Any], heads: int) -> None:
    queries = int(given["num_attention_heads"])
    keys = int(given.get("num_key_value_heads") or queries)
    few = min(keys, heads)
    group = min(queries // keys, MOST_GROUP)
    small.num_attention_heads = few * group
    if given.get("num_key_value_heads") is not None:
        small.num_key_value_heads = few
    # Some models have heads of another width than the hidden states divided by their number.
    width = few * group * HEAD
    if given.get("kv_lora_rank"):  # heads of latent attention have sizes of their own
        small.hidden_size = max(width, 32)
        if given.get("head_dim") is not None:  # transformers: the part of a head that is rotated
            small.head_dim = small.qk_rope_head_dim
        return
    size = given.get("head_dim")
    own = size is not None and size * queries != given["hidden_size"]
    small.hidden_size = max(width, 32) if own else width
    if size is not None:
        small.head_dim = 12 if own else HEAD


def _least_layers(given: dict[str, Any]) -> int:
    """Return the number of first layers that contain every kind of layer."""
    kinds = given.get("layer_types") or []
    first = [kinds.index(kind) + 1 for kind in dict.fromkeys(kinds)]
    dense = given.get("first_k_dense_replace")
    return max([*first, 2 if dense else 1])


def _set_layers(small: PreTrainedConfig, given: dict[str, Any], layers: int) -> None:
    many = int(given["num_hidden_layers"])
    layers = min(layers, many)
    small.num_hidden_layers = layers
    # Lists with an entry for each layer are cut; those of layer numbers keep what is left.
    for name, value in given.items():
        if isinstance(value, list) and len(value) == many and many > 1:
            setattr(small, name, value[:layers])
        if name in ("mlp_only_layers",) and isinstance(value, list):
            setattr(small, name, [layer for layer in value if layer < layers])
        if name == "max_window_layers" and isinstance(value, int):
            setattr(small, name, min(value, layers // 2) if value < many else layers)
    if hasattr(small, "num_nextn_predict_layers"):
        small.num_nextn_predict_layers = 0


def save_small(config: PreTrainedConfig, folder: Path, trust_remote_code: bool = False) -> None:
    """Write a random model. Norms and biases are random too, so that a wrong one is found."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    with torch.no_grad():
        # A bias of the choice of experts is a buffer in some families.
        for tensor in model.state_dict().values():
            if tensor.dim() < 2 and tensor.is_floating_point():
                tensor.add_(torch.randn(tensor.shape) * 0.2)
        for module in model.modules():
            # transformers makes it zero, and the gradient of a norm of zeros would be larger than
            # all others.
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = torch.randn(module.embedding_dim) * 0.2
    model.save_pretrained(folder)
    _save_tokenizer(folder, config.vocab_size)


def _save_tokenizer(folder: Path, size: int) -> None:
    """Write a tokenizer, without which an engine does not start. Nothing is tokenized."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(
        models.WordLevel({f"<{number}>": number for number in range(size)}, unk_token="<0>")
    )
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<2>", pad_token="<7>"
    ).save_pretrained(folder)


def make_small(
    model: str, folder: Path, layers: int, heads: int, trust_remote_code: bool = False
) -> SmallModel:
    """Read the config of a model, and write the cut-down model to ``folder``.

    Raises:
        VerifyError: The config cannot be read or cut down.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        config = plain_config(
            AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
        )
        text = config.get_text_config()
        kind = config.model_type
    except (OSError, StrictDataclassError, *UNKNOWN) as error:
        absent = "" if Path(model).exists() else "there is no such folder on this machine, and "
        raise VerifyError(f"{model}: {absent}its config.json cannot be read: {error}") from error
    if text.to_dict().get("num_hidden_layers", 1) < 1:
        raise VerifyError(f"{model}: its config.json has {text.num_hidden_layers} layers")
    try:
        small = cut_down(text, layers, heads)
        save_small(small, folder, trust_remote_code)
    except UNKNOWN as error:
        raise unknown_family(model, text.model_type, error) from error
    experts = next((given for name in ("num_experts", "n_routed_experts", "num_local_experts")
                    if (given := small.to_dict().get(name))), 0)  # fmt: skip
    keys = small.to_dict().get("num_key_value_heads") or small.num_attention_heads
    what = (
        f"{small.model_type}{'' if text is config else f', the language model of {kind}'}: "
        f"{small.num_hidden_layers} of {text.num_hidden_layers} layers, hidden size "
        f"{small.hidden_size}, {small.num_attention_heads} heads, {keys} key "
        f"heads{f', {experts} experts' if experts else ''}{', tied embeddings' if small.tie_word_embeddings else ''}"
    )
    return SmallModel(folder, small.num_hidden_layers, what)
