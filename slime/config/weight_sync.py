"""Flags of weight syncs, which send the trainer's weights to the engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from slime.config.flag import Section, flag, hook_flag, path_flag
from slime.registry import Part, parts


@dataclass
class WeightSyncConfig(Section):
    _title = "weight sync"

    update_weights_interval: int = flag(1, low=1)
    """Number of rollouts between two weight syncs (train_async.py)"""
    update_weight_pause_mode: Literal["abort", "retract", "in_place", "drain"] | None = None
    """Treatment of running requests during a weight sync. abort: end them, and continue from their
    tokens. retract:
    free their KV cache and prefill it again. in_place: keep the old KV cache. drain: wait until
    they finish. Default: retract if the engine can, otherwise abort"""
    update_weight_mode: str = flag("full", choices=("full",), kind_of_part="weight mode")
    """What a weight sync sends: all weights (full), or only the bytes that changed (delta)"""
    update_weight_transport: str = flag("nccl", kind_of_part="transport")
    """Transport of a weight sync. nccl: between processes (shared memory or CUDA IPC on one host,
    otherwise NCCL or gloo). disk: through files in --update-weight-disk-dir"""
    update_weight_buffer_size: int | None = flag(low=1)
    """Bytes per bucket of weights. Default: 1 GiB for broadcasts over NCCL, otherwise 512 MiB"""
    update_weight_senders: int | None = flag(low=1)
    """Training ranks that broadcast weights at the same time. Default: one per 16 engines"""
    update_weight_disk_dir: str | None = path_flag()
    """Folder that the trainer and all engines share, for --update-weight-transport disk. Each run
    needs its own
    """
    update_weight_disk_keep_files: bool = False
    """Keep the weight files of --update-weight-transport disk after the engines have loaded them"""
    custom_update_weight_post_write_path: str | None = hook_flag()
    """Function fn(args, version_dir, engines) that is called on the sending rank after weight files
    are written and before the engines read them"""
    audit_weights: bool = True
    """Compare the weights of engines and trainer after every weight sync"""
    audit_threshold: float | None = flag(low=0)
    """Maximum log-prob difference that the audit of a weight sync accepts. Default: by data type"""
    check_weight_update_equal: bool = flag()
    """Let the engines overwrite their weights, send the same weights again, and compare, at the
    first weight sync and then every --check-weight-update-interval. Default: on with SGLang and
    --update-weight-transport nccl, for models of which all tensors are sent"""
    check_weight_update_interval: int = flag(100, low=0)
    """Weight syncs between two checks of --check-weight-update-equal; 0 checks only the first"""


@dataclass(frozen=True)
class TransportKind:
    """A value of ``--update-weight-transport``, as :func:`slime.registry.register` takes it.

    The driver and the servers ask for its attributes, so its module should not import torch.

    Attributes:
        create: ``fn(settings, colocated_host)`` creates a
            :class:`slime.weights.transports.Transport` from the
            :class:`~slime.weights.settings.WeightSyncSettings`. ``colocated_host`` tells
            whether all engines run on the host of rank 0. A :class:`ValueError` says what the
            settings lack.
        through_folder: Whether rank 0 writes files that all engines read.
        many_senders: Whether other training ranks than rank 0 can send to some of the engines.
        weight_loader: The import path of the function with which engines load what was published,
            which SGLang gets as ``--custom-weight-loader``; None without one.
    """

    create: Callable[..., Any]
    through_folder: bool = False
    many_senders: bool = False
    weight_loader: str | None = None


def transport_part(sync: WeightSyncConfig) -> Part:
    """Return the registered part that sends the weights: that of a mode other than ``full`` decides
    before that of ``--update-weight-transport``.
    """
    mode = parts("weight mode").get(sync.update_weight_mode)
    return mode or parts("transport")[sync.update_weight_transport]
