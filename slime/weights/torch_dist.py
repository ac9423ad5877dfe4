"""Megatron weights on disk (``torch_dist``) without Megatron: made of a Hugging Face folder, and turned back into one.

A folder holds ``trainer.json`` (shape and family of the model) and ``torch_dist/``, a checkpoint of
``torch.distributed.checkpoint`` with Megatron's names: one tensor per parameter of the whole model, layers by their
index. ``slime/backends/megatron/checkpoint.py`` writes and reads the same with an optimizer, from any layout.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from slime.config.hf_config import megatron_folder
from slime.weights.dcp_metadata import require_tensors
from slime.weights.hf_folder import HfFolder
from slime.weights.maps.family import Entry, Family, Settings

META = "trainer.json"
TENSORS = "torch_dist"
RANK_FILES = "torch"
"""Where ``--ckpt-format torch`` writes; named after the format, as the other."""
MEGATRON_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def read_meta(path: Path) -> dict[str, Any]:
    """What ``trainer.json`` says.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is FSDP's.
    """
    file = path / META
    if not file.is_file():
        raise FileNotFoundError(f"no training state in {path}: {META} is missing; it takes a folder that --save wrote")
    meta: dict[str, Any] = json.loads(file.read_text())
    if meta.get("format") != "megatron":
        raise ValueError(f"{path} was saved by --train-backend fsdp: load it with that, or export it with --save-hf")
    return {"ckpt_format": TENSORS, **meta}


def describe(family: Family, settings: Settings, hf_checkpoint: str, **more: object) -> dict[str, Any]:
    """The content of ``trainer.json``; everything that a conversion back needs."""
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
    """Write a Hugging Face checkpoint as Megatron weights, in its dtypes. Ranks of a process group, if there is one,
    share the work: each holds its parameters in memory until they are written."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    entries = list(family.entries(settings))
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
    """Write what megatron-core looks for in a checkpoint of this format; returns the files."""
    files = [folder / "common.pt", folder / "metadata.json"]
    torch.save({}, files[0])
    files[1].write_text(json.dumps(MEGATRON_FORMAT))
    return files


def _full(entry: Entry, folder: HfFolder) -> Tensor:
    if not entry.experts:
        return _as_saved(entry, entry.layout.join([folder.get(name) for name in entry.hf]))
    experts = []
    for expert in range(entry.experts):
        tensors = [folder.get(name.format(expert=expert)) for name in entry.hf]
        experts.append(entry.layout.join(tensors))
    return torch.stack(experts)


def _as_saved(entry: Entry, full: Tensor) -> Tensor:
    """Megatron stores gate and up one below the other; experts keep them apart."""
    return full.flatten(0, 1) if full.dim() == 3 and not entry.experts else full


def hf_tensors(
    path: Path, family: Family, settings: Settings, vocab_size: int | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face tensors of Megatron weights, parameter by parameter.

    Args:
        path: a folder with ``torch_dist/`` in it.
        vocab_size: rows of the embeddings, if not those of the settings.

    Raises:
        KeyError: the checkpoint lacks a parameter; names it.
        ValueError: ``vocab_size`` is above the rows that are stored.
    """
    stored_rows = settings["vocab_size"]
    if vocab_size and vocab_size > stored_rows:
        raise ValueError(f"--vocab-size {vocab_size}: {path} has embeddings of {stored_rows} tokens and no more")
    settings = {**settings, "vocab_size": vocab_size or settings["vocab_size"]}
    require_tensors(path / TENSORS)
    reader = dcp.FileSystemReader(path / TENSORS)
    stored: dict[str, Any] = reader.read_metadata().state_dict_metadata
    for entry in family.entries(settings):
        if entry.megatron not in stored:
            raise KeyError(f"{path} has no parameter {entry.megatron!r}: does --origin-hf-dir belong to it?")
        what = stored[entry.megatron]
        full = torch.empty(what.size, dtype=what.properties.dtype)
        dcp.load({entry.megatron: full}, storage_reader=reader, no_dist=True)
        if not entry.experts:
            yield from zip(entry.hf, entry.layout.split(_from_saved(entry, full)), strict=True)
            continue
        for expert, part in enumerate(full.unbind(0)):
            names = [name.format(expert=expert) for name in entry.hf]
            yield from zip(names, entry.layout.split(part), strict=True)


def _from_saved(entry: Entry, full: Tensor) -> Tensor:
    return full.reshape(entry.layout.full_shape(full.shape, 1))


def find(path: str) -> Path:
    """The folder of Megatron weights (``torch_dist``) that a path names.

    Raises:
        FileNotFoundError: there is none.
        ValueError: they were saved with ``--ckpt-format torch``.
    """
    found = megatron_folder(path)
    if found is None:
        raise FileNotFoundError(f"{path} holds no Megatron weights ({META} and {TENSORS}/), nor do its snapshots")
    if not (found / TENSORS).is_dir():
        raise ValueError(
            f"{found} was saved with --ckpt-format torch, each rank's tensors by themselves: convert it with "
            "tools/convert_to_hf.py and the flags of the run"
        )
    return found


def join_launched_ranks() -> tuple[int, int]:
    """Rank and number of ranks under torchrun (a gloo group is made); 0 and 1 otherwise."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


__all__ = [
    "META",
    "RANK_FILES",
    "TENSORS",
    "convert_from_hf",
    "describe",
    "find",
    "hf_tensors",
    "join_launched_ranks",
    "mark_as_megatron",
    "read_meta",
]
