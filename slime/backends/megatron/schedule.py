"""Run a pass over micro-batches with megatron-core's schedules: no pipeline, 1F1B, or interleaved.

Passes whose memory is measured run in :func:`without_a_trace`, which discards their gradients.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from slime.backends.megatron.inputs import MicroBatch
from slime.backends.megatron.model import PolicyModel
from slime.backends.token_batch import Scores

Chunks = list[DistributedDataParallel]
OnScores = Callable[[MicroBatch, Scores], tuple[Tensor, dict[str, Tensor]]]
"""Computes, on the last stage, the loss of a micro-batch (a scalar) and results for the caller of the schedule."""
Around = Callable[[PolicyModel, MicroBatch], contextlib.AbstractContextManager[None]]
"""Returns the context in which the forward pass of a model chunk over a micro-batch runs."""


def run_schedule(
    chunks: Chunks, micros: list[MicroBatch], on_scores: OnScores, forward_only: bool, around: Around | None = None
) -> list[dict[str, Tensor]]:
    """Run forward and, unless ``forward_only``, backward passes of all micro-batches on this rank's model chunks.

    Args:
        around: Creates the context of each forward pass of a chunk.

    Returns:
        The second results of ``on_scores``, in order. The list is empty on stages before the last.
    """
    for chunk in chunks:
        chunk.train(not forward_only)  # dropout is 0, but Megatron's recomputation and checks depend on the mode
    iterators = [iter(micros) for _ in chunks]
    several = len(chunks) > 1
    return get_forward_backward_func()(
        forward_step_func=functools.partial(_forward, on_scores, around),
        data_iterator=iterators if several else iterators[0],
        model=chunks if several else chunks[0],
        num_microbatches=len(micros),
        # Packs differ in length. With several stages the config has variable_seq_lengths, so neighboring stages
        # exchange shapes before tensors. The value here is required, but has no effect.
        seq_length=max(micro.num_tokens for micro in micros),
        micro_batch_size=1,
        forward_only=forward_only,
    )


def _forward(
    on_scores: OnScores, around: Around | None, iterator: Iterator[MicroBatch], chunk: DistributedDataParallel
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


def _reduce(on_scores: OnScores, micro: MicroBatch, scores: Scores) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    loss, result = on_scores(micro, scores)
    # Megatron would divide by the number of tokens. The losses are already divided, so the number here is 0.
    return loss, torch.zeros((), dtype=torch.int, device=loss.device), result


# --- passes whose memory is measured --------------------------------------------------------------


def no_loss(micro: MicroBatch, scores: Scores) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a loss of 0 whose gradient nevertheless requires the whole backward pass."""
    return scores.trained.sum() * 0.0, {}


@contextlib.contextmanager
def without_a_trace(config: TransformerConfig, chunks: Chunks) -> Iterator[None]:
    """Discard the effects of the passes in this context: gradients, and the counts of tokens for the experts' biases.

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
                    counts.zero_()  # otherwise the next update of the experts' biases would use them


def _finish_communication(chunks: Chunks, num_tokens: Tensor | None = None, **kwargs: object) -> None:
    """Wait for gradients that are being reduced. They are not used."""
    for chunk in chunks:
        chunk.finish_grad_sync()
