"""The copy with more heads computes the same function and has the same gradients."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "pad_heads.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_pad_heads", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """Three key-value heads of two query heads each."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_logits_and_gradients_are_equal(script: ModuleType, llama: Path, tmp_path: Path) -> None:
    copy = script.pad_heads(llama, tmp_path / "copy", 4)
    ids = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(1))
    logits, gradients = [], []
    for folder in (llama, copy):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        logits.append(out.logits.detach())
        gradients.append(
            {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        )
    assert model.config.num_attention_heads == 8 and model.config.num_key_value_heads == 4
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-5, atol=1e-6)
    assert gradients[0].keys() == gradients[1].keys() != set()
    for name, grad in gradients[1].items():
        before = gradients[0][name]
        held = grad[tuple(slice(n) for n in before.shape)]
        torch.testing.assert_close(before, held, rtol=1e-4, atol=1e-6)
        assert grad.abs().sum() == pytest.approx(float(held.abs().sum())), (
            f"{name}: an added head learns"
        )


def test_a_model_that_has_enough_is_refused(
    script: ModuleType, llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="has 3 key-value heads"):
        script.pad_heads(llama, tmp_path / "copy", 3)
