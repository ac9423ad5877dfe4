"""A whole run whose experts are divided between two training ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]


def test_engines_get_whole_models_and_one_rank_goes_on(
    runner: Any, flags: list[object], save_tiny: Callable[..., Path]
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
    given += ["--save", runner.tmp / "saved", "--save-interval", 2]
    divided = ["--actor-num-gpus-per-node", 2, "--fsdp-expert-parallel-size", 2]
    result = runner.run(*given, *divided, "--num-rollout", 2)
    assert result.code == 0, result.output
    resumed = runner.inline(*given, "--load", runner.tmp / "saved", name="resumed")
    assert resumed.code == 0 and "going on with rollout 2" in resumed.output, resumed.output
    rows = [*result.metrics(), resumed.metrics()[-1]]  # which begins with the last of the first run
    assert [row["rollout/step"] for row in rows] == [0, 1, 2]
    for row in rows:  # the audit is that of the weights after the step
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-4
        assert row["perf/audit_logprob_diff"] < 1e-4
    assert any(row["train/grad_norm"] > 0 for row in rows)
    assert runner.wait_gone() == []
