"""What the ranks of ``test_megatron_tools.py`` run: start from converted weights, save before and after a step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megatron_ranks import TP, Layout, make_arguments, rank_batch


def worker(rank: int, ports: Any, paths: dict[str, Path]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    from slime.backends.create import create_backend
    from slime.backends.train_loop import train_on_rollout

    layout = Layout("qwen3_moe", 2, {TP: 2})
    args = make_arguments(layout, {"qwen3_moe": paths["checkpoint"]}, "megatron")
    args.ref_load = str(paths["converted"])
    backend: Any = create_backend(args, "actor", rank, 2, "127.0.0.1", ports.get(2))
    backend.save(paths["output"] / "untrained" / "iter_0000000" / "actor")
    train_on_rollout(backend, args, rank_batch(0, 0, 0, 1))
    backend.save(paths["output"] / "trained")
    backend.save_hf(paths["output"] / "exported")
