"""``train.py`` with real megatron-core and real SGLang together, on the CPU: the pair that a GPU
run uses by default.

Every sync is audited, and the first one is repeated over overwritten weights, so a tensor that was
not written, on whatever rank, ends the run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_train_megatron import on_cpu

pytestmark = [pytest.mark.sglang, pytest.mark.real, pytest.mark.timeout(1300)]


@pytest.fixture(scope="session")
def tiny_moe(save_tiny: Callable[..., Path]) -> Path:
    """A random GLM-4.5-MoE: one dense layer, one with four routed experts and a shared one."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    config = Glm4MoeConfig(
        vocab_size=258, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, initializer_range=0.2,
        tie_word_embeddings=False, pad_token_id=0, bos_token_id=None, eos_token_id=1, moe_intermediate_size=32,
        num_experts_per_tok=2, n_routed_experts=4, n_shared_experts=1, routed_scaling_factor=2.5,
        first_k_dense_replace=1, attention_bias=True, use_qk_norm=True, partial_rotary_factor=0.5,
    )  # fmt: skip
    return save_tiny(Glm4MoeForCausalLM, config)


def on_sglang(flags: list[object], model: Path | None = None) -> list[object]:
    """The same run with SGLang servers, and on another model where one is given."""
    changed: dict[str, object] = {"--rollout-backend": "sglang"} | (
        {"--hf-checkpoint": model} if model else {}
    )
    flags = list(flags)
    for name, value in changed.items():
        flags[flags.index(name) + 1] = value
    return [*flags, "--sglang-device", "cpu", "--sglang-max-total-tokens", 8192]


LAYOUTS: dict[str, tuple[bool, list[object]]] = {
    "tp2-and-two-servers": (False, ["--tensor-model-parallel-size", 2, "--rollout-num-gpus", 2]),
    "tp2-colocated-with-tp2": (
        False,
        ["--tensor-model-parallel-size", 2, "--colocate", "--rollout-num-gpus-per-engine", 2],
    ),
    "moe-ep2": (True, ["--expert-model-parallel-size", 2]),
}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("tp2-and-two-servers", marks=pytest.mark.long),
        "tp2-colocated-with-tp2",
        pytest.param("moe-ep2", marks=pytest.mark.long),
    ],
)
def test_megatron_trains_what_sglang_generates_with(
    runner: Any, flags: list[object], tiny_moe: Path, layout: str
) -> None:
    moe, more = LAYOUTS[layout]
    given = on_sglang(flags, tiny_moe if moe else None)
    result = runner.run(
        *given, "--num-rollout", 2, "--check-weight-update-equal", "--actor-num-gpus-per-node", 2, *more, *on_cpu(),
        timeout=900,
    )  # fmt: skip
    assert result.code == 0, result.output
    rows = result.metrics()
    assert len(rows) == 2
    for row in rows:
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-3
        assert row["perf/audit_logprob_diff"] < 1e-3  # also after the update of this step
    assert any(row["train/grad_norm"] > 0 for row in rows)
    assert runner.wait_gone() == []
