"""Convert samples of a rank batch to packs, and run passes over them with megatron-core's
schedules.

The schedules are: no pipeline, 1F1B, or interleaved. Passes whose memory is measured run in
:func:`without_a_trace`, which discards their gradients.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from slime.backends.loss_inputs import Scores
from slime.data.fields import RankBatch
from slime.data.packing import PackLayout, build_context_pack, build_pack
from slime.models.segments import PackSegments, to_device
from slime.plugins.megatron.model import PolicyModel, Scoring
from slime.plugins.megatron.modules import Pack


@dataclass(frozen=True)
class MicroBatch:
    """One pack of n samples. ``indices`` are their positions in the rank batch; they are empty for
    a dummy.

    ``response_lengths`` and ``response_index`` (None for all tokens) describe the part of this
    context-parallel rank.
    """

    indices: list[int]
    ids: Tensor
    pack: Pack
    scoring: Scoring
    response_lengths: list[int]
    response_index: list[Tensor] | None
    positions: np.ndarray
    """int64 ``[T]``: the position of each row in its sample."""
    sample_rows: list[np.ndarray]
    """The rows of each sample on this rank. Samples that share a prompt share its rows."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens on this rank."""
        return self.ids.shape[1]


@dataclass(frozen=True)
class PackBuilder:
    """Builds micro-batches.

    Attributes:
        context_group: The ranks that divide the tokens of each sample; None without context
            parallelism.
        pad_to_multiple: Pad the tokens of a rank to a multiple of this. Sequence parallelism
            divides them by the tensor-parallel size.
        share_prompts: Whether samples of a group store their prompt and other common beginnings
            once.
        with_sequences: Whether packs list their sequences, for layers with a state.
        chunk_size, fused: How logits are computed; see :class:`Scoring`.
    """

    device: torch.device
    context_group: ProcessGroup | None = None
    pad_to_multiple: int = 1
    share_prompts: bool = True
    with_sequences: bool = False
    chunk_size: int = -1
    fused: bool = False

    def build(self, batch: RankBatch, indices: Sequence[int], scoring: Scoring) -> MicroBatch:
        """Build the pack of the samples at ``indices``. ``scoring`` has the requested outputs; rows
        and targets are added to it."""
        # A rank without samples takes part in the collectives of a pass with a dummy of two tokens.
        indices = list(indices)
        tokens = [batch["tokens"][i].numpy() for i in indices] or [
            torch.zeros(2, dtype=torch.long).numpy()
        ]
        lengths = [int(batch["response_lengths"][i]) for i in indices] or [1]
        groups = [int(batch["group_indices"][i]) for i in indices] or [0]
        layout = self._layout(tokens, lengths, groups)
        segments = PackSegments.from_layout(
            layout, self.device, self.context_group, self.with_sequences
        )
        # With context parallelism, a sample is divided among ranks in chunks, so its scored rows
        # are listed one by one.
        index = layout.response_index
        return MicroBatch(
            indices=indices,
            ids=to_device(layout.tokens, self.device)[None],
            pack=Pack(positions=to_device(layout.positions, self.device), segments=segments),
            scoring=replace(
                scoring,
                logit_index=to_device(layout.logit_index, self.device),
                targets=to_device(layout.targets, self.device),
                chunk_size=self.chunk_size,
                fused=self.fused,
            ),
            response_lengths=layout.response_lengths,
            response_index=None if index is None else [torch.from_numpy(x) for x in index],
            positions=layout.positions,
            sample_rows=[layout.rows_of(i) for i in range(len(indices))],
        )

    def _layout(
        self, tokens: list[np.ndarray], lengths: list[int], groups: list[int]
    ) -> PackLayout:
        if self.context_group is None:
            return build_pack(tokens, lengths, groups, self.share_prompts, self.pad_to_multiple)
        group = self.context_group
        return build_context_pack(tokens, lengths, group.size(), group.rank(), self.pad_to_multiple)


Chunks = list[DistributedDataParallel]
OnScores = Callable[[MicroBatch, Scores], tuple[Tensor, dict[str, Tensor]]]
"""Computes, on the last stage, the loss of a micro-batch (a scalar) and results for the caller of
the schedule.
"""
Around = Callable[[PolicyModel, MicroBatch], contextlib.AbstractContextManager[None]]
"""Returns the context in which the forward pass of a model chunk over a micro-batch runs."""


def run_schedule(
    chunks: Chunks,
    micros: list[MicroBatch],
    on_scores: OnScores,
    forward_only: bool,
    around: Around | None,
) -> list[dict[str, Tensor]]:
    """Run forward and, unless ``forward_only``, backward passes of all micro-batches on this rank's
    model chunks.

    Args:
        around: Creates the context of each forward pass of a chunk.

    Returns:
        The second results of ``on_scores``, in order. The list is empty on stages before the last.
    """
    for chunk in chunks:
        # dropout is 0, but Megatron's recomputation and checks depend on the mode
        chunk.train(not forward_only)
    iterators = [iter(micros) for _ in chunks]
    several = len(chunks) > 1
    return get_forward_backward_func()(
        forward_step_func=functools.partial(_forward, on_scores, around),
        data_iterator=iterators if several else iterators[0],
        model=chunks if several else chunks[0],
        num_microbatches=len(micros),
        # Packs differ in length. With several stages the config has variable_seq_lengths, so
        # neighboring stages exchange shapes before tensors. The value here is required, but has no
        # effect.
        seq_length=max(micro.num_tokens for micro in micros),
        micro_batch_size=1,
        forward_only=forward_only,
    )


def _forward(
    on_scores: OnScores,
    around: Around | None,
    iterator: Iterator[MicroBatch],
    chunk: DistributedDataParallel,
) -> tuple[Any, Any]:
    micro = next(iterator)
    with around(chunk.module, micro) if around is not None else contextlib.nullcontext():
        output = chunk(
            input_ids=micro.ids,
            position_ids=None,
            attention_mask=None,
            labels=micro.scoring,
            packed_seq_params=micro.pack,
        )
    return output, functools.partial(_reduce, on_scores, micro)


def _reduce(
    on_scores: OnScores, micro: MicroBatch, scores: Scores
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    loss, result = on_scores(micro, scores)
    # Megatron would divide by the number of tokens. The losses are already divided, so the number
    # here is 0.
    return loss, torch.zeros((), dtype=torch.int, device=loss.device), result


# --- passes whose memory is measured --------------------------------------------------------------


def no_loss(micro: MicroBatch, scores: Scores) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a loss of 0 whose gradient nevertheless requires the whole backward pass."""
    return scores.trained.sum() * 0.0, {}


@contextlib.contextmanager
def without_a_trace(config: TransformerConfig, chunks: Chunks) -> Iterator[None]:
    """Discard the effects of the passes in this context: gradients, and the counts of tokens for
    the experts' biases.

    Args:
        config: The config of the chunks.
    """
    sum_gradients = config.finalize_model_grads_func
    config.finalize_model_grads_func = _finish_communication
    for chunk in chunks:
        chunk.zero_grad_buffer()
    try:
        yield
    finally:
        config.finalize_model_grads_func = sum_gradients
        for chunk in chunks:
            chunk.zero_grad_buffer()
            for module in chunk.modules():
                if (counts := getattr(module, "local_tokens_per_expert", None)) is not None:
                    # otherwise the next update of the experts' biases would use them
                    counts.zero_()


def _finish_communication(
    chunks: Chunks, num_tokens: Tensor | None = None, **kwargs: object
) -> None:
    """Wait for gradients that are being reduced. They are not used."""
    for chunk in chunks:
        chunk.finish_grad_sync()
