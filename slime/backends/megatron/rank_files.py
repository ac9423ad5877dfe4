"""Training state as files of single ranks (``--ckpt-format torch``): plain ``torch.save``, for the same layout.

``weights_TP_PP_ETP_EP.pt`` holds the parameters of one place in the model-parallel grid, ``optimizer_RANK.pt`` what a
rank's optimizer keeps: main parameters, moments and counts of steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import IO, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from slime.backends.megatron.core import MegatronError
from slime.backends.megatron.optimizer import ScheduledOptimizer
from slime.checkpoint.files import DigestedFile, FileEntry

GRID = ("tp", "pp", "ep", "etp", "vpp")
Content = dict[Path, list[dict[str, Tensor]]]
"""What goes into each file."""


def content(states: list[dict[str, Tensor]], folder: Path) -> Content:
    """This rank's files of a model's state dicts, copied to the CPU; a collective: of equal places one rank writes."""
    places: list[str] = [_place()]
    if dist.is_initialized():
        places = [""] * dist.get_world_size()
        dist.all_gather_object(places, _place())
    rank = dist.get_rank() if dist.is_initialized() else 0
    if places.index(_place()) != rank:
        return {}
    return {folder / f"weights_{_place()}.pt": [_copied(state) for state in states]}


def optimizer_content(optimizer: ScheduledOptimizer, rank: int, folder: Path) -> Content:
    """The file of this rank's optimizer, copied to the CPU."""
    optimizer.prime()
    return {folder / f"optimizer_{rank}.pt": [_copied(kept) for kept in optimizer.kept()]}


def write(files: Content, root: Path) -> list[FileEntry]:
    """Returns the files with their digests, and with paths relative to ``root``."""
    entries = []
    for path, state in files.items():
        with DigestedFile(path) as file:
            torch.save(state, cast("IO[bytes]", file))
        entries.append(file.entry(root))
    return entries


def read_weights(folder: Path, saved: Mapping[str, int], here: Mapping[str, int]) -> list[dict[str, Tensor]]:
    """State dicts of this rank's part of the model.

    Raises:
        MegatronError: another layout wrote them.
    """
    _same(folder, {name: saved[name] for name in GRID}, {name: here[name] for name in GRID})
    file = folder / f"weights_{_place()}.pt"
    if not file.is_file():
        raise MegatronError(
            f"{folder} has no {file.name}: it was written by another layout; give as many ranks as then"
        )
    states: list[dict[str, Tensor]] = torch.load(file, map_location="cpu", weights_only=True)
    return states


@torch.no_grad()
def read_optimizer(
    optimizer: ScheduledOptimizer, rank: int, folder: Path, saved: Mapping[str, int], here: Mapping[str, int]
) -> None:
    """Main parameters, moments and steps, each into the tensor that is there.

    Raises:
        MegatronError: another layout, or other numbers of ranks, wrote them.
    """
    _same(folder, saved, here)
    optimizer.prime()
    file = folder / f"optimizer_{rank}.pt"
    for kept, state in zip(optimizer.kept(), torch.load(file, map_location="cpu", weights_only=True), strict=True):
        for name, tensor in kept.items():
            tensor.copy_(state[name])


def _same(folder: Path, saved: Mapping[str, int], here: Mapping[str, int]) -> None:
    different = [f"{name} {saved[name]} (here {here[name]})" for name in saved if saved[name] != here[name]]
    if different:
        raise MegatronError(
            f"{folder} was saved with --ckpt-format torch by another layout: {', '.join(different)}. Use that one, or "
            "--no-load-optim where only the number of ranks differs; torch_dist alone moves between layouts"
        )


def _place() -> str:
    """Where this rank stands in the model-parallel grid."""
    ranks = (
        mpu.get_tensor_model_parallel_rank(),
        mpu.get_pipeline_model_parallel_rank(),
        mpu.get_expert_tensor_parallel_rank(),
        mpu.get_expert_model_parallel_rank(),
    )
    return "_".join(map(str, ranks))


def _copied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, each tensor in memory of its own: parameters are views of large buffers."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
