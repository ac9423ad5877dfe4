"""Training passes whose gradients are thrown away: what they take of memory is measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from slime.backends.megatron.inputs import MicroBatch
from slime.backends.token_batch import Scores


def no_loss(micro: MicroBatch, scores: Scores) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss of 0 that needs the whole backward pass."""
    return scores.trained.sum() * 0.0, {}


@contextmanager
def without_a_trace(config: TransformerConfig, chunks: list[DistributedDataParallel]) -> Iterator[None]:
    """Gradients of the passes inside are zeroed, and experts' biases do not see their tokens.

    Args:
        config: Megatron's, of the chunks.
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
                    counts.zero_()  # the next update of the experts' biases would count them


def _finish_communication(
    chunks: list[DistributedDataParallel], num_tokens: Tensor | None = None, **kwargs: object
) -> None:
    """Wait for gradients that are being reduced; they are not used."""
    for chunk in chunks:
        chunk.finish_grad_sync()
