"""What the rank of ``test_weight_decay.py`` runs."""

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
