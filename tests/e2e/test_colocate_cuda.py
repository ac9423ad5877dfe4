"""``train.py --colocate`` on two GPUs: two training ranks and one SGLang server, a tensor-parallel
rank on each GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.config.machine import installed

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(1300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.skipif(not installed("sglang"), reason="needs SGLang"),
]


@pytest.fixture(scope="session")
def qwen3(save_tiny: Callable[..., Path]) -> Path:
    """A random Qwen3 of 4 layers whose shapes CUDA kernels take: 8 heads of 64, four of them for
    keys and values.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=False,
        pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    return save_tiny(Qwen3ForCausalLM, config, bfloat16=True)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_one_server_over_the_gpus_of_two_training_ranks(
    runner: Any, flags: list[object], qwen3: Path, backend: str
) -> None:
    """Each tensor-parallel rank opens the CUDA IPC handle of its own GPU; every sync is audited,
    the first one over overwritten weights."""
    if backend == "megatron" and not installed("megatron.core"):
        pytest.skip("needs megatron-core")
    changed: dict[str, object] = {
        "--hf-checkpoint": qwen3, "--train-backend": backend, "--rollout-backend": "sglang", "--lr": "1e-4",
    }  # fmt: skip
    given = list(flags)
    for name, value in changed.items():
        given[given.index(name) + 1] = value
    layout: list[object] = ["--tensor-model-parallel-size", 2] if backend == "megatron" else []
    result = runner.run(
        *given, *layout, "--colocate", "--actor-num-gpus-per-node", 2, "--rollout-num-gpus-per-engine", 2,
        "--sglang-attention-backend", "triton", "--sglang-disable-cuda-graph", "--sglang-mem-fraction-static", 0.4,
        "--update-weight-buffer-size", 4 * 2**20, "--check-weight-update-equal", name=backend, timeout=1200,
    )  # fmt: skip
    assert result.code == 0, result.output
    rows = result.metrics()
    assert len(rows) == 3
    for row in rows:
        assert row["perf/audit_logprob_diff"] < 0.5
        assert row["train/train_rollout_logprob_abs_diff"] < 0.1
    assert any(row["train/grad_norm"] > 0 for row in rows)
    assert runner.wait_gone() == []
