"""Table of all entries of the batch that a training rank gets, and the format in which they are
transferred.

Everything that depends on the list of entries is derived from :data:`FIELDS`: how they are
transferred (:func:`pack_part`), what a converter may return (:mod:`slime.data.convert`), the fields
of ``TokenBatch`` that the loss reads, the ``rollout/`` metrics of the trainer, and the page
``docs/en/reference/batch.md`` (``python tools/batch_page.py``).

They are transferred as few large contiguous arrays instead of many small lists: an entry with one
sequence per sample is a :class:`Ragged`, one array with all values, and offsets. Ray's object store
keeps such arrays outside the pickle, so that a rank can read them without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from slime.config.flag import did_you_mean

TrainData = dict[str, Any]
"""A batch before it is split over ranks: lists with one entry per sample of the rollout, by the
names of FIELDS.
"""
Per = Literal["sample", "token", "response token", "other", "batch"]


@dataclass(frozen=True)
class Field:
    """One entry of the batch.

    Attributes:
        per: For what the entry has one value. ``sample``: a list with one value per sample.
            ``token`` and ``response token``: a list with one tensor per sample, ``[total_length]``
            or ``[response_length]``. ``other``: a list with one tensor per sample, of the length
            that ``meaning`` tells. ``batch``: one value.
        meaning: The description in the documentation.
        wire: numpy dtype in Ray's object store. ``""`` keeps the dtype of the values. None: the
            values are not transferred as one array (Python objects, or entries that the trainer
            computes).
        tensor: torch dtype on a training rank. ``""`` keeps the dtype of ``wire``. None for lists
            of Python values.
        always: Whether every batch has this entry.
        in_loss: Whether the loss reads it (:data:`LOSS_FIELDS`).
        metric: Whether the trainer reports its mean as ``rollout/<name>``.
    """

    name: str
    per: Per
    meaning: str
    wire: str | None = None
    tensor: str | None = None
    always: bool = False
    in_loss: bool = False
    metric: bool = False

    @property
    def is_ragged(self) -> bool:
        """Whether its entry holds a sequence for each sample."""
        return self.per in ("token", "response token", "other")


def _number(name: str, dtype: str, meaning: str, metric: bool = False) -> Field:
    return Field(name, "sample", meaning, wire=dtype, always=True, metric=metric)


def _scores(name: str, meaning: str, wire: str | None = "float32", in_loss: bool = True) -> Field:
    return Field(name, "response token", meaning, wire, "float32", False, in_loss, metric=True)


FIELDS: tuple[Field, ...] = (
    Field("tokens", "token", "ids of the prompt and the response", "int32", "int64", always=True),
    _number("total_lengths", "int64", "number of tokens", metric=True),
    _number("response_lengths", "int64", "number of response tokens, which are the last ones", metric=True),
    Field("loss_masks", "response token", "1 where the token is trained on", "int8", "int32", always=True),
    Field("observation_masks", "response token", "1 where `--observation-loss-coef` trains a token that nobody sampled",
          "int8", "float32", in_loss=True),
    _number("rewards", "float64", "post-processed reward; GRPO's advantage", metric=True),
    _number("raw_reward", "float64", "reward as the reward function gave it", metric=True),
    _number("truncated", "int8", "1 if the response was cut off by the length limit", metric=True),
    _number("sample_indices", "int64", "`Sample.index`"),
    _number("group_indices", "int64", "`Sample.group_index`"),
    _number("rollout_ids", "int64", "samples into which one rollout fanned out share one"),
    _number("rollout_mask_sums", "float64", "sum of the loss masks over all samples of the rollout"),
    Field("rollout_shares", "sample", "1 / number of samples of the rollout with a reward; 0 without", "float64"),
    Field("partition", "sample", "position in the whole rollout", "int64"),
    _scores("log_probs", "of the trainer's weights before the first step; if absent, the current ones are used"),
    _scores("ref_log_probs", "of the reference model"),
    _scores("rollout_log_probs", "of the engine that sampled the tokens"),
    _scores("teacher_log_probs", "of the teacher (on-policy distillation)"),
    _scores("advantages", "set before the first step"),
    _scores("returns", "set before the first step"),
    _scores("values", "of the critic before its update"),
    _scores("kl", "KL estimate against the reference model, 0 unless `--kl-coef` is given", wire=None, in_loss=False),
    _scores("entropy", "of the trainer's weights before the first step (`--use-rollout-entropy`)", wire=None,
            in_loss=False),
    _scores("squared_probs", "Σπ² over the vocabulary before the first step, for estimators that need it", wire=None,
            in_loss=False),
    _scores("opd_reverse_kl", "reverse KL against the teacher (on-policy distillation)", wire=None),
    Field("staleness", "response token", "steps since the weights that sampled the token; -1: unknown; absent: all 0",
          "int16", "float32", in_loss=True),
    Field("rollout_top_p_token_ids", "other", "ids of the nuclei of all response tokens, end to end", "int32", "int32"),
    Field("rollout_top_p_token_offsets", "other", "`[response_length + 1]`: where each token's nucleus begins",
          "int32", "int32"),
    Field("rollout_routed_experts", "other", "`[total_length - 1, layers, topk]`: the experts that the engine chose",
          "", ""),
    Field("routing_choices", "sample", "the experts that the trainer chose, by layer (`--use-routing-replay`)"),
    Field("weight_versions", "sample", "list of the weight versions that sampled the response"),
    Field("multimodal_train_inputs", "sample", "dict of the processor's tensors, or None"),
    Field("metadata", "sample", "`Sample.train_metadata`, a dict or None"),
    Field("train_metadata", "sample", "the same list as `metadata`"),
    Field("round_number", "sample", "`Sample.metadata[\"round_number\"]`"),
    Field("source_names", "sample", "`Sample.metadata[\"source_name\"]`"),
    Field("micro_batch_indices", "batch", "per micro-batch, in the order trained, a list of sample positions",
          always=True),
    Field("num_microbatches", "batch", "per optimizer step, the number of micro-batches of each rank", always=True),
    Field("global_batch_sizes", "batch", "per optimizer step, the number of rollouts over all ranks", always=True),
    Field("global_token_counts", "batch", "per optimizer step, the sum of max(mask sum, 1) over all ranks' samples",
          always=True),
    Field("rollout_id", "batch", "number of the rollout", always=True),
    Field("mis_weight_mean", "batch", "mean importance weight over the batch (`tis_batch_normalize`)"),
)  # fmt: skip

BY_NAME: Mapping[str, Field] = {field.name: field for field in FIELDS}
LOSS_FIELDS: Mapping[str, str] = {
    field.name: f"old_{field.name}" if field.name in ("log_probs", "values") else field.name
    for field in FIELDS
    if field.in_loss
}
"""The entries that the loss reads, with their names in ``TokenBatch``, where ``log_probs`` and
``values`` are the current ones.
"""


class RankBatch(dict[str, Any]):
    """The batch that one data-parallel rank trains in one rollout: the entries of :data:`FIELDS`, and
    those that users' functions add.

    Per-sample entries are lists in the rank's own order of samples; tensors are on the CPU.
    """

    def __missing__(self, name: str) -> Any:
        raise KeyError(
            f"the batch has no {name!r}{did_you_mean(name, BY_NAME)} (docs/en/reference/batch.md "
            "lists its entries)"
        )


# --- transfer ------------------------------------------------------------------------------

Wire: TypeAlias = dict[str, Any]
"""The part of one rank, by the names of ``FIELDS``: arrays, :class:`Ragged`, and lists of Python
objects.
"""


class Ragged(NamedTuple):
    """Concatenated sequences: sequence ``i`` is ``values[offsets[i]:offsets[i + 1]]``."""

    values: np.ndarray
    offsets: np.ndarray  # int64 [n + 1]

    @classmethod
    def of(cls, sequences: Sequence[ArrayLike], dtype: str) -> Ragged:
        arrays = [np.asarray(s, dtype=dtype or None) for s in sequences]
        offsets = np.concatenate([[0], np.cumsum([len(a) for a in arrays])]).astype(np.int64)
        return cls(
            np.ascontiguousarray(np.concatenate(arrays))
            if arrays
            else np.zeros(0, dtype or "int64"),
            offsets,
        )


def pack_part(train_data: TrainData, partition: Sequence[int], extra: Mapping[str, object]) -> Wire:
    """Select and pack the part of one rank.

    Args:
        train_data: Lists with one entry per sample of the whole rollout. Entries that a user's
            converter added are split over the ranks if they are lists of that length; any others
            are passed to every rank unchanged.
        partition: Positions of this rank's samples.
        extra: Entries of the schedule, added unchanged.
    """
    # Entries with one value per sample are divided; any others are for every rank.
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


def add_entries(batch: RankBatch, parts: Sequence[TrainData]) -> None:
    """Add what other passes have computed, a value per sample, to the batch of a rank.

    Args:
        parts: Entries of all samples of the batch, and of others if the passes ran on ranks that
            divide the rollout otherwise. Each has the ``partition`` of its samples.
    """
    for name in dict.fromkeys(name for part in parts for name in part if name != "partition"):
        named = [part for part in parts if name in part]
        known = {
            int(position): value
            for part in named
            for position, value in zip(part["partition"], part[name], strict=True)
        }
        batch[name] = [known[int(position)] for position in batch["partition"]]


def to_rank_batch(part: Wire) -> RankBatch:
    """Unpack the batch of a training rank: a list per entry, with CPU tensors if there is one value
    per token.

    ``train_metadata`` and ``metadata`` are the same list. The tensors own their memory.
    """
    import torch

    batch = RankBatch()
    # One tensor for all samples, of which each gets a view: thousands of small tensors would take
    # seconds to make.
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
