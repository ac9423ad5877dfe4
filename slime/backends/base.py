"""The interface of a training backend, and the batch that it trains on.

A *rank batch* is what one data-parallel rank gets for one rollout: a plain dict. Per-sample
entries are lists in the rank's own sample order (``n`` samples); per-token entries are lists of
1-D tensors, one per sample. Keys marked * are always there.

====================== ============================== ===========================================
key                    per sample                     meaning
====================== ============================== ===========================================
tokens*                int64 ``[total_length]``       prompt + response ids
total_lengths*         int                            len(tokens)
response_lengths*      int                            number of response tokens (at the end)
loss_masks*            int32 ``[response_length]``    1 = train on this token
rewards*               float                          post-processed reward (advantage of GRPO)
raw_reward*            float                          reward as given
truncated*             int                            1 when cut by the length limit
sample_indices*        int                            ``Sample.index``
group_indices*         int                            ``Sample.group_index``
rollout_ids*           int                            fan-out siblings share one
rollout_mask_sums*     float                          loss-mask sum over all siblings, whole batch
rollout_log_probs      float32 ``[response_length]``  of the engine
ref_log_probs          float32 ``[response_length]``
teacher_log_probs      float32 ``[response_length]``
log_probs              float32 ``[response_length]``  old log-probs; absent = current ones, detached
values                 float32 ``[response_length]``
advantages, returns    float32 ``[response_length]``
weight_versions        list[str]
staleness              float32 ``[response_length]``  steps since each token's weights; -1: unknown; absent: 0
multimodal_train_inputs dict[str, Tensor] or None
train_metadata         dict or None
====================== ============================== ===========================================

Whole-batch entries: ``micro_batch_indices`` (list of lists of local sample positions, in the
order trained), ``num_microbatches`` (per step), ``global_batch_sizes`` (per step: rollouts in the
whole step over all ranks), ``global_token_counts`` (per step: sum over samples of
max(mask sum, 1) over all ranks), ``rollout_id`` (int).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch

    from slime.backends.saving import BackgroundSave
    from slime.checkpoint.files import FileEntry

RankBatch = dict[str, Any]
ModelTag = Literal["actor", "ref", "teacher", "old_actor", "rollout_actor"]
Metrics = dict[str, float]


class TrainBackend(Protocol):
    """One rank of a training job. Every method is called on all ranks together."""

    rank: int
    world_size: int
    data_parallel_rank: int
    data_parallel_size: int
    saving: BackgroundSave | None
    moving_copies: set[str]
    """Copies that change during a run, and so belong in its snapshots."""

    def log_probs(
        self, batch: RankBatch, model: ModelTag = "actor", with_entropy: bool = False, temperature: float | None = None
    ) -> dict[str, list[torch.Tensor]]:
        """Forward only. Returns ``{"log_probs": [...]}`` and, if asked, ``"entropy"``: float32
        ``[response_length]`` per sample, on the CPU. ``temperature`` divides the logits; default
        ``--rollout-temperature``."""

    def values(self, batch: RankBatch) -> list[torch.Tensor]:
        """Critic only: float32 ``[response_length]`` per sample, on the CPU."""

    def train_step(self, batch: RankBatch, step: int) -> Metrics:
        """Forward, backward and optimizer for optimizer step ``step`` of this batch.
        Metrics are the same on every rank. Raises on a non-finite loss or gradient norm."""

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """HF-named full tensors in checkpoint order; a collective: every rank must exhaust it."""

    def copy_weights(self, source: ModelTag, target: ModelTag) -> None:
        """Refresh the reference or old actor from another copy."""

    def save(self, path: Path) -> list[FileEntry]:
        """Write this rank's shard of model, optimizer, scheduler and RNG below ``path``; returns its files. With
        ``--async-save`` only copies are made at once; :attr:`saving` is what is still to be written."""

    def save_hf(self, path: Path) -> None:
        """Write the weights below ``path`` in Hugging Face's format; a collective."""

    def load(self, path: Path) -> None:
        """Read what :meth:`save` wrote, also by another number of ranks."""

    def clear_memory(self) -> None:
        """Free gradients and the accelerator memory that the allocator keeps for the next step."""

    def sleep(self, keep_weights: bool = False) -> None:
        """Give accelerator memory back (copies to pinned CPU memory); a no-op on the CPU.

        ``keep_weights``: optimizer state and gradients only, so that :meth:`named_weights` still works; a second call
        without it gives the rest back."""

    def wake(self) -> None: ...
