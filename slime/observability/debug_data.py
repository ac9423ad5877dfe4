"""Rollouts as files: write what a run generated, train on it again without an engine.

A file is what ``torch.save`` makes of ``{"rollout_id": int | "eval_<int>", "samples": [Sample.to_dict(), ...]}``.
Its name comes from a template with ``{rollout_id}``. Nothing in a file is run when it is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.data.sample import Sample


class DebugDataError(ValueError):
    """A dump is missing or is not one; the message names the file and the flag."""


def save_rollout(args: Args, rollout_id: int | str, groups: Iterable[Any]) -> Path:
    """Write the samples of one rollout (nested as they come) to ``--save-debug-rollout-data``."""
    from slime.data.sample import flatten

    if args.dump_details and not (Path(args.dump_details) / "tokenizer").is_dir():
        from slime.data.tokenizers import load_processor, load_tokenizer

        trust = {"trust_remote_code": args.trust_remote_code}
        reader = load_processor(args.hf_checkpoint, **trust) or load_tokenizer(args.hf_checkpoint, **trust)
        reader.save_pretrained(Path(args.dump_details) / "tokenizer")
    samples = [sample.to_dict() for sample in flatten(groups)]
    path = _path(args.save_debug_rollout_data, rollout_id, "--save-debug-rollout-data")
    return _save({"rollout_id": rollout_id, "samples": samples}, path)


def load_rollout(args: Args, rollout_id: int | str) -> list[list[Sample]]:
    """Read ``--load-debug-rollout-data`` back as groups, in the order in which they were written.

    ``--load-debug-rollout-data-subsample`` keeps that share (or, above 1, that number) of the samples:
    whole groups from the head and the tail, so that the mix of an ordered file stays.
    """
    from slime.data.plain_files import UnsafeFileError, load_plain
    from slime.data.sample import Sample

    path = _path(args.load_debug_rollout_data, rollout_id, "--load-debug-rollout-data")
    if not path.is_file():
        raise DebugDataError(f"--load-debug-rollout-data: no dump of rollout {rollout_id} at {path}")
    try:
        dump = load_plain(path)
    except UnsafeFileError as error:
        raise DebugDataError(f"--load-debug-rollout-data: {error}") from error
    if not isinstance(dump, dict) or not isinstance(dump.get("samples"), list):
        raise DebugDataError(f"--load-debug-rollout-data: {path} holds no {{'rollout_id', 'samples'}} dict")
    groups = _group([Sample.from_dict(sample) for sample in dump["samples"]])
    return subsample(groups, getattr(args, "load_debug_rollout_data_subsample", None))


def subsample(groups: list[list[Any]], amount: float | None) -> list[list[Any]]:
    """Keep whole groups from both ends: a share of all samples (``amount`` ≤ 1) or about so many samples.

    >>> subsample([["a"], ["b"], ["c"], ["d"]], 0.5)
    [['a'], ['d']]
    """
    if amount is None:
        return groups
    if amount <= 0:
        raise DebugDataError(f"--load-debug-rollout-data-subsample {amount}: give a share (0–1] or a number of samples")
    total = sum(len(group) for group in groups)
    wanted = total * amount if amount <= 1 else amount
    count = min(max(round(wanted * len(groups) / max(total, 1)), 1), len(groups))
    head = (count + 1) // 2
    return groups[:head] + groups[len(groups) - (count - head) :]


def save_train_batches(args: Args, rollout_id: int, batch: dict[str, Any], backend: Any) -> None:
    """Gather every data-parallel rank's batch, as training left it, and write them (``--save-debug-train-data``).

    A collective: every rank of the trainer calls it, the first writes.
    """
    import torch.distributed as dist

    mine = (backend.data_parallel_rank, batch)
    everyones: list[Any] = [mine]
    if backend.world_size > 1:
        everyones = [None] * backend.world_size
        dist.gather_object(mine, everyones if backend.rank == 0 else None, dst=0)
    if backend.rank == 0:
        shards = dict(everyones)  # tensor-parallel ranks hold the same; of a pipeline the last holds the scores
        save_train_data(args.save_debug_train_data, rollout_id, 0, [shards[rank] for rank in sorted(shards)])


def save_train_data(template: str, rollout_id: int, rank: int, shards: list[dict[str, Any]]) -> Path:
    """One file per rollout of what the trainers got.

    ``{"format_version": 2, "rollout_id", "rank", "samples": [per-sample dicts by sample_indices],
    "dp_shards": [the rank batches], "raw_reward": [...]}``.
    """
    samples: list[dict[str, Any]] = []
    for shard in shards:
        count = len(shard["tokens"])
        columns = {key: value for key, value in shard.items() if isinstance(value, list) and len(value) == count}
        samples.extend({key: column[i] for key, column in columns.items()} for i in range(count))
    samples.sort(key=lambda sample: int(sample["sample_indices"]))
    dump = {
        "format_version": 2,
        "rollout_id": rollout_id,
        "rank": rank,
        "samples": samples,
        "dp_shards": shards,
        "raw_reward": [sample["raw_reward"] for sample in samples],
    }
    return _save(dump, _path(template, rollout_id, "--save-debug-train-data"))


def _path(template: str, rollout_id: int | str, flag: str) -> Path:
    try:
        return Path(template.format(rollout_id=rollout_id)).expanduser()
    except (KeyError, IndexError, ValueError) as error:
        raise DebugDataError(f"{flag} {template!r}: only {{rollout_id}} can be filled in ({error!r})") from error


def _save(value: dict[str, Any], path: Path) -> Path:
    import torch

    from slime.data.plain_files import plain

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    torch.save(plain(value), temporary)
    temporary.replace(path)
    return path


def _group(samples: list[Sample]) -> list[list[Sample]]:
    """By ``group_index`` (decided by value, never by position); a sample without one is its own group."""
    groups: dict[Any, list[Sample]] = {}
    for position, sample in enumerate(samples):
        key = ("alone", position) if sample.group_index is None else sample.group_index
        groups.setdefault(key, []).append(sample)
    return list(groups.values())
