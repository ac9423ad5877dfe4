"""What the ranks of ``test_megatron_tools.py`` run: converters, and a training that starts from
converted weights.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from megatron_ranks import TP, Layout, make_arguments, rank_batch


def script(rank: int, ports: Any, words: list[str], ranks: int, folder: Path) -> None:
    """Run a script with its arguments as torchrun does; what it prints, and how it ended, are files
    of ``folder``.
    """
    variables = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, MASTER_PORT=ports.get(0))
    os.environ |= {name: str(value) for name, value in variables.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    sys.argv = words
    code: Any = 0
    with (
        (folder / f"{rank}.txt").open("w", buffering=1) as said,
        redirect_stdout(said),
        redirect_stderr(said),
    ):
        try:
            runpy.run_path(words[0], run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
        except Exception:
            code = traceback.format_exc()
        print(code, file=said)
    (folder / f"{rank}.code").write_text(str(code))


def worker(rank: int, ports: Any, paths: dict[str, Path]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    from slime.backends.create import create_backend
    from slime.backends.train_loop import train_on_rollout

    layout = Layout("qwen3_moe", 2, {TP: 2})
    args = make_arguments(layout, {"qwen3_moe": paths["checkpoint"]}, "megatron")
    args.ref_load = str(paths["converted"])
    args.custom_megatron_init_path = "user_hooks.init"
    args.custom_megatron_before_log_prob_hook_path = "user_hooks.before_log_prob"
    args.custom_megatron_before_train_step_hook_path = "user_hooks.before_step"
    args.kl_coef = 0.01
    backend: Any = create_backend(args, "actor", rank, 2, "127.0.0.1", ports.get(2))
    backend.save(paths["output"] / "untrained" / "iter_0000000" / "actor")
    train_on_rollout(backend, rank_batch(0, 0, 0, 1))
    backend.save(paths["output"] / "trained")
    backend.args.ckpt_format = "torch"
    backend.save(paths["output"] / "trained_torch")
    backend.save_hf(paths["output"] / "exported")

    from user_hooks import CALLS

    assert CALLS == [
        ("init", True),
        ("log_prob", "ref_"),
        ("log_prob", ""),
        ("step", (0, 0, 1, 0)),
    ], CALLS
