"""Hugging Face checkpoints on this machine: where they are and what their config.json says. No transformers."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

_LENGTHS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


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


def _cached(hub_id: str) -> Path | None:
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    found = sorted((hub / f"models--{hub_id.replace('/', '--')}" / "snapshots").glob("*/config.json"))
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
