"""A measured token budget against the memory of a real training step, for the CUDA tests of both
backends.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp_helpers import whole_batch

from slime.backends import token_budget
from slime.backends.train_loop import train_on_rollout

# A line through the peaks of packs of 4,096 and 8,192 tokens predicts the peak of one of 16,384
# only if the logits take the same in all three. The chunk that is scored last is kept from the
# forward to the end of the backward pass, so what it takes depends on the remainder of the rows:
# with the default of 441 rows for 152,000 words, the head alone peaks at 1,955, 2,042 and 1,961 MiB
# for 4,092, 8,184 and 16,368 rows, and the first two make a line that rises by 22 KiB a token for
# nothing. Compiled, a chunk has 3,456 rows: 4,092 rows are not two of them, and the float32 sum of
# the weight's gradient begins with the second. (Counted on the meta device.) A sample of 1,024
# tokens
# has 1,023 scored rows. With as many rows in a chunk, packs of 4, 8 and 16 samples are as many
# whole chunks, and the head peaks at 2,982, 2,998 and 3,030 MiB: a line of 4 KiB a token.
ROWS_PER_CHUNK = token_budget.SAMPLE_TOKENS - 1
SHAPE: dict[str, Any] = dict(
    hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=4,
    vocab_size=151_936, max_position_embeddings=4096, initializer_range=0.02,
)  # fmt: skip
FLAGS: dict[str, Any] = dict(
    train_dtype="bfloat16", micro_batch_size=16, log_probs_chunk_size=ROWS_PER_CHUNK
)


class MeterOfOnce(token_budget.CudaMeter):
    """Keeps what was available, which another process on the GPU may change."""

    found = 0

    def available(self) -> int:
        self.found = super().available()
        return self.found


def check_measured_budget(backend: Any) -> None:
    """Measuring changes no weight, and a step over packs four times as large as the smaller of the
    measured ones takes the memory that was predicted.

    Args:
        backend: of a model of :data:`SHAPE`, with :data:`FLAGS`.
    """
    before = {name: tensor.cpu().clone() for name, tensor in backend.named_weights()}
    meter = MeterOfOnce()
    found = token_budget.measure(backend, 0.85, meter)
    for name, tensor in backend.named_weights():
        assert torch.equal(tensor.cpu(), before[name]), name
    assert all(p.grad is None for _, p in getattr(backend, "named_parameters", [])), (
        "FSDP's; Megatron keeps buffers"
    )
    assert found.tokens > 16_384, found
    generator = torch.Generator().manual_seed(0)
    # No reward is 0: a sample without an advantage is not trained, and a pack would have fewer
    # tokens.
    samples = [
        dict(
            tokens=torch.randint(1000, (1024,), generator=generator).tolist(),
            mask=[1] * 1023,
            reward=1 + i,
            group=i,
        )
        for i in range(32)
    ]
    meter.start()
    train_on_rollout(backend, whole_batch(samples, micro_batch_size=16))
    predicted = 0.85 * meter.found - (found.tokens - 16 * 1024) * found.bytes_per_token
    assert meter.peak() == pytest.approx(predicted, rel=0.02), (
        meter.peak() / 2**30,
        predicted / 2**30,
        found,
    )
