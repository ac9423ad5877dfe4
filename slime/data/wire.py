"""The format in which a rank's samples are transferred: few large contiguous arrays instead of many small lists.

An entry with one sequence per sample is a :class:`Ragged`: one array with all values, and offsets. Ray's object store
keeps such arrays outside the pickle, so that a rank can read them without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from slime.data.fields import BY_NAME, RankBatch, TrainData

Wire: TypeAlias = dict[str, Any]
"""The part of one rank, by the names of ``FIELDS``: arrays, :class:`Ragged`, and lists of Python objects."""


class Ragged(NamedTuple):
    """Concatenated sequences: sequence ``i`` is ``values[offsets[i]:offsets[i + 1]]``."""

    values: np.ndarray
    offsets: np.ndarray  # int64 [n + 1]

    @classmethod
    def of(cls, sequences: Sequence[ArrayLike], dtype: str) -> Ragged:
        arrays = [np.asarray(s, dtype=dtype or None) for s in sequences]
        offsets = np.concatenate([[0], np.cumsum([len(a) for a in arrays])]).astype(np.int64)
        return cls(np.ascontiguousarray(np.concatenate(arrays)) if arrays else np.zeros(0, dtype or "int64"), offsets)


def pack(train_data: TrainData, partition: Sequence[int], extra: Mapping[str, object]) -> Wire:
    """Select and pack the part of one rank.

    Args:
        train_data: Lists with one entry per sample of the whole rollout. Entries that a user's converter added are
            split over the ranks if they are lists of that length; any others are passed to every rank unchanged.
        partition: Positions of this rank's samples.
        extra: Entries of the schedule, added unchanged.
    """
    count = len(train_data["tokens"])
    part: Wire = {"partition": np.asarray(partition, np.int64)}
    for name, values in train_data.items():
        field = BY_NAME.get(name)
        shared_out = isinstance(values, list) and len(values) == count
        if not shared_out or (field is not None and field.per == "batch"):
            part[name] = values
            continue
        mine = [values[i] for i in partition]
        if field is None or field.wire is None:
            part[name] = mine
        elif field.is_ragged:
            part[name] = Ragged.of(mine, field.wire)
        else:
            part[name] = np.asarray(mine, field.wire)
    return {**part, **extra}


def to_rank_batch(part: Wire) -> RankBatch:
    """Unpack the batch of a training rank: a list per entry, with CPU tensors if there is one value per token.

    ``train_metadata`` and ``metadata`` are the same list. The tensors own their memory.
    """
    import torch

    batch = RankBatch(added=part.keys() - BY_NAME.keys())
    for name, value in part.items():
        if isinstance(value, Ragged):
            dtype = getattr(torch, BY_NAME[name].tensor or str(value.values.dtype))
            # A copy, because arrays in the object store are read-only.
            whole = torch.from_numpy(np.array(value.values)).to(dtype)
            batch[name] = list(torch.split(whole, np.diff(value.offsets).tolist()))
        elif isinstance(value, np.ndarray):
            batch[name] = value.tolist()
        else:
            batch[name] = value
    if "metadata" in batch:
        batch["train_metadata"] = batch["metadata"]
    return batch
