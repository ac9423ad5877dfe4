"""Convert between Hugging Face checkpoints and Megatron checkpoints (``torch_dist``) without
Megatron.

A checkpoint folder has ``trainer.json`` (shape and family of the model) and ``torch_dist/``, a
checkpoint of ``torch.distributed.checkpoint`` with Megatron's names. It has one tensor per
parameter of the whole model, and layers are named by their index in the whole model.
``slime/plugins/megatron/checkpoint.py`` writes and reads the same format, with an optimizer and
for any parallel layout.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from slime.backends.tensor_index import META, require_tensors
from slime.config.hf_config import megatron_folder
from slime.data.plain_values import save_value
from slime.plugins.megatron.maps import Stacked
from slime.plugins.megatron.maps.family import Entry, Family, Settings
from slime.weights.hf_folder import HfFolder

TENSORS = "torch_dist"
RANK_FILES = "torch"
"""The folder that ``--ckpt-format torch`` writes. Like the other folder, it has the name of its
format.
"""
MEGATRON_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def read_meta(path: Path) -> dict[str, Any]:
    """Return the content of ``trainer.json``.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The checkpoint was saved by FSDP.
    """
    file = path / META
    if not file.is_file():
        raise FileNotFoundError(
            f"{path} has no training state, because {META} is missing: give a folder of --save"
        )
    meta: dict[str, Any] = json.loads(file.read_text())
    if meta.get("format") != "megatron":
        raise ValueError(
            f"{path} was saved by --train-backend fsdp: load it with FSDP, or export it with "
            "--save-hf"
        )
    return {"ckpt_format": TENSORS, **meta}


def adapter_only(path: Path, meta: Mapping[str, Any]) -> str | None:
    """Return what to do with a checkpoint that has only an adapter (LoRA), given its
    :func:`read_meta`; None if it has a whole model."""
    if not meta.get("lora"):
        return None
    return (
        f"{path} has only an adapter of {meta['lora']['base']}, not the weights of a model: merge "
        "it into its base with slime merge-lora"
    )


def describe(
    family: Family, settings: Settings, hf_checkpoint: str, **more: object
) -> dict[str, Any]:
    """Return the content of ``trainer.json``, with everything that a conversion back needs."""
    return {
        "format": "megatron",
        "role": "actor",
        "steps": 0,
        "copies": [],
        "optimizer": False,
        "distributed_optimizer": True,
        "layout": {},
        "model_type": family.name,
        "hf_checkpoint": hf_checkpoint,
        "settings": settings,
        **more,
    }


def convert_from_hf(folder: HfFolder, family: Family, settings: Settings, save: Path) -> None:
    """Write a Hugging Face checkpoint as Megatron weights with the same dtypes.

    If there is a process group, its ranks divide the parameters among them. Each rank holds its
    parameters in memory until they are written.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    entries = [entry.found_in(folder) for entry in family.entries(settings)]
    state = {entry.megatron: _full(entry, folder) for entry in entries[rank::ranks]}
    if rank == 0:
        (save / TENSORS).mkdir(parents=True, exist_ok=True)
    if dist.is_initialized():
        dist.barrier()
    dcp.save(state, checkpoint_id=save / TENSORS, no_dist=not dist.is_initialized())
    if rank == 0:
        mark_as_megatron(save / TENSORS)
        meta = describe(family, settings, str(folder.folder))
        (save / META).write_text(json.dumps(meta, indent=2) + "\n")


def mark_as_megatron(folder: Path) -> list[Path]:
    """Write the files that megatron-core expects in a checkpoint of this format, and return their
    paths.
    """
    files = [folder / "common.pt", folder / "metadata.json"]
    with open(files[0], "wb") as file:
        save_value({}, file)
    files[1].write_text(json.dumps(MEGATRON_FORMAT))
    return files


def _full(entry: Entry, folder: HfFolder) -> Tensor:
    if not entry.experts:
        return _as_saved(entry, entry.layout.join([folder.get(name) for name in entry.hf]))
    if entry.is_stacked:
        stacked = zip(*(folder.get(name).unbind(0) for name in entry.hf), strict=True)
        return torch.stack([entry.layout.join(tensors) for tensors in stacked])
    experts = []
    for expert in range(entry.experts):
        tensors = [folder.get(name.format(expert=expert)) for name in entry.hf]
        experts.append(entry.layout.join(tensors))
    return torch.stack(experts)


def _as_saved(entry: Entry, full: Tensor) -> Tensor:
    """Return a tensor in its stored shape: gate and up are concatenated, except for experts, which
    keep them apart.
    """
    return full.flatten(0, 1) if isinstance(entry.layout, Stacked) and not entry.experts else full


def hf_tensors(
    path: Path, family: Family, settings: Settings, vocab_size: int | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the Hugging Face tensors of Megatron weights. Only one parameter is in memory at a
    time.

    Args:
        path: A folder that has ``torch_dist/``.
        vocab_size: The number of rows of the embeddings; None for that of the settings.

    Raises:
        KeyError: The checkpoint lacks a parameter, which the error names.
        ValueError: ``vocab_size`` is larger than the number of stored rows.
    """
    stored_rows = settings["vocab_size"]
    if vocab_size and vocab_size > stored_rows:
        raise ValueError(
            f"--vocab-size {vocab_size} is too large: {path} has embeddings of {stored_rows} tokens"
        )
    settings = {**settings, "vocab_size": vocab_size or settings["vocab_size"]}
    require_tensors(path / TENSORS)
    reader = dcp.FileSystemReader(path / TENSORS)
    stored: dict[str, Any] = reader.read_metadata().state_dict_metadata
    # One parameter at a time, so that the memory of a whole model is never needed.
    for entry in family.entries(settings):
        if entry.megatron not in stored:
            raise KeyError(
                f"{path} has no parameter {entry.megatron!r}: check that --origin-hf-dir belongs "
                "to it"
            )
        what = stored[entry.megatron]
        full = torch.empty(what.size, dtype=what.properties.dtype)
        dcp.load({entry.megatron: full}, storage_reader=reader, no_dist=True)
        if not entry.experts:
            yield from zip(
                entry.hf,
                entry.layout.split(full.reshape(entry.layout.full_shape(full.shape, 1))),
                strict=True,
            )
            continue
        if entry.is_stacked:
            parts = zip(*(entry.layout.split(part) for part in full.unbind(0)), strict=True)
            yield from (
                (name, torch.stack(tensors)) for name, tensors in zip(entry.hf, parts, strict=True)
            )
            continue
        for expert, part in enumerate(full.unbind(0)):
            names = [name.format(expert=expert) for name in entry.hf]
            yield from zip(names, entry.layout.split(part), strict=True)


def find(path: str) -> Path:
    """Return the folder of Megatron weights (``torch_dist``) for a path.

    Raises:
        FileNotFoundError: There are no Megatron weights.
        ValueError: The weights were saved with ``--ckpt-format torch``.
    """
    found = megatron_folder(path)
    if found is None:
        raise FileNotFoundError(
            f"{path} and its snapshots have no Megatron weights ({META} and {TENSORS}/)"
        )
    if not (found / TENSORS).is_dir():
        raise ValueError(
            f"{found} was saved with --ckpt-format torch, which stores the tensors of each rank "
            "separately: convert it with tools/convert_to_hf.py and the flags of the run"
        )
    return found


def join_launched_ranks() -> tuple[int, int]:
    """Return rank and number of ranks. Under torchrun a gloo group is created; otherwise the result
    is 0 and 1.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
