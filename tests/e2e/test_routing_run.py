"""A whole run that trains with the experts of an engine (``--use-rollout-routing-replay``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
# The embedded engine does not report experts. Those that its own router did not choose show in the
# gap between its log-probs and the trainer's.
GENERATE = """
import numpy as np
from slime.rollout.generate import generate as ask

async def generate(args, sample, sampling_params):
    sample = await ask(args, sample, sampling_params)
    rows = len(sample.tokens) - 1
    draws = np.random.default_rng(sample.index).random((rows, 2, 4))
    sample.rollout_routed_experts = draws.argsort(-1)[..., :2].astype(np.uint8)
    return sample
"""


def test_samples_are_trained_with_their_experts(
    runner: Any, flags: list[object], save_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=258, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, initializer_range=0.2,
        pad_token_id=0, bos_token_id=None, eos_token_id=1, moe_intermediate_size=32, num_experts=4,
        num_experts_per_tok=2,
    )  # fmt: skip
    given = list(flags)
    given[given.index("--hf-checkpoint") + 1] = save_tiny(Qwen3MoeForCausalLM, config)
    (tmp_path / "routes.py").write_text(GENERATE)
    given += [
        "--num-rollout",
        2,
        "--custom-generate-function-path",
        f"{tmp_path}/routes.py:generate",
    ]
    gaps = []
    for name, more in (("own", []), ("engine", ["--use-rollout-routing-replay"])):
        run = runner.inline(*given, *more, name=name)
        assert run.code == 0, run.output
        gaps += [row["train/train_rollout_logprob_abs_diff"] for row in run.metrics()]
    assert all(gap < 1e-4 for gap in gaps[:2]) and all(gap > 1e-2 for gap in gaps[2:]), gaps
    assert len(gaps) == 4
