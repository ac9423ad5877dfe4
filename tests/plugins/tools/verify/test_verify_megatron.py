"""Verification of Megatron's layouts on two real ranks of the CPU, with planted errors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from transformers import LlamaConfig

from slime.plugins.tools.verify import Target, verify

pytestmark = [pytest.mark.megatron, pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]
TESTS = Path(__file__).parents[3]
HERE = Path(__file__).parent
BIG = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 24,
    "num_attention_heads": 12,
}
TP = {"tensor_model_parallel_size": 2}


@pytest.fixture(autouse=True)
def _import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [
        TESTS / "plugins" / "megatron" / "cpu_site",
        HERE,
        os.environ.get("PYTHONPATH", ""),
    ]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, places)))


@pytest.fixture
def llama(tmp_path: Path) -> str:
    LlamaConfig(**BIG, num_key_value_heads=4, vocab_size=300).save_pretrained(tmp_path)
    return str(tmp_path)


def target(model: str, sizes: dict[str, int | bool], function: str | None = None) -> Target:
    plain = Target(model, "megatron", sizes, engine=None, layers=2)
    return (
        plain
        if function is None
        else Target(**{**vars(plain), "ranks_function": f"planted:{function}"})
    )


def test_a_missing_sum_of_the_gradients_of_norms_is_named(llama: str) -> None:
    found = verify(target(llama, {**TP, "sequence_parallel": True}, "without_sum_of_norms"))
    by_name = {check.what: check for check in found.checks}
    assert by_name["log-probs"].good and by_name["loss"].good
    assert "layernorm.weight" in by_name["gradients"].first, by_name["gradients"]
    assert "tensor-, sequence- or context-parallel ranks" in by_name["gradients"].note


@pytest.mark.long
def test_a_missing_sum_in_the_forward_pass_is_named(llama: str) -> None:
    found = verify(target(llama, TP, "without_sum_of_rows"))
    assert not found.checks[1].good and found.checks[0].good
    layers = [f"model.layers.{layer}.{part}" for layer in (0, 1) for part in ("self_attn", "mlp")]
    assert found.places == layers
