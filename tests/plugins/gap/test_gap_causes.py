"""``slime gap`` names the first cause of each of ten planted gaps, and of further ones."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

sys.path.append(str(Path(__file__).resolve().parents[2] / "backends"))
sys.path.append(str(Path(__file__).parent))

from fsdp_helpers import save_tiny_llama, save_tiny_qwen3_moe
from planted_gaps import (
    changed,
    engine_with,
    flipped_routes,
    fp8,
    fp8_inputs,
    nucleus_scores,
    reference_of,
    samples_of,
    scores,
    swapped_gate_and_up,
    with_values,
)

from slime.plugins.gap.reference import GapSample, Weights
from slime.plugins.gap.search import Explained, explain

FLOAT32 = (torch.float32, torch.float32)


def plain(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return plain(save_tiny_llama(tmp_path_factory.mktemp("llama"), tie_word_embeddings=False))


@pytest.fixture(scope="module")
def samples(llama: PreTrainedModel) -> list[GapSample]:
    return samples_of(llama)


@pytest.fixture(scope="module")
def many(llama: PreTrainedModel) -> list[GapSample]:
    """With fewer, the tensor next to a wrong one explains as much."""
    return samples_of(llama, count=24)


def explained(
    model: PreTrainedModel,
    samples: list[GapSample],
    engine: list[Tensor],
    older: Mapping[str, Weights] | None = None,
) -> Explained:
    scored = [with_values(s, engine=e) for s, e in zip(samples, engine, strict=True)]
    return explain(reference_of(model, scored), older or {}, FLOAT32)


def test_a_norms_epsilon(llama, samples, tmp_path: Path) -> None:
    engine = engine_with(llama, tmp_path, rms_norm_eps=1e-3)
    found = explained(llama, samples, scores(engine, samples))
    assert found.first.startswith("norms with epsilon 0.001 instead of 1e-06"), found
    assert found.causes[0].side == "engine" and found.closed > 0.99
    assert sum(found.causes[0].layers.values()) == pytest.approx(1, abs=0.3)


def test_swapped_gate_and_up(llama, samples) -> None:
    with swapped_gate_and_up():
        engine = scores(llama, samples)
    found = explained(llama, samples, engine)
    assert "mlp.gate_proj.weight and mlp.up_proj.weight were swapped" in found.first, found
    assert "only in" not in found.first and found.closed > 0.99


def test_swapped_gate_and_up_of_one_layer(llama, samples) -> None:
    own = dict(llama.named_parameters())
    swaps = {
        "model.layers.1.mlp.gate_proj.weight": "model.layers.1.mlp.up_proj.weight",
        "model.layers.1.mlp.up_proj.weight": "model.layers.1.mlp.gate_proj.weight",
    }
    engine = changed(llama, lambda name, _: own[swaps.get(name, name)].detach())
    found = explained(llama, samples, scores(engine, samples))
    assert "mlp.gate_proj.weight and mlp.up_proj.weight were swapped" in found.first, found
    assert found.first.endswith("only in layer 1") and found.closed > 0.99


def older_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    torch.manual_seed(5)
    weights = model.state_dict()
    return {name: tensor + 0.01 * torch.randn_like(tensor) for name, tensor in weights.items()}


def test_a_stale_rank(llama, samples) -> None:
    old = older_weights(llama)
    stale = {n for n in old if "layers.0.mlp" in n or "layers.1.self_attn.o_proj" in n}
    engine = changed(llama, lambda name, now: old[name] if name in stale else now)
    found = explained(llama, samples, scores(engine, samples), {"the weights of step 2": old})
    assert found.first.startswith("the weights of step 2, only in "), found
    assert all(f"{name}" in found.first for name in stale), found.first
    assert found.closed > 0.99 and "--audit-weights" in found.causes[0].flag


def test_all_weights_are_old(llama, samples) -> None:
    old = older_weights(llama)
    engine = changed(llama, lambda name, now: old[name])
    found = explained(llama, samples, scores(engine, samples), {"the weights of step 2": old})
    assert found.first == "the weights of step 2" and found.closed > 0.99, found


def test_stale_spans(llama, samples) -> None:
    old = older_weights(llama)
    behind = scores(changed(llama, lambda name, now: old[name]), samples)
    engine, marked = [], []
    for sample, values in zip(samples, behind, strict=True):
        stale = torch.arange(len(sample.mask)) < 7
        engine.append(torch.where(stale, values, sample.engine))
        marked.append(with_values(sample, stale=stale))
    found = explained(llama, marked, engine, {"the weights of step 2": old})
    assert found.first == "stale spans: tokens sampled with the weights of step 2", found


def test_fp8_scales(llama, samples) -> None:
    found = explained(llama, samples, scores(changed(llama, fp8), samples))
    # A block is larger than the matrices of this model.
    assert found.first == "fp8 weights, a scale for each block" and found.closed > 0.99, found


def test_fp8_weights_and_inputs(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8}
    model = plain(save_tiny_llama(tmp_path, tie_word_embeddings=False, **sizes))
    samples = samples_of(model)
    engine = changed(model, fp8)
    with fp8_inputs(engine):
        found = explained(model, samples, scores(engine, samples))
    assert found.first.startswith("fp8 weights and inputs") and found.closed > 0.9, found


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}, "divided by 4"),
        ({"rope_type": "default", "rope_theta": 5e5}, "RoPE with theta 500000"),
    ],
)
def test_rope_of_another_length(llama, samples, tmp_path: Path, rope, said: str) -> None:
    engine = engine_with(llama, tmp_path, rope_parameters=rope)
    found = explained(llama, samples, scores(engine, samples))
    assert said in found.first and found.closed > 0.99, found


def test_a_cut_nucleus(llama, samples) -> None:
    found = explained(llama, samples, nucleus_scores(llama, samples, 0.9))
    assert found.first == "nucleus cut at top-p 0.9" and found.closed > 0.99, found
    assert "--rollout-top-p 1" in found.causes[0].flag


def test_weights_in_bfloat16(llama, samples) -> None:
    engine = changed(llama, lambda _, tensor: tensor.bfloat16().float())
    found = explained(llama, samples, scores(engine, samples))
    assert found.first == "weights in bfloat16" and found.closed > 0.99, found
    assert "--rollout-dtype float32" in found.causes[0].flag


def test_a_head_in_bfloat16(llama, samples) -> None:
    class Head(torch.nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            return (hidden.bfloat16() @ self.weight.bfloat16().T).float()

    engine = changed(llama, lambda _, tensor: tensor)
    engine.lm_head.__class__ = Head
    found = explained(llama, samples, scores(engine, samples))
    assert found.first == "head in bfloat16" and found.closed > 0.9, found


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.down_proj.weight",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "model.layers.0.self_attn.v_proj.weight",
                "model.layers.0.mlp.up_proj.weight",
                "model.layers.1.post_attention_layernorm.weight",
                "model.norm.weight",
            )
        ),
    ],
)
def test_a_wrong_single_tensor(llama, many, name: str) -> None:
    torch.manual_seed(11)
    engine = changed(llama, lambda one, t: t + 0.05 * torch.randn_like(t) if one == name else t)
    found = explained(llama, many, scores(engine, many))
    assert found.first == f"a wrong tensor: {name}", found


def test_flipped_routes(tmp_path: Path) -> None:
    model = plain(save_tiny_qwen3_moe(tmp_path))
    samples = samples_of(model)
    engine, routed = [], []
    for sample in samples:
        chosen: list[Tensor] = []
        with flipped_routes(chosen):
            engine += scores(model, [sample])
        routed.append(with_values(sample, routes=torch.stack(chosen, 1)[:-1]))
    found = explained(model, routed, engine)
    assert found.first.startswith("flipped routes: the engine"), found
    assert found.closed > 0.99 and "--use-rollout-routing-replay" in found.causes[0].flag


def test_nothing_but_another_order_of_sums(llama, samples) -> None:
    last_bits = [one.engine.nextafter(torch.zeros(())) for one in samples]
    found = explained(llama, samples, last_bits)
    assert not found.causes and found.first.startswith("rounding"), found


def test_equal_log_probs_in_bfloat16(llama, samples) -> None:
    """As of a run with ``--true-on-policy``."""
    same = [with_values(one, engine=one.trainer) for one in samples]
    found = explain(reference_of(llama, same), {}, (torch.bfloat16, torch.bfloat16))
    assert not found.causes and found.first.startswith("none") and found.mean == 0, found


def test_two_causes_one_on_each_side(llama, samples, tmp_path: Path) -> None:
    engine = engine_with(llama, tmp_path, rms_norm_eps=1e-3)
    trainer = scores(changed(llama, lambda _, tensor: tensor.bfloat16().float()), samples)
    both = [with_values(s, trainer=t) for s, t in zip(samples, trainer, strict=True)]
    found = explained(llama, both, scores(engine, samples))
    assert [one.side for one in found.causes] == ["engine", "trainer"], found
    assert found.causes[0].cause.startswith("norms with epsilon")
    assert found.causes[1].cause == "weights in bfloat16" and found.closed > 0.95
