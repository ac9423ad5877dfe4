"""What the rank of ``test_schedules.py`` runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def weight_decays(rank: int, ports: Any, path: Path, flags: dict[str, Any], output: Path) -> None:
    """Write the weight decay of each optimizer step of a run."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    from fsdp_helpers import make_args

    from slime.backends.create import create_backend

    args = make_args(path, train_backend="megatron", world_size=1, **flags)
    args.megatron = {
        "start_weight_decay": 0.0,
        "end_weight_decay": 1.0,
        "weight_decay_incr_style": "linear",
    }
    backend: Any = create_backend(args, "actor", 0, 1, "127.0.0.1", ports.get(0))
    found = []
    for _ in range(args.num_rollout):
        found.append(max(group["weight_decay"] for group in backend.optimizer.chained.param_groups))
        backend.optimizer.step(backend.optimizer.grad_norm())
    torch.save(found, output)


def learning_rates(rank: int, ports: Any, path: Path, folder: Path) -> None:
    """Write the learning rates of three steps, and those after a snapshot without optimizer,
    resumed in three ways.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    from fsdp_helpers import make_args
    from megatron_ranks import leave_groups

    from slime.backends.create import create_backend

    found = []
    resumed: list[dict[str, Any]] = [{}, {"no_load_optim": True}, {"finetune": True}]
    for number, flags in enumerate([{"no_save_optim": True}, *resumed]):
        args = make_args(
            path, train_backend="megatron", world_size=1, lr=1.0, lr_decay_style="linear", **flags
        )
        args.megatron = {}
        backend: Any = create_backend(args, "actor", 0, 1, "127.0.0.1", ports.get(number))
        if number:
            backend.load(folder / "snapshot")
        found.append([backend.optimizer.step(backend.optimizer.grad_norm()) for _ in range(3)])
        if not number:
            backend.save(folder / "snapshot")
        leave_groups()
    torch.save(found, folder / "found.pt")
