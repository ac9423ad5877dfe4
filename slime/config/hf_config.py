"""Read config.json and chat templates of Hugging Face checkpoints on this machine, without
importing transformers.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LENGTHS = (
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "model_max_length",
    "max_position_embeddings",
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

MTP_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Keys of config.json for the number of multi-token prediction layers."""


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
"""Megatron's name of a dimension -> the keys of config.json that can hold it."""
_ABSENT_IN_MANY = (
    "num_experts", "moe_ffn_hidden_size", "moe_router_topk", "add_qkv_bias", "rotary_base", "q_lora_rank",
    "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",
)  # fmt: skip
"""Dimensions that models without experts, latent attention or rotary embeddings do not have."""


def is_hf_folder(path: str | None) -> bool:
    """Whether ``path`` is a local Hugging Face checkpoint."""
    return path is not None and (Path(path).expanduser() / "config.json").is_file()


def looks_like_hub_id(name: str) -> bool:
    """Whether a name has the form ``owner/model`` of a hub id and no local folder has the name of
    the owner.
    """
    return bool(_HUB_ID.fullmatch(name)) and not Path(name).parent.is_dir()


def read_config(checkpoint: str, name: str = "config.json") -> dict[str, Any] | None:
    """Read config.json, or another JSON file, from a local folder or the hub cache; None if there
    is no readable one.

    For a vision-language model, the keys of its text part are merged into the top level, because
    the flags describe the text model.
    """
    file = _file_of(checkpoint, name)
    if file is None:
        return None
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def model_config(checkpoint: str | None, name: str = "config.json") -> dict[str, Any]:
    """Do the same as :func:`read_config`, but return an empty object if there is no readable
    file.
    """
    return (read_config(checkpoint, name) if checkpoint else None) or {}


def model_dimension(checkpoint: str | None, name: str) -> Any:
    """Return a dimension of the model by its name in :data:`SHAPE`; None if only other kinds of
    model have it.

    Raises:
        AttributeError: config.json is not on this machine, or does not contain the dimension.
    """
    config = config_once(checkpoint or "")
    if not config:
        where = f"{checkpoint}, which is not on this machine" if checkpoint else "(not given)"
        raise AttributeError(f"args.{name} needs config.json of --hf-checkpoint {where}")
    key, value = lookup_dimension(config, name)
    if value is None and name not in _ABSENT_IN_MANY:
        raise AttributeError(
            f"args.{name}: config.json of --hf-checkpoint {checkpoint} has no {key}"
        )
    return value


_READ: dict[str, dict[str, Any]] = {}


def config_once(checkpoint: str) -> dict[str, Any]:
    """Do the same as :func:`model_config`, but read it once per process. A missing file is not
    cached, because a checkpoint of the hub may be downloaded later."""
    if not _READ.get(checkpoint):
        _READ[checkpoint] = model_config(checkpoint)
    return _READ[checkpoint]


def lookup_dimension(config: Mapping[str, Any], name: str) -> tuple[str, Any]:
    """Return the key of config.json that holds a dimension, and its value (None if it is
    missing).
    """
    for key in SHAPE[name]:
        if config.get(key) is not None:
            return key, config[key]
    # Older models leave out what follows from other keys.
    hidden = config.get("hidden_size")
    heads = config.get("num_attention_heads")
    if (
        name == "kv_channels"
        and isinstance(hidden, int)
        and isinstance(heads, int)
        and hidden
        and heads
    ):
        return "hidden_size / num_attention_heads", hidden // heads
    if name == "num_query_groups" and config.get("num_attention_heads"):
        # multi-head attention: one group per head
        return "num_attention_heads", config["num_attention_heads"]
    rope = config.get("rope_parameters")
    if name == "rotary_base" and isinstance(rope, dict):
        return "rope_parameters.rope_theta", rope.get("rope_theta")
    return SHAPE[name][0], None


def read_chat_template(checkpoint: str) -> str | None:
    """Return the chat template of a checkpoint in a local folder or in the hub cache; several are
    joined to one text.

    It is empty if the tokenizer has no chat template, and None if there is no readable tokenizer on
    this machine."""
    config = _file_of(checkpoint, "tokenizer_config.json")
    if config is None:
        return None
    try:
        files = sorted(config.parent.glob("additional_chat_templates/*.jinja"))
        files.insert(0, config.parent / "chat_template.jinja")
        texts = [file.read_text() for file in files if file.is_file()]
        given = json.loads(config.read_text()).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return None
    if isinstance(given, list):  # several templates, each with a name
        given = "\n".join(str(entry.get("template")) for entry in given if isinstance(entry, dict))
    return "\n".join(texts) or str(given or "")


def context_length(config: dict[str, Any], scaled: bool = True) -> int | None:
    """Return the maximum sequence length of a model in tokens, from its config.json; None if it is
    not given there.

    Args:
        scaled: Multiply by the factor of the rotary scaling, as SGLang does, unless the length
            includes it already.
    """
    length = next((config[name] for name in _LENGTHS if isinstance(config.get(name), int)), None)
    scaling = config.get("rope_scaling")
    if not scaled or length is None or not isinstance(scaling, dict):
        return length
    counted = "original_max_position_embeddings" in scaling or scaling.get("rope_type") == "llama3"
    return length if counted else int(length * float(scaling.get("factor") or 1))


def rotary_limit(config: Mapping[str, object]) -> int | None:
    """Return the maximum length of sequences that can be computed in one batch, in tokens, from a
    model's config.json; None for most models.

    With the types ``longrope`` and ``dynamic``, transformers computes a whole batch with the rotary
    frequencies of its longest sequence. So beyond this length, a sequence changes the others in its
    batch.
    """
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        return None
    limits = []
    # Models with several kinds of layers have parameters for each kind.
    for rope in (parameters, *parameters.values()):
        kind = (rope.get("rope_type") or rope.get("type")) if isinstance(rope, Mapping) else None
        if kind == "longrope":
            limits.append(
                config.get("original_max_position_embeddings")
                or rope.get("original_max_position_embeddings")
            )
        elif kind == "dynamic":
            limits.append(config.get("max_position_embeddings"))
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


def media_token_ids(checkpoint: str | None) -> list[int]:
    """Return the token ids that are replaced by features of an image, video or audio, and Gemma 3's
    start of an image, in whose place its processor puts them; empty for a text model."""
    config = model_config(checkpoint)
    return sorted(
        {
            number
            for kind in ("image", "video", "audio", "boi")
            for end in ("id", "index")
            if isinstance(number := config.get(f"{kind}_token_{end}"), int)
        }
    )


def end_token_ids(checkpoint: str, *others: int | None) -> frozenset[int]:
    """Return the tokens at which engines end a response: those of generation_config.json and
    config.json of a local or cached checkpoint, and ``others`` (that of the tokenizer)."""
    ends: set[Any] = {*others}
    for name in "generation_config.json", "config.json":
        value = model_config(checkpoint, name).get("eos_token_id")
        ends |= set(value if isinstance(value, list) else [value])
    return frozenset(int(token) for token in ends if token is not None)


def _file_of(checkpoint: str, name: str) -> Path | None:
    """Return a file of a local folder, or of the newest snapshot in the hub cache, if it exists."""
    folder = Path(checkpoint).expanduser()
    if not folder.is_dir():
        home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
        hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
        snapshots = hub / f"models--{checkpoint.replace('/', '--')}" / "snapshots"
        folder = max((file.parent for file in snapshots.glob(f"*/{name}")), default=snapshots)
    file = folder / name
    return file if file.is_file() else None


def megatron_folder(path: str | None) -> Path | None:
    """Find the folder with an actor's Megatron weights: ``path`` itself, its subfolder ``actor``,
    or ``actor`` of the newest snapshot in it. None if there is none."""
    if path is None:
        return None
    folder = Path(path).expanduser()
    snapshots = sorted(folder.glob("iter_*"), reverse=True) if folder.is_dir() else []
    for candidate in (folder, folder / "actor", *(snapshot / "actor" for snapshot in snapshots)):
        tensors = any((candidate / name).is_dir() for name in ("torch_dist", "torch"))
        if tensors and (candidate / "trainer.json").is_file():
            return candidate
    return None
