"""Training state in one file per rank (``--ckpt-format torch``), written by ``torch.save``. Only
the same layout can load it.

``weights_TP_PP_ETP_EP.pt`` has the parameters of the ranks with these model-parallel ranks.
``optimizer_RANK.pt`` has the state of a rank's optimizer: main parameters, moments and counts of
steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from slime.backends.collectives import gather_objects
from slime.checkpoint.files import DigestedFile, FileEntry
from slime.data.plain_values import save_value
from slime.plugins.megatron.core import MegatronError
from slime.plugins.megatron.optimizer import ScheduledOptimizer

GRID = ("tp", "pp", "ep", "etp", "vpp")
Content = dict[Path, list[dict[str, Tensor]]]
"""The content of each file."""


def content(states: list[dict[str, Tensor]], folder: Path) -> Content:
    """Return the files with a model's state dicts that this rank writes, copied to the CPU.

    This is a collective operation. Of the ranks with the same parameters, only one writes.
    """
    if gather_objects(_place()).index(_place()) != dist.get_rank():
        return {}
    return {folder / f"weights_{_place()}.pt": [_copied(state) for state in states]}


def optimizer_content(optimizer: ScheduledOptimizer, rank: int, folder: Path) -> Content:
    """Return the file with the state of this rank's optimizer, copied to the CPU."""
    optimizer.prime()
    return {folder / f"optimizer_{rank}.pt": [_copied(kept) for kept in optimizer.kept()]}


def write(files: Content, root: Path) -> list[FileEntry]:
    """Write the files, and return them with their digests and with paths relative to ``root``."""
    entries = []
    for path, state in files.items():
        with DigestedFile(path) as file:
            save_value(state, file)
        entries.append(file.entry(root))
    return entries


def read_weights(
    folder: Path, saved: Mapping[str, int], here: Mapping[str, int]
) -> list[dict[str, Tensor]]:
    """Read the state dicts of this rank's part of the model.

    Args:
        saved: The layout of the run that wrote the files.
        here: The layout of this run.

    Raises:
        MegatronError: The files were written with another layout.
    """
    _same(folder, {name: saved[name] for name in GRID}, {name: here[name] for name in GRID})
    file = folder / f"weights_{_place()}.pt"
    if not file.is_file():
        raise MegatronError(
            f"{folder} has no {file.name}: it was saved with another layout. Use as many ranks as "
            "when it was saved"
        )
    states: list[dict[str, Tensor]] = torch.load(file, map_location="cpu", weights_only=True)
    return states


@torch.no_grad()
def read_optimizer(
    optimizer: ScheduledOptimizer,
    rank: int,
    folder: Path,
    saved: Mapping[str, int],
    here: Mapping[str, int],
) -> None:
    """Read main parameters, moments and counts of steps into the tensors of ``optimizer``.

    Raises:
        MegatronError: The files were written with another layout or another number of ranks.
    """
    _same(folder, saved, here)
    optimizer.prime()
    file = folder / f"optimizer_{rank}.pt"
    for kept, state in zip(
        optimizer.kept(), torch.load(file, map_location="cpu", weights_only=True), strict=True
    ):
        for name, tensor in kept.items():
            tensor.copy_(state[name])


def _same(folder: Path, saved: Mapping[str, int], here: Mapping[str, int]) -> None:
    different = [
        f"{name} {saved[name]} (here {here[name]})" for name in saved if saved[name] != here[name]
    ]
    if different:
        raise MegatronError(
            f"{folder} was saved with --ckpt-format torch in another layout: "
            f"{', '.join(different)}. Use that layout, or --no-load-optim if only the number of "
            "ranks differs; only torch_dist can be loaded in another layout"
        )


def _place() -> str:
    """Return this rank's coordinates in the model-parallel grid, as text for a file name."""
    ranks = (
        mpu.get_tensor_model_parallel_rank(),
        mpu.get_pipeline_model_parallel_rank(),
        mpu.get_expert_tensor_parallel_rank(),
        mpu.get_expert_model_parallel_rank(),
    )
    return "_".join(map(str, ranks))


def _copied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to the CPU, each into its own memory, because parameters are views of large
    buffers.
    """
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
