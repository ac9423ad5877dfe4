"""How a rank's samples travel: few large contiguous arrays instead of many small lists.

An entry with one sequence per sample is a :class:`Ragged`: all values in one array, with offsets.
Ray's object store keeps such arrays outside the pickle, so that a rank reads them without copying.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from slime.backends.base import RankBatch

Wire = dict[str, Any]

# Type on the wire and type of the tensors made of it.
_RAGGED: dict[str, tuple[str, str]] = {
    "tokens": ("int32", "int64"),
    "loss_masks": ("int8", "int32"),
    "rollout_log_probs": ("float32", "float32"),
    "teacher_log_probs": ("float32", "float32"),
    "ref_log_probs": ("float32", "float32"),
    "log_probs": ("float32", "float32"),
    "values": ("float32", "float32"),
    "advantages": ("float32", "float32"),
    "returns": ("float32", "float32"),
    "rollout_top_p_token_ids": ("int32", "int32"),
    "rollout_top_p_token_offsets": ("int32", "int32"),
    "staleness": ("int16", "float32"),
    "rollout_routed_experts": ("", ""),  # as they come: uint8 or int16, [tokens - 1, layers, topk]
}
_NUMBERS: dict[str, str] = {
    "total_lengths": "int64",
    "response_lengths": "int64",
    "rewards": "float64",
    "raw_reward": "float64",
    "truncated": "int8",
    "sample_indices": "int64",
    "group_indices": "int64",
    "rollout_ids": "int64",
    "rollout_mask_sums": "float64",
}
PER_SAMPLE = (*_RAGGED, *_NUMBERS)
"""Keys that hold one entry per sample. Lists under other keys are split too where their length fits."""


class Ragged(NamedTuple):
    """Sequences laid end to end: sequence ``i`` is ``values[offsets[i]:offsets[i + 1]]``."""

    values: np.ndarray
    offsets: np.ndarray  # int64 [n + 1]

    @classmethod
    def of(cls, sequences: Sequence[Any], dtype: str) -> Ragged:
        arrays = [np.asarray(s, dtype=dtype or None) for s in sequences]
        offsets = np.concatenate([[0], np.cumsum([len(a) for a in arrays])]).astype(np.int64)
        return cls(np.ascontiguousarray(np.concatenate(arrays)) if arrays else np.zeros(0, dtype or "int64"), offsets)


def pack(train_data: dict[str, Any], partition: Sequence[int], extra: dict[str, Any]) -> Wire:
    """The share of one rank.

    Args:
        train_data: lists with one entry per sample of the whole rollout; values of other kinds are
            taken over as they are.
        partition: positions of this rank's samples.
        extra: schedule entries, added as they are.
    """
    count = len(train_data["tokens"])
    part: Wire = {"partition": np.asarray(partition, np.int64)}
    for key, values in train_data.items():
        if not isinstance(values, list) or len(values) != count:
            part[key] = values
            continue
        mine = [values[i] for i in partition]
        if key in _RAGGED:
            part[key] = Ragged.of(mine, _RAGGED[key][0])
        elif key in _NUMBERS:
            part[key] = np.asarray(mine, _NUMBERS[key])
        else:
            part[key] = mine
    return {**part, **extra}


def to_rank_batch(part: Wire) -> RankBatch:
    """The batch of :mod:`slime.backends.base`: lists per sample, CPU tensors where they are per token.

    ``train_metadata`` and ``metadata`` are the same list. The tensors own their memory.
    """
    import torch

    batch: RankBatch = {}
    for key, value in part.items():
        if isinstance(value, Ragged):
            dtype = getattr(torch, _RAGGED[key][1] or str(value.values.dtype))
            # A copy, because what comes out of the object store must not be written to.
            whole = torch.from_numpy(np.array(value.values)).to(dtype)
            batch[key] = list(torch.split(whole, np.diff(value.offsets).tolist()))
        elif isinstance(value, np.ndarray):
            batch[key] = value.tolist()
        else:
            batch[key] = value
    if "metadata" in batch:
        batch["train_metadata"] = batch["metadata"]
    return batch
