"""Hugging Face checkpoints on this machine: where they are and what their config.json says. No transformers."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

_LENGTHS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

MTP_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Keys of config.json that count layers for multi-token prediction."""


SHAPE: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "n_layer"),
    "hidden_size": ("hidden_size", "n_embd"),
    "ffn_hidden_size": ("intermediate_size", "n_inner"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "num_query_groups": ("num_key_value_heads",),
    "kv_channels": ("head_dim",),
    "norm_epsilon": ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"),
    "rotary_base": ("rope_theta",),
    "vocab_size": ("vocab_size",),
    "add_qkv_bias": ("attention_bias",),
    "num_experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "moe_ffn_hidden_size": ("moe_intermediate_size",),
    "moe_router_topk": ("num_experts_per_tok",),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_head_dim": ("qk_nope_head_dim",),
    "qk_pos_emb_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
}
"""Megatron's name of a dimension -> where config.json may have it."""
_ABSENT_IN_MANY = frozenset(
    (
        *("num_experts", "moe_ffn_hidden_size", "moe_router_topk", "add_qkv_bias", "rotary_base"),
        *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    )
)
"""Dimensions that a model without experts, latent attention or rotary embeddings does not have."""


def is_hf_folder(path: str | None) -> bool:
    """Whether ``path`` is a local Hugging Face checkpoint."""
    return path is not None and (Path(path).expanduser() / "config.json").is_file()


def looks_like_hub_id(name: str) -> bool:
    """``Qwen/Qwen3-4B`` or ``gpt2``-like names that no local path claims."""
    return bool(_HUB_ID.fullmatch(name)) and not Path(name).parent.is_dir()


def read_config(checkpoint: str) -> dict[str, Any] | None:
    """config.json of a local folder or of the hub cache; None when there is none here to read.

    A vision-language model's text part is what the flags speak of.
    """
    folder = Path(checkpoint).expanduser()
    file = folder / "config.json" if folder.is_dir() else _cached(checkpoint)
    if file is None or not file.is_file():
        return None
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def model_dimension(checkpoint: str | None, name: str) -> Any:
    """A dimension of the model by its name in :data:`SHAPE`; None for one that only other kinds of model have.

    Raises:
        AttributeError: config.json is not here, or does not say it.
    """
    config = _dimensions(checkpoint) if checkpoint else None
    if config is None:
        where = f"config.json of --hf-checkpoint {checkpoint} is not on this machine" if checkpoint else "there is none"
        raise AttributeError(f"args.{name} is read from the checkpoint's config.json: {where}")
    key, value = lookup_dimension(config, name)
    if value is None and name not in _ABSENT_IN_MANY:
        raise AttributeError(f"args.{name}: config.json of --hf-checkpoint {checkpoint} has no {key}")
    return value


_READ: dict[str, dict[str, Any]] = {}


def _dimensions(checkpoint: str) -> dict[str, Any] | None:
    """config.json, read once per process; again while it is not there yet (a checkpoint of the hub)."""
    if checkpoint not in _READ and (config := read_config(checkpoint)) is not None:
        _READ[checkpoint] = config
    return _READ.get(checkpoint)


def lookup_dimension(config: dict[str, Any], name: str) -> tuple[str, Any]:
    """The key of config.json that holds a dimension, and its value."""
    for key in SHAPE[name]:
        if config.get(key) is not None:
            return key, config[key]
    if name == "kv_channels" and config.get("hidden_size") and config.get("num_attention_heads"):
        return "hidden_size / num_attention_heads", config["hidden_size"] // config["num_attention_heads"]
    if name == "num_query_groups" and config.get("num_attention_heads"):
        return "num_attention_heads", config["num_attention_heads"]  # every head has keys and values of its own
    rope = config.get("rope_parameters")
    if name == "rotary_base" and isinstance(rope, dict):
        return "rope_parameters.rope_theta", rope.get("rope_theta")
    return SHAPE[name][0], None


def read_chat_template(checkpoint: str) -> str | None:
    """The chat template of a local folder or of the hub cache, several as one text; empty where its tokenizer has none,
    None when there is no tokenizer here to read."""
    folder = Path(checkpoint).expanduser()
    config = folder / "tokenizer_config.json" if folder.is_dir() else _cached(checkpoint, "tokenizer_config.json")
    if config is None or not config.is_file():
        return None
    try:
        more = sorted(config.parent.glob("additional_chat_templates/*.jinja"))
        files = [config.parent / "chat_template.jinja", *more]
        texts = [file.read_text() for file in files if file.is_file()]
        given = json.loads(config.read_text()).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return None
    if isinstance(given, list):  # a name and a template each
        given = "\n".join(str(entry.get("template")) for entry in given if isinstance(entry, dict))
    return "\n".join(texts) or str(given or "")


def context_length(config: dict[str, Any], scaled: bool = True) -> int | None:
    """Tokens of the longest sequence of a model, from its config.json; None where that does not say.

    Args:
        scaled: as SGLang serves it: times the factor of its rotary scaling, where that is not part of the number.
    """
    length = next((config[name] for name in _LENGTHS if isinstance(config.get(name), int)), None)
    scaling = config.get("rope_scaling")
    if not scaled or length is None or not isinstance(scaling, dict):
        return length
    counted = "original_max_position_embeddings" in scaling or scaling.get("rope_type") == "llama3"
    return length if counted else int(length * float(scaling.get("factor") or 1))


def media_token_ids(checkpoint: str | None) -> list[int]:
    """Ids that stand for the features of an image, video or audio, in this model's input; empty for a text model."""
    config = (read_config(checkpoint) if checkpoint else None) or {}
    names = (f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index"))
    return sorted({int(config[name]) for name in names if isinstance(config.get(name), int)})


def _cached(hub_id: str, name: str = "config.json") -> Path | None:
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    found = sorted((hub / f"models--{hub_id.replace('/', '--')}" / "snapshots").glob(f"*/{name}"))
    return found[-1] if found else None


def megatron_folder(path: str | None) -> Path | None:
    """The folder with an actor's Megatron weights that ``path`` names: itself, its ``actor``, or that of the newest
    snapshot in it; None when there is none."""
    if path is None:
        return None
    folder = Path(path).expanduser()
    snapshots = sorted(folder.glob("iter_*"), reverse=True) if folder.is_dir() else []
    for candidate in (folder, folder / "actor", *(snapshot / "actor" for snapshot in snapshots)):
        tensors = any((candidate / name).is_dir() for name in ("torch_dist", "torch"))
        if tensors and (candidate / "trainer.json").is_file():
            return candidate
    return None
