"""How the weights of the trainer reach the engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.config.flag import DERIVED, flag
from slime.config.hf_config import read_config

if TYPE_CHECKING:
    from slime.config.args import Args


@dataclass
class WeightSyncConfig:
    _title = "weight sync"

    update_weights_interval: int = flag(1, low=1, help="sync every N rollouts (train_async.py)")
    update_weight_pause_mode: str | None = flag(
        None,
        choices=("abort", "retract", "in_place", "drain"),
        help="what an update does to requests under way. abort: end them, the rollout goes on with their tokens; "
        "retract: compute their cache again; in_place: keep the cache of the old weights; drain: start no more and "
        "let them finish first, so that no sample mixes weights; default: retract where the engine can, else abort",
    )
    update_weight_mode: str = flag(
        "full",
        choices=("full", "delta"),
        help="all weights or changed bytes only",
    )
    update_weight_transport: str = flag(
        "nccl",
        choices=("nccl", "disk"),
        help="nccl: from process to process (shared memory or IPC on one host, else NCCL or gloo); disk: by files",
    )
    update_weight_buffer_size: int | None = flag(
        None, low=1, help="bytes per bucket; default: 1 GiB for broadcasts over NCCL, else 512 MiB"
    )
    update_weight_senders: int | None = flag(
        None,
        low=1,
        help="training ranks that broadcast weights at the same time, each to its own share of the engines; default: "
        "one for every 16 engines",
    )
    update_weight_disk_dir: str | None = flag(None, help="shared folder for the disk transport")
    update_weight_disk_keep_files: bool = flag(False, help="keep published weights")
    update_weight_delta_encoding: str = flag(
        "xor",
        choices=("xor", "overwrite"),
        help="a changed byte travels as old xor new, or as it is now",
    )
    update_weight_delta_checksum: str = flag(
        "xxh3-128",
        choices=("xxh3-128", "blake3", "adler32"),
        help="digest per tensor of a delta",
        limits={"blake3": ("refused", "xxh3-128 finds the same damage in less time")},
    )
    custom_update_weight_post_write_path: str | None = flag(
        None,
        kind="hook",
        help="fn(args, version_dir, engines) on the sending rank, after files are written and before engines read them",
    )
    audit_weights: bool = flag(
        True,
        kind="toggle",
        help="after each sync compare what engine and trainer hold",
    )
    audit_threshold: float | None = flag(
        None, low=0, help="largest log-prob difference an audit accepts; default: by dtype"
    )
    check_weight_update_equal: bool = flag(
        DERIVED,
        kind="toggle",
        help="at the first update, and then as --check-weight-update-interval says: let the engines overwrite their "
        "weights, send the same ones again, compare: all were written; default: with SGLang, where weights go from "
        "process to process",
    )
    check_weight_update_interval: int = flag(
        100,
        low=0,
        help="updates from one check of --check-weight-update-equal to the next, each of which costs one more update; "
        "0: only the first update is checked",
    )
    rollout_data_transport: str = flag(
        "object-store",
        choices=("object-store", "nixl"),
        help="how the trainer fetches rollouts",
        limits={"nixl": ("refused", "Ray's object store carries the batches")},
    )


def checks_first_update(args: Args) -> bool:
    """Whether one more update shows cheaply that every tensor of an engine is written: not through files, and not where
    an engine holds tensors that nobody sends (a draft model, a vision tower) or holds them quantised."""
    if not args.audit_weights or args.rollout_backend != "sglang" or args.update_weight_transport != "nccl":
        return False
    if args.rollout_external_engine_addrs or args.sglang.get("quantization"):
        return False
    config = read_config(str(args.hf_checkpoint)) or {}
    other = any(key in config for key in ("vision_config", "audio_config", "quantization_config"))
    return not other and not args.sglang.get("speculative_algorithm")


def check_disk_sync(args: Args) -> list[str]:
    problems = []
    if args.update_weight_transport == "disk" and args.update_weight_disk_dir is None:
        problems.append(
            "--update-weight-transport disk needs --update-weight-disk-dir, a folder that trainer and engines share"
        )
    if args.update_weight_mode == "delta" and args.update_weight_transport != "disk":
        problems.append("--update-weight-mode delta goes through files: add --update-weight-transport disk")
    if args.update_weight_mode == "delta" and args.colocate:
        problems.append(
            "--update-weight-mode delta is for engines elsewhere: with --colocate all weights are handed over within "
            "the GPU, in less time than a comparison takes. Leave --update-weight-mode out"
        )
    return problems
