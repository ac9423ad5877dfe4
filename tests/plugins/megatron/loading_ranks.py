"""What the ranks of ``test_loading.py`` run."""

from __future__ import annotations

import os
from pathlib import Path
from types import EllipsisType
from typing import Any, ClassVar


def load(
    rank: int, ports: Any, path: Path, layouts: list[dict[str, Any]], output: Path, world: int
) -> None:
    """For each layout: this rank's parameters, those that reading whole tensors on every rank
    gives, and the bytes that were read for both."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    from fsdp_helpers import make_args
    from megatron_ranks import leave_groups

    from slime.backends.create import create_backend
    from slime.plugins.megatron import trained_model

    trained_model.HfFolder = counting_folder()  # type: ignore[misc]
    found = []
    for number, layout in enumerate(layouts):
        args = make_args(path, train_backend="megatron", world_size=world, train_dtype="bfloat16")
        args.megatron = dict(layout)
        backend: Any = create_backend(args, "actor", rank, world, "127.0.0.1", ports.get(number))
        live = {name: tensor.detach().clone() for name, tensor in backend.weights.tensors()}
        read = sum(folder.bytes_read for folder in trained_model.HfFolder.made)  # type: ignore[attr-defined]
        whole, whole_read = read_whole(backend.weights, trained_model.HfFolder(path))
        assert live.keys() == whole.keys()
        equal = all(
            torch.equal(tensor, whole[name].view_as(tensor)) for name, tensor in live.items()
        )
        found.append({"equal": equal, "read": read, "whole_read": whole_read})
        trained_model.HfFolder.made.clear()  # type: ignore[attr-defined]
        leave_groups()
    torch.save(found, output / f"rank{rank}.pt")


def counting_folder() -> Any:
    """A class like HfFolder that counts the bytes of what it gives."""
    from torch import Tensor

    from slime.weights.hf_folder import HfFolder

    class CountingFolder(HfFolder):
        made: ClassVar[list[CountingFolder]] = []

        def __init__(self, path: str | Path) -> None:
            super().__init__(path)
            self.bytes_read = 0
            self.made.append(self)

        def get(self, name: str, index: EllipsisType | tuple[slice, ...] = ...) -> Tensor:
            tensor = super().get(name, index)
            self.bytes_read += tensor.nbytes
            return tensor

    return CountingFolder


def read_whole(weights: Any, folder: Any) -> tuple[dict[str, Any], int]:
    """This rank's parameters cut from whole tensors, and the bytes of those tensors."""
    import torch
    from megatron.core import parallel_state as mpu

    from slime.plugins.megatron.groups import tensor_group

    found = {}
    for name, tensor in weights.tensors():
        entry = weights.entries[name.removeprefix("duplicate.")]
        group = tensor_group(entry)
        count = tensor.shape[0] if entry.experts else 1
        first = mpu.get_expert_model_parallel_rank() * count
        parts = []
        for expert in range(first, first + count):
            tensors = [folder.get(hf.format(expert=expert)) for hf in entry.hf]
            full = entry.layout.join([x[expert] for x in tensors] if entry.is_stacked else tensors)
            axis = entry.layout.axis
            parts.append(full if axis is None else full.chunk(group.size(), axis)[group.rank()])
        found[name] = torch.stack(parts).to(tensor.dtype)
    return found, folder.bytes_read


def load_damaged(rank: int, ports: Any, path: Path, output: Path) -> None:
    """Read a checkpoint in which one value is not finite; write the error."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    from fsdp_helpers import make_args

    from slime.backends.create import create_backend

    args = make_args(path, train_backend="megatron", world_size=4, train_dtype="bfloat16")
    args.megatron = {"tensor_model_parallel_size": 2}
    try:
        create_backend(args, "actor", rank, 4, "127.0.0.1", ports.get(0))
    except Exception as error:
        (output / f"rank{rank}.txt").write_text(f"{type(error).__name__}: {error}")


def load_megatron_lm(
    rank: int, ports: Any, path: Path, theirs: Path, layouts: list[dict[str, Any]], world: int
) -> None:
    """A checkpoint of Megatron-LM as initial weights and as reference: both give the tensors of the
    folder ``path``.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    from fsdp_helpers import make_args
    from megatron_ranks import leave_groups

    from slime.backends.create import create_backend
    from slime.weights.hf_folder import HfFolder

    source = HfFolder(path)
    for number, layout in enumerate(layouts):
        args = make_args(
            path,
            train_backend="megatron",
            world_size=world,
            train_dtype="float32",
            use_kl_loss=True,
        )
        args.load, args.ref_load = (str(theirs), str(path)) if number % 2 else (None, str(theirs))
        args.megatron = dict(layout)
        backend: Any = create_backend(args, "actor", rank, world, "127.0.0.1", ports.get(number))
        for tag in ("actor", "ref"):
            with backend.bank.using(tag):
                named = dict(backend.weights.gather())
            assert set(named) == set(source.shapes())
            for name, tensor in named.items():
                assert torch.equal(tensor.cpu(), source.get(name)), (layout, tag, name)
        leave_groups()


def save_by_megatron_core(rank: int, ports: Any, tensors: Any, folder: Path, world: int) -> None:
    """Let megatron-core write a checkpoint: stacked layers, of which each rank has some, and an
    object of bytes.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import re

    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    address = f"tcp://127.0.0.1:{ports.get(0)}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    layers = 1 + max(
        int(found[1]) for name in tensors if (found := re.match(r"decoder\.layers\.(\d+)\.", name))
    )
    state: dict[str, Any] = {}
    for name, tensor in tensors.items():
        found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
        if found is None:
            state[name] = ShardedTensor.from_rank_offsets(name, tensor, replica_id=rank)
        elif int(found[1]) % world == rank:
            key, layer = f"decoder.layers.{found[2]}", int(found[1])
            state[name] = ShardedTensor.from_rank_offsets(
                key, tensor, (0, layer, layers), prepend_axis_num=1
            )
    state["extra"] = ShardedObject(
        "decoder.layers.mlp.linear_fc1._extra_state", b"fp8", (1,), (0,), replica_id=rank
    )
    if rank == 0:
        (folder / "iter_0000003").mkdir(parents=True)
        (folder / "latest_checkpointed_iteration.txt").write_text("3")
    torch.distributed.barrier()
    dist_checkpointing.save(state, str(folder / "iter_0000003"))
    torch.distributed.destroy_process_group()


def export(rank: int, ports: Any, path: Path, output: Path, world: int) -> None:
    """Write a Hugging Face folder of untrained weights."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    from fsdp_helpers import make_args

    from slime.backends.create import create_backend

    args = make_args(path, train_backend="megatron", world_size=world, train_dtype="float32")
    args.megatron = {"tensor_model_parallel_size": 2}
    backend: Any = create_backend(args, "actor", rank, world, "127.0.0.1", ports.get(0))
    backend.save_hf(output)


def name_weights(
    rank: int, ports: Any, path: Path, layouts: list[dict[str, Any]], output: Path
) -> None:
    """For each layout of two ranks: the weights that engines get."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    from fsdp_helpers import make_args
    from megatron_ranks import leave_groups

    from slime.backends.create import create_backend

    for number, layout in enumerate(layouts):
        args = make_args(path, train_backend="megatron", world_size=2, train_dtype="bfloat16")
        args.megatron = dict(layout)
        backend: Any = create_backend(args, "actor", rank, 2, "127.0.0.1", ports.get(number))
        sent = {name: tensor.clone() for name, tensor in backend.named_weights()}
        if rank == 0:
            torch.save(sent, output / f"{number}.pt")
        leave_groups()
