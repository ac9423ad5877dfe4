"""Hugging Face models as the trainer and the embedded engine load them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from slime.models.cpu_linear import use_onednn_linears

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ModelError(ValueError):
    """The folder, the architecture or the chosen attention does not fit; the message says what to change."""


def load_hf_config(path: str | Path, trust_remote_code: bool = False) -> Any:
    """The model's config, from a local folder or a hub id.

    Raises:
        ModelError: a path that looks local has no ``config.json``.
    """
    folder = Path(path).expanduser()
    local = folder.exists() or str(path).startswith((".", "/", "~"))
    if local and not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "does not exist"
        raise ModelError(f"model folder {str(path)!r} {what}; --hf-checkpoint takes a Hugging Face folder or a hub id")
    return AutoConfig.from_pretrained(str(folder) if local else str(path), trust_remote_code=trust_remote_code)


def is_multimodal(config: Any) -> bool:
    """Whether the checkpoint is a vision-language model."""
    return getattr(config, "vision_config", None) is not None


def load_hf_model(
    path: str | Path,
    dtype: torch.dtype,
    device: torch.device | str,
    attn_implementation: str | dict[str, str] = "sdpa",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a causal language model, or an image-text-to-text model when the config has ``vision_config``.

    Args:
        path: a Hugging Face folder, or a hub id.
        dtype: of all parameters, whatever the checkpoint's is. In float32 on the CPU linear layers go
            through oneDNN where that is faster (``cpu_linear.py``).
        device: where the parameters end up; ``meta`` reads the config alone.
        attn_implementation: a name that transformers' AttentionInterface knows, or one per sub-config.

    Returns:
        The model in eval mode, with KV cache use left to the caller.

    Raises:
        ModelError: no such folder.
    """
    config = load_hf_config(path, trust_remote_code)
    auto: Any = AutoModelForImageTextToText if is_multimodal(config) else AutoModelForCausalLM
    folder = Path(path).expanduser()
    common: dict[str, Any] = dict(
        config=config, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code
    )
    if torch.device(device).type == "meta":
        with torch.device("meta"):
            model = auto.from_config(**common)
    else:
        model = auto.from_pretrained(str(folder) if folder.exists() else str(path), **common)
        model.to(device)
    if torch.device(device).type in ("cpu", "meta") and dtype == torch.float32:
        use_onednn_linears(model)
    model.eval()
    return model
