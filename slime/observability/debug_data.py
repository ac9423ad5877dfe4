"""Save the samples of rollouts to files, and train on them later without an engine.

Each file is written by ``torch.save`` and contains
``{"rollout_id": int | "eval_<int>", "samples": [Sample.to_dict(), ...]}``. The path is a template
with ``{rollout_id}``. Reading a file never executes code from it. If a file cannot be written, this
is logged and the run continues, except with ``--debug-rollout-only``, where the files are the
purpose of the run.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from slime.data.plain_values import UnsafeFileError, load_plain, plain, save_value
from slime.data.sample import Sample, flatten
from slime.observability.files import best_effort, replacing

if TYPE_CHECKING:
    from slime.config.observability import DebugConfig
    from slime.config.trainer import ModelConfig
    from slime.data.sample import Group, Nested


T = TypeVar("T")


_PLACE = re.compile(r"\{rollout_id(?::0?(\d{1,2})d)?\}")


class Ranks(Protocol):
    """The rank of this process in the trainer. Training backends implement this protocol."""

    rank: int
    world_size: int
    data_parallel_rank: int


class DebugDataError(ValueError):
    """Raised if a file of debug data is missing or invalid. The message names the file and the
    flag.
    """


def save_rollout(
    rollout_id: int | str, groups: Nested, debug: DebugConfig, model: ModelConfig
) -> Path:
    """Write the samples of one rollout, flat or nested, to ``--save-debug-rollout-data``.

    Raises:
        OSError: With ``--debug-rollout-only``, if the file cannot be written.
    """
    flag = "--save-debug-rollout-data"
    path = _path(debug.save_debug_rollout_data, rollout_id, flag)
    samples = [sample.to_dict() for sample in flatten(groups)]
    # Of a run that does nothing else, the files are the purpose, so that an error must end it.
    with contextlib.nullcontext() if debug.debug_rollout_only else best_effort(flag):
        tokenizer = Path(debug.dump_details or "") / "tokenizer"
        if debug.dump_details and not tokenizer.is_dir():
            # A dump is read with the tokenizer that made it, which may be gone by then.
            from slime.data.tokenizers import load_processor, load_tokenizer

            named = model.hf_checkpoint, model.trust_remote_code
            (load_processor(*named) or load_tokenizer(*named)).save_pretrained(tokenizer)
        _save({"rollout_id": rollout_id, "samples": samples}, path)
    return path


def load_rollout(template: str, rollout_id: int | str, amount: float | None = None) -> list[Group]:
    """Read a file of ``--load-debug-rollout-data`` as groups, in the order in which they were
    written.

    Args:
        template: Path with ``{rollout_id}``.
        amount: Fraction of the samples to keep, or their number if it is above 1, see
            :func:`subsample`.

    Raises:
        DebugDataError: The file is missing or invalid.
    """
    path = _path(template, rollout_id, "--load-debug-rollout-data")
    if not path.is_file():
        raise DebugDataError(
            f"--load-debug-rollout-data: there is no file {path} for rollout {rollout_id}"
        )
    try:
        dump = load_plain(path)
    except UnsafeFileError as error:
        raise DebugDataError(f"--load-debug-rollout-data: {error}") from error
    if not isinstance(dump, dict) or not isinstance(dump.get("samples"), list):
        raise DebugDataError(
            f"--load-debug-rollout-data: {path} must contain a dict with 'rollout_id' and 'samples'"
        )
    try:
        groups = _group([Sample.from_dict(sample) for sample in dump["samples"]])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DebugDataError(
            f"--load-debug-rollout-data: {path} has a sample that cannot be read "
            f"({type(error).__name__}: {error})"
        ) from error
    return subsample(groups, amount)


def subsample(groups: list[list[T]], amount: float | None) -> list[list[T]]:
    """Keep a fraction of the samples (``amount`` ≤ 1), or about ``amount`` samples.

    Whole groups are kept, from the beginning and the end, so that an ordered file keeps its
    mixture.

    >>> subsample([["a"], ["b"], ["c"], ["d"]], 0.5)
    [['a'], ['d']]
    """
    if amount is None:
        return groups
    if amount <= 0:
        raise DebugDataError(f"--load-debug-rollout-data-subsample {amount}: must be above 0")
    # The amount counts samples, but groups stay whole, since their baseline needs all of them.
    total = sum(len(group) for group in groups)
    wanted = total * amount if amount <= 1 else amount
    count = min(max(round(wanted * len(groups) / max(total, 1)), 1), len(groups))
    head = (count + 1) // 2
    return groups[:head] + groups[len(groups) - (count - head) :]


def save_train_batches(
    template: str | None, rollout_id: int, batch: dict[str, object], ranks: Ranks
) -> None:
    """Gather the batches of all data-parallel ranks after training, and write them to
    ``--save-debug-train-data``.

    This is a collective operation: every rank of the trainer must call it. Rank 0 writes the file.
    """
    import torch.distributed as dist

    # All ranks take part in the collective call, also those whose batch is not written.
    mine = (ranks.data_parallel_rank, batch)
    everyones = [mine]
    if ranks.world_size > 1:
        everyones = [mine] * ranks.world_size  # gather_object replaces the entries on rank 0
        dist.gather_object(mine, everyones if ranks.rank == 0 else None, dst=0)
    if ranks.rank == 0:
        # Ranks with the same data-parallel rank have the same samples. The last of them wins, which
        # is in the last pipeline stage: only there the batch contains the computed scores.
        shards = dict(everyones)
        save_train_data(template, rollout_id, 0, [shards[rank] for rank in sorted(shards)])


def save_train_data(
    template: str | None, rollout_id: int, rank: int, shards: list[dict[str, object]]
) -> Path:
    """Write the training data of one rollout to a file.

    The file contains ``{"format_version": 2, "rollout_id", "rank", "samples": [a dict per sample,
    in the order of sample_indices], "dp_shards": [the batch of each rank], "raw_reward": [...]}``.
    """
    # From one list per entry to one dict per sample; entries of the whole batch stay in the shards.
    samples: list[dict[str, Any]] = []
    for shard in shards:
        lists = {key: value for key, value in shard.items() if isinstance(value, list)}
        columns = {key: value for key, value in lists.items() if len(value) == len(lists["tokens"])}
        samples.extend(
            {key: column[i] for key, column in columns.items()} for i in range(len(lists["tokens"]))
        )
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
        raise DebugDataError(f"{flag} is not given, but it is needed for the path of the file")
    try:
        return file_of_rollout(template, rollout_id)
    except (ValueError, RuntimeError) as error:
        raise DebugDataError(f"{flag} {template!r}: {error}") from error


def file_of_rollout(template: str, rollout_id: int | str) -> Path:
    """Return a path with ``{rollout_id}``, or ``{rollout_id:06d}``, replaced.

    A folder may have recorded the path, so it is no format string, which could ask for gigabytes of
    spaces.

    Raises:
        ValueError: Another text is in braces.
        RuntimeError: There is no such home folder.
    """
    text = _PLACE.sub(lambda match: str(rollout_id).zfill(int(match[1] or 0)), template)
    if "{" in text or "}" in text:
        raise ValueError("only {rollout_id} is a valid placeholder")
    return Path(text).expanduser()


def _save(value: Mapping[str, object], path: Path) -> Path:
    with replacing(path) as temporary, open(temporary, "wb") as file:
        save_value(plain(value), file)
    return path


def _group(samples: list[Sample]) -> list[Group]:
    """Group samples by the value of ``group_index``; a sample without one forms its own group."""
    # The file is flat; the groups follow from the numbers of its samples.
    groups: dict[object, Group] = {}
    for position, sample in enumerate(samples):
        key = ("alone", position) if sample.group_index is None else sample.group_index
        groups.setdefault(key, []).append(sample)
    return list(groups.values())
