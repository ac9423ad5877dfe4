#!/usr/bin/env python3
"""A training checkpoint → Hugging Face folder, by the trainer itself: the same flags as training,
and ``--output-dir``.

    torchrun --nproc-per-node 4 tools/convert_to_hf.py --load outputs/run/checkpoints --output-dir Qwen3-4B-trained \
        ... # all other flags of the run

It works for every backend and format that training can load, also checkpoints of Megatron-LM. Start
as many processes as the layout needs without data parallelism: 4 for ``--tensor-model-parallel-size
4``.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    from slime.backends.create import create_backend
    from slime.checkpoint.snapshot import SnapshotError
    from slime.cluster.folders import snapshot_of
    from slime.config.parser import read_settings
    from slime.config.resolve import resolve_defaults
    from slime.config.rules import Run
    from slime.engines.process import free_port

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", required=True, type=Path)
    options, rest = parser.parse_known_args()
    args, problems = read_settings(rest)
    problems += resolve_defaults(Run(args))
    if args.load is None or args.hf_checkpoint is None:
        problems.append(
            "--load and --hf-checkpoint are needed: what to convert, and the config and "
            "tokenizer to keep"
        )
    try:
        snapshot = snapshot_of(args.load, args.ckpt_step)
    except SnapshotError as error:
        problems.append(str(error))
    if problems:
        parser.error("; ".join(problems))
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    args.world_size, args.no_load_optim, args.finetune = ranks, True, True
    # of the run, which may have had more ranks
    args.fsdp_shard_size, args.fsdp_expert_parallel_size = None, 1
    args.kl_coef, args.use_kl_loss, args.use_opd, args.keep_old_actor = 0.0, False, False, False
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "0"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    # under torchrun its agent's store, at MASTER_PORT, is the only one that torch looks for
    backend = create_backend(args, "actor", rank, ranks, host, port or free_port(host), local)
    if snapshot is not None:
        backend.load(snapshot.path / "actor")
    backend.save_hf(options.output_dir)
    if rank == 0:
        print(f"{options.output_dir}: from {snapshot.path if snapshot is not None else args.load}")


if __name__ == "__main__":
    main()
