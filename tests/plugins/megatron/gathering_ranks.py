"""What the ranks of ``test_gathering.py`` run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

LAYOUTS: list[dict[str, Any]] = [
    {"tensor_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2},
    {"expert_model_parallel_size": 2},
]


def gather(rank: int, ports: Any, path: Path, output: Path) -> None:
    """For each layout: the checkpoint's tensors, and the collectives that they took, batched and
    one at a time.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    from fsdp_helpers import make_args
    from megatron.core import parallel_state as mpu
    from megatron_ranks import leave_groups

    from slime.backends import collectives
    from slime.backends.create import create_backend
    from slime.plugins.megatron import groups

    calls: list[str] = []

    def counted(module: Any, name: str) -> None:
        real = getattr(module, name)

        def call(*arguments: Any, **named: Any) -> Any:
            calls.append(name)
            return real(*arguments, **named)

        setattr(module, name, call)

    counted(collectives, "all_gather_flat")
    counted(groups.dist, "broadcast")
    found = []
    for number, layout in enumerate(LAYOUTS):
        args = make_args(path, train_backend="megatron", world_size=2, train_dtype="bfloat16")
        args.megatron = dict(layout)
        backend: Any = create_backend(args, "actor", rank, 2, "127.0.0.1", ports.get(number))
        gloo = [
            name for name in vars(mpu) if name.endswith("_GLOO") and getattr(mpu, name) is not None
        ]
        assert not gloo, f"nothing uses {gloo}, and each is a group of TCP connections"
        by_size: dict[int, Any] = {}
        for size in (collectives.BATCH_BYTES, 20_000, 1):
            collectives.BATCH_BYTES, kept = size, collectives.BATCH_BYTES
            calls.clear()
            tensors = {name: tensor.clone() for name, tensor in backend.named_weights()}
            by_size[size] = {"tensors": tensors, "collectives": len(calls)}
            collectives.BATCH_BYTES = kept
        found.append(list(by_size.values()))
        leave_groups()
    torch.save(found, output / f"rank{rank}.pt")
