"""Write checkpoints with the names and layouts of Megatron-LM (``torch_dist``) from a Hugging Face
folder.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from slime.models.loading import load_hf_config
from slime.plugins.megatron.maps.family import family_of
from slime.weights.hf_folder import HfFolder

Experts = Literal["grouped", "numbered", "single", "apart"]
TRACKER = "latest_checkpointed_iteration.txt"
PADDED = 96
"""Rows of the embeddings with padding; the tiny vocabularies are smaller."""
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def their_names(
    folder: Path, experts: Experts = "grouped", padded: int = PADDED
) -> dict[str, Tensor]:
    """Return the parameters of a model with the names of Megatron-LM and the number of the layer in
    the name.

    Args:
        padded: The number of rows of the embeddings.
    """
    config = load_hf_config(folder).get_text_config()
    family, source = family_of(config), HfFolder(folder)
    settings = {**family.settings(config.to_dict()), "padded_vocab_size": None}
    latent = bool(settings.get("multi_latent_attention"))
    out: dict[str, Tensor] = {}
    for entry in family.entries({**settings, "padded_vocab_size": padded}):
        found = _LAYER.fullmatch(entry.megatron)
        prefix, rest = (f"decoder.layers.{found[1]}.", found[2]) if found else ("", entry.megatron)
        if entry.experts:
            parts = [
                entry.layout.join([source.get(name.format(expert=e)) for name in entry.hf])
                for e in range(entry.experts)
            ]
            linear = "linear_fc1" if rest.endswith("gate_up") else "linear_fc2"
            out |= {f"{prefix}{name}": x for name, x in _experts(linear, parts, experts).items()}
            continue
        full = entry.layout.join([source.get(name) for name in entry.hf])
        tensor = full.flatten(0, 1) if full.dim() == 3 else full
        if "word_embeddings" in rest or rest == "output_layer.weight":
            count = int(settings["vocab_size"])
            tensor = torch.cat([tensor[:count], torch.full((padded - count, tensor.shape[1]), 7.0)])
        is_moe = bool(
            settings.get("num_experts")
        ) and f"{prefix}mlp.linear_fc1.weight" not in _dense(family, settings)
        out[prefix + _renamed(rest, latent, is_moe)] = tensor
    return out


def _dense(family: Any, settings: Any) -> set[str]:
    return {entry.megatron for entry in family.entries(settings)}


def _renamed(rest: str, latent: bool, is_moe: bool) -> str:
    names = {
        "self_attn_bda.norm.weight": "post_self_attn_layernorm.weight",
        "mlp_bda.norm.weight": "post_mlp_layernorm.weight",
    }
    if latent:
        names["self_attention.q_layernorm.weight"] = (
            "self_attention.linear_q_up_proj.layer_norm_weight"
        )
        names["self_attention.kv_layernorm.weight"] = (
            "self_attention.linear_kv_up_proj.layer_norm_weight"
        )
    else:
        names["input_layernorm.weight"] = "self_attention.linear_qkv.layer_norm_weight"
    if not is_moe:
        names["pre_mlp_layernorm.weight"] = "mlp.linear_fc1.layer_norm_weight"
    return names.get(rest, rest)


def _experts(linear: str, parts: list[Tensor], form: Experts) -> dict[str, Tensor]:
    flat = [part.flatten(0, 1) if part.dim() == 3 else part for part in parts]
    base = "mlp.experts.experts"
    if form == "grouped":
        return {f"{base}.{linear}.weight": torch.stack(flat)}
    if form == "numbered":
        return {f"{base}.{linear}.weight{e}": x for e, x in enumerate(flat)}
    if form == "single" or linear == "linear_fc2":
        return {f"{base}.{e}.{linear}.weight": x for e, x in enumerate(flat)}
    halves = {e: x.chunk(2) for e, x in enumerate(flat)}
    return {
        f"{base}.{e}.{linear}.weight_{k}": half
        for e, x in halves.items()
        for k, half in zip("wv", x, strict=True)
    }


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stack the layers of a model whose layers are all alike."""
    layers: dict[str, list[Tensor]] = {}
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if found := _LAYER.fullmatch(name):
            layers.setdefault(f"decoder.layers.{found[2]}", []).append(tensor)
        else:
            out[name] = tensor
    return out | {name: torch.stack(each) for name, each in layers.items()}


def write(
    target: Path,
    tensors: dict[str, Tensor],
    iteration: int | None = 100,
    edit: Callable[[dict[str, Any]], object] = lambda state: None,
) -> Path:
    """Write a folder with a tracker file and one iteration (None: ``release``), with states of the
    optimizer too.
    """
    name = "release" if iteration is None else f"iter_{iteration:07d}"
    extra = io.BytesIO(b"extra state of Transformer Engine")
    state: dict[str, Any] = {
        **tensors,
        "decoder.layers.self_attention.core_attention._extra_state/shard_0_1": extra,
    }
    state |= {f"optimizer.state.exp_avg.{key}": torch.ones(3) for key in list(tensors)[:2]}
    edit(state)
    target.mkdir(parents=True, exist_ok=True)
    dcp.save(state, checkpoint_id=target / name, no_dist=True)
    torch.save({"iteration": iteration}, target / name / "common.pt")
    (target / name / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    (target / TRACKER).write_text("release" if iteration is None else str(iteration))
    return target
