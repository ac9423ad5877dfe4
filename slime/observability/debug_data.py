"""Rollouts as files: write what a run generated, train on it again without an engine.

A file is what ``torch.save`` makes of ``{"rollout_id": int | "eval_<int>", "samples": [Sample.to_dict(), ...]}``.
Its name comes from a template with ``{rollout_id}``. Nothing in a file is run when it is read. A dump that cannot be
written is logged, and the run goes on, unless dumps are what it is for (``--debug-rollout-only``).
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from slime.observability.best_effort import best_effort, replacing

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.data.sample import Group, Sample
    from slime.observability.samples import Nested


T = TypeVar("T")


class Ranks(Protocol):
    """Which rank of a trainer this process is; every training backend is one."""

    rank: int
    world_size: int
    data_parallel_rank: int


class DebugDataError(ValueError):
    """A dump is missing or is not one; the message names the file and the flag."""


def save_rollout(args: Args, rollout_id: int | str, groups: Nested) -> Path:
    """Write the samples of one rollout (nested as they come) to ``--save-debug-rollout-data``.

    Raises:
        OSError: the file cannot be written, with ``--debug-rollout-only``.
    """
    path = _path(args.save_debug_rollout_data, rollout_id, "--save-debug-rollout-data")
    with contextlib.nullcontext() if args.debug_rollout_only else best_effort("--save-debug-rollout-data"):
        _save_rollout(args, path, rollout_id, groups)
    return path


def _save_rollout(args: Args, path: Path, rollout_id: int | str, groups: Nested) -> None:
    from slime.data.sample import flatten

    if args.dump_details and not (Path(args.dump_details) / "tokenizer").is_dir():
        from slime.data.tokenizers import load_processor, load_tokenizer

        trust = {"trust_remote_code": args.trust_remote_code}
        reader = load_processor(args.hf_checkpoint, **trust) or load_tokenizer(args.hf_checkpoint, **trust)
        reader.save_pretrained(Path(args.dump_details) / "tokenizer")
    samples = [sample.to_dict() for sample in flatten(groups)]
    _save({"rollout_id": rollout_id, "samples": samples}, path)


def load_rollout(template: str, rollout_id: int | str, amount: float | None = None) -> list[Group]:
    """Read a dump (``--load-debug-rollout-data``) back as groups, in the order in which they were written.

    Args:
        template: path with ``{rollout_id}``.
        amount: keep that share (or, above 1, that number) of the samples (``--load-debug-rollout-data-subsample``):
            whole groups from the head and the tail, so that the mix of an ordered file stays.
    """
    from slime.data.plain_files import UnsafeFileError, load_plain
    from slime.data.sample import Sample

    path = _path(template, rollout_id, "--load-debug-rollout-data")
    if not path.is_file():
        raise DebugDataError(f"--load-debug-rollout-data: no dump of rollout {rollout_id} at {path}")
    try:
        dump = load_plain(path)
    except UnsafeFileError as error:
        raise DebugDataError(f"--load-debug-rollout-data: {error}") from error
    if not isinstance(dump, dict) or not isinstance(dump.get("samples"), list):
        raise DebugDataError(f"--load-debug-rollout-data: {path} holds no {{'rollout_id', 'samples'}} dict")
    groups = _group([Sample.from_dict(sample) for sample in dump["samples"]])
    return subsample(groups, amount)


def subsample(groups: list[list[T]], amount: float | None) -> list[list[T]]:
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


def save_train_batches(args: Args, rollout_id: int, batch: dict[str, object], ranks: Ranks) -> None:
    """Gather every data-parallel rank's batch, as training left it, and write them (``--save-debug-train-data``).

    A collective: every rank of the trainer calls it, the first writes.
    """
    import torch.distributed as dist

    mine = (ranks.data_parallel_rank, batch)
    everyones = [mine]
    if ranks.world_size > 1:
        everyones = [mine] * ranks.world_size  # rank 0 receives the others' batches in their places
        dist.gather_object(mine, everyones if ranks.rank == 0 else None, dst=0)
    if ranks.rank == 0:
        shards = dict(everyones)  # tensor-parallel ranks hold the same; of a pipeline the last holds the scores
        save_train_data(args.save_debug_train_data, rollout_id, 0, [shards[rank] for rank in sorted(shards)])


def save_train_data(template: str | None, rollout_id: int, rank: int, shards: list[dict[str, object]]) -> Path:
    """One file per rollout of what the trainers got.

    ``{"format_version": 2, "rollout_id", "rank", "samples": [per-sample dicts by sample_indices],
    "dp_shards": [the rank batches], "raw_reward": [...]}``.
    """
    samples: list[dict[str, Any]] = []
    for shard in shards:
        lists = {key: value for key, value in shard.items() if isinstance(value, list)}
        columns = {key: value for key, value in lists.items() if len(value) == len(lists["tokens"])}
        samples.extend({key: column[i] for key, column in columns.items()} for i in range(len(lists["tokens"])))
    samples.sort(key=lambda sample: int(sample["sample_indices"]))
    dump = {
        "format_version": 2,
        "rollout_id": rollout_id,
        "rank": rank,
        "samples": samples,
        "dp_shards": shards,
        "raw_reward": [sample["raw_reward"] for sample in samples],
    }
    path = _path(template, rollout_id, "--save-debug-train-data")
    with best_effort("--save-debug-train-data"):
        _save(dump, path)
    return path


def _path(template: str | None, rollout_id: int | str, flag: str) -> Path:
    if template is None:
        raise DebugDataError(f"{flag} is not given: it names the files")
    try:
        return Path(template.format(rollout_id=rollout_id)).expanduser()
    except (KeyError, IndexError, ValueError) as error:
        raise DebugDataError(f"{flag} {template!r}: only {{rollout_id}} can be filled in ({error!r})") from error


def _save(value: Mapping[str, object], path: Path) -> Path:
    import torch

    from slime.data.plain_files import plain

    packed = io.BytesIO()  # where the disk is full, torch.save raises a RuntimeError that names no cause
    torch.save(plain(value), packed)
    with replacing(path) as temporary:
        temporary.write_bytes(packed.getbuffer())
    return path


def _group(samples: list[Sample]) -> list[Group]:
    """By ``group_index`` (decided by value, never by position); a sample without one is its own group."""
    groups: dict[object, Group] = {}
    for position, sample in enumerate(samples):
        key = ("alone", position) if sample.group_index is None else sample.group_index
        groups.setdefault(key, []).append(sample)
    return list(groups.values())
