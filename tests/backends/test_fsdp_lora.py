"""LoRA with FSDP on one rank: gradients, steps, the reference, copies, snapshots and exports."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_helpers import (
    LORA,
    make_args,
    make_backend,
    make_samples,
    save_tiny_llama,
    save_tiny_qwen3,
    save_tiny_qwen3_moe,
    weights_of,
    whole_batch,
)
from safetensors.torch import load_file, save_file
from torch.func import functional_call

from slime.backends.fsdp.backend import FsdpBackend
from slime.backends.train_loop import train_on_rollout
from slime.cli.command import CommandError
from slime.data.fields import RankBatch
from slime.models.lora import merged
from slime.models.shards import ModelError
from slime.plugins.tools.commands.merge_lora import merge_lora


def lora_args(checkpoint: Path, **changes: Any) -> Any:
    return make_args(checkpoint, **(LORA | changes))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("lora") / "llama")


def train(backend: FsdpBackend, seed: int = 0, **changes: Any) -> dict[str, float]:
    return train_on_rollout(backend, whole_batch(make_samples(seed=seed), **changes))[0]


def randomize(backend: FsdpBackend, seed: int = 5) -> None:
    """Give both factors of all layers values, as after many steps."""
    generator = torch.Generator().manual_seed(seed)
    assert backend.adapter is not None
    for _, p in backend.adapter.trained:
        p.data = torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.1


def log_probs(backend: FsdpBackend, model: Any = "actor", seed: int = 0) -> torch.Tensor:
    return torch.cat(backend.log_probs(whole_batch(make_samples(seed=seed)), model)["log_probs"])


def base_of(backend: FsdpBackend) -> dict[str, torch.Tensor]:
    assert backend.adapter is not None
    return {name: p.detach().clone() for name, p in backend.adapter.base}


def gradients(backend: FsdpBackend, batch: RankBatch) -> dict[str, torch.Tensor]:
    """Of one optimizer step, which is not taken."""
    backend.optimizer.step = lambda norm: 0.0  # type: ignore[method-assign]
    backend.optimizer.grad_norm = lambda: 1.0  # type: ignore[method-assign]
    train_on_rollout(backend, batch)
    return {name: p.grad.clone() for name, p in backend.named_parameters if p.grad is not None}


@pytest.mark.parametrize(
    "changes", [{}, {"use_rslora": True}, {"lora_target_modules": ["q_proj", "mlp.down_proj"]}]
)
def test_gradients_are_those_of_merged_weights(llama: Path, changes: dict[str, Any]) -> None:
    """dA = s Bᵀ dW and dB = s dW Aᵀ, where dW is autograd's gradient of the merged weights, through
    the whole loss.
    """
    adapter = make_backend(lora_args(llama, **changes))
    randomize(adapter)
    whole = make_backend(make_args(llama))
    layers = adapter.adapter.layers  # type: ignore[union-attr]
    with torch.no_grad():
        for name, p in whole.scorer.hf.named_parameters():
            layer = layers.get(name.removesuffix(".weight"))
            if layer is not None:
                p.copy_(merged(layer.weight, layer.lora_A, layer.lora_B, layer.lora_scale))
    mine = gradients(adapter, whole_batch(make_samples()))
    theirs = gradients(whole, whole_batch(make_samples()))
    assert set(mine) == {
        name for name, p in adapter.named_parameters if name.endswith(("lora_A", "lora_B"))
    }
    assert len(mine) == 2 * len(layers)
    for name, layer in layers.items():
        d_w = theirs[f"{name}.weight"]
        torch.testing.assert_close(
            mine[f"{name}.lora_A"], layer.lora_scale * layer.lora_B.T @ d_w, rtol=1e-4, atol=1e-6
        )
        torch.testing.assert_close(
            mine[f"{name}.lora_B"], layer.lora_scale * d_w @ layer.lora_A.T, rtol=1e-4, atol=1e-6
        )


def test_one_step_is_that_of_the_merged_model(llama: Path) -> None:
    """A step of the adapter moves the weights as AdamW on A and B does, if autograd runs on ``W + s
    B A``.
    """
    backend = make_backend(lora_args(llama))
    randomize(backend)
    twin = copy.deepcopy(backend.adapter.trained)  # type: ignore[union-attr]
    base, layers = base_of(backend), backend.adapter.layers  # type: ignore[union-attr]
    whole = make_backend(make_args(llama))
    factors = {name: p.detach().clone().requires_grad_() for name, p in twin}
    optimizer = torch.optim.AdamW(
        factors.values(), lr=LORA["lr"], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01
    )  # type: ignore[arg-type]
    merged_now = {
        f"hf.{name}.weight": merged(
            base[f"{name}.weight"], factors[f"{name}.lora_A"], factors[f"{name}.lora_B"], 2.0
        )
        for name in layers
    }
    scorer = whole.scorer
    whole.scores_of = (
        lambda inputs: type(backend.scores_of(inputs))(  # type: ignore[method-assign]
            *functional_call(scorer, merged_now, (inputs, 1.0, True, False, False))[0][:2]
        )
    )
    for p in scorer.parameters():
        p.requires_grad_(False)
    batch = whole_batch(make_samples(), micro_batch_size=16)
    metrics = train_on_rollout(backend, whole_batch(make_samples(), micro_batch_size=16))[0]
    whole.optimizer.grad_norm = lambda: _norm(factors.values())  # type: ignore[method-assign]
    whole.optimizer.step = lambda norm: _clipped_step(optimizer, factors.values(), norm)  # type: ignore[method-assign]
    expected = train_on_rollout(whole, batch)[0]
    assert metrics["train/loss"] == pytest.approx(expected["train/loss"], abs=1e-6)
    assert metrics["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-4)
    for name, p in backend.adapter.trained:  # type: ignore[union-attr]
        torch.testing.assert_close(p.detach(), factors[name].detach(), rtol=1e-3, atol=2e-5)


def _norm(parameters: Any) -> float:
    return float(torch.stack([p.grad.norm() for p in parameters]).norm())


def _clipped_step(optimizer: torch.optim.Optimizer, parameters: Any, norm: float) -> float:
    for p in parameters:
        p.grad.mul_(min(1.0, 1.0 / (norm + 1e-6)))
    optimizer.step()
    return 0.0


def test_only_the_adapter_is_trained_and_starts_at_the_base(llama: Path) -> None:
    backend, whole = make_backend(lora_args(llama)), make_backend(make_args(llama))
    assert torch.equal(log_probs(backend), log_probs(whole))
    before, base = weights_of(backend), base_of(backend)
    assert before.keys() == weights_of(whole).keys()
    assert all(torch.equal(x, before[name]) for name, x in weights_of(whole).items())
    metrics = train(backend)
    assert metrics["train/grad_norm"] > 0
    assert all(torch.equal(x, base[name]) for name, x in base_of(backend).items())
    moved = {name for name, x in weights_of(backend).items() if not torch.equal(x, before[name])}
    assert moved == {name for name in before if "proj" in name} == backend.adapter_sync.changing  # type: ignore[union-attr]
    state = backend.optimizer.tensors()
    assert {name.partition("/")[2] for name in state} == {
        name for name, _ in backend.adapter.trained
    }  # type: ignore[union-attr]


def test_merged_weights_compute_what_the_adapter_computes(llama: Path, tmp_path: Path) -> None:
    backend = make_backend(lora_args(llama, lora_export="merged"))
    randomize(backend)
    backend.save_hf(tmp_path / "merged")
    whole = make_backend(make_args(tmp_path / "merged"))
    torch.testing.assert_close(log_probs(whole), log_probs(backend), rtol=0, atol=2e-5)


def test_the_reference_is_the_base_bit_for_bit(llama: Path) -> None:
    backend = make_backend(lora_args(llama, use_kl_loss=True, kl_loss_coef=0.1))
    separate = make_backend(make_args(llama))
    randomize(backend)
    assert not torch.equal(log_probs(backend), log_probs(separate))
    assert torch.equal(log_probs(backend, "ref"), log_probs(separate))
    assert not backend.bank.copies and not backend._whole_bank.copies
    assert not torch.equal(log_probs(backend), log_probs(separate)), "the adapter is on again"


def test_kl_pulls_towards_the_base(llama: Path) -> None:
    backend = make_backend(lora_args(llama, use_kl_loss=True, kl_loss_coef=10.0, lr=3e-3))
    randomize(backend)
    kl = [train(backend, seed=1)["train/kl_loss"] for _ in range(8)]
    assert kl[-1] < kl[0] / 2


def test_another_reference_and_a_teacher_are_whole_models(llama: Path, tmp_path: Path) -> None:
    other = save_tiny_llama(tmp_path / "other", seed=3)
    flags = dict(use_kl_loss=True, kl_loss_coef=0.1, ref_load=str(other))
    flags |= dict(use_opd=True, opd_type="megatron", opd_teacher_load=str(other))
    backend = make_backend(lora_args(llama, **flags))
    randomize(backend)
    before, mine = base_of(backend), log_probs(backend)
    separate = log_probs(make_backend(make_args(other)))
    assert torch.equal(log_probs(backend, "ref"), separate)
    assert torch.equal(log_probs(backend, "teacher"), separate)
    assert torch.equal(log_probs(backend), mine)
    assert all(torch.equal(x, before[name]) for name, x in base_of(backend).items())


def test_copies_are_copies_of_the_adapter(llama: Path) -> None:
    flags = dict(keep_old_actor=True, use_kl_loss=True, kl_loss_coef=0.1, ref_update_interval=2)
    backend = make_backend(lora_args(llama, **flags))
    base = log_probs(make_backend(make_args(llama)))
    assert torch.equal(log_probs(backend, "ref"), base)
    randomize(backend)
    mine = log_probs(backend)
    assert torch.equal(log_probs(backend, "old_actor"), base)
    backend.copy_weights("actor", "ref")
    randomize(backend, seed=6)
    assert torch.equal(log_probs(backend, "ref"), mine) and not torch.equal(
        log_probs(backend), mine
    )
    assert backend.bank.copies.keys() == {"ref", "old_actor"} == backend.moving_copies
    assert not backend._whole_bank.copies


def test_a_critic_trains_its_own_adapter_and_head(llama: Path) -> None:
    backend = make_backend(lora_args(llama, advantage_estimator="ppo"), role="critic")
    base = base_of(backend)
    names = {name for name, _ in backend.adapter.trained}  # type: ignore[union-attr]
    assert {"value_head.weight", "value_head.bias"} < names
    assert all(
        name.startswith("value_head") or name.endswith(("lora_A", "lora_B")) for name in names
    )
    before = {name: p.detach().clone() for name, p in backend.named_parameters}
    metrics = [train(backend) for _ in range(2)]
    assert metrics[1]["train/critic-value_loss"] < metrics[0]["train/critic-value_loss"]
    assert all(torch.equal(x, base[name]) for name, x in base_of(backend).items())
    assert {
        name for name, p in backend.named_parameters if not torch.equal(p, before[name])
    } == names


@pytest.mark.parametrize(
    "changes", [{"gradient_checkpointing": True}, {"share_prompt_in_pack": False}]
)
def test_ways_to_compute_do_not_change_the_step(llama: Path, changes: dict[str, Any]) -> None:
    results = []
    for more in ({}, changes):
        backend = make_backend(lora_args(llama, **more))
        randomize(backend)
        results.append(gradients(backend, whole_batch(make_samples())))
    for name, gradient in results[0].items():
        torch.testing.assert_close(results[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_dropout_is_only_in_training_steps_and_recomputed_alike(llama: Path) -> None:
    found = []
    for more in ({}, {"lora_dropout": 0.5}, {"lora_dropout": 0.5, "gradient_checkpointing": True}):
        backend = make_backend(lora_args(llama, **more))
        randomize(backend)
        torch.manual_seed(11)
        found.append((log_probs(backend), gradients(backend, whole_batch(make_samples()))))
    assert torch.equal(found[0][0], found[1][0])
    name = next(iter(found[0][1]))
    assert not torch.allclose(found[0][1][name], found[1][1][name], rtol=1e-2)
    for name, gradient in found[1][1].items():
        torch.testing.assert_close(found[2][1][name], gradient, rtol=1e-4, atol=1e-6)


def test_layers_are_chosen_by_name(llama: Path) -> None:
    def layers(**changes: Any) -> set[str]:
        return set(make_backend(lora_args(llama, **changes)).adapter.layers)  # type: ignore[union-attr]

    every = layers()
    assert len(every) == 14
    assert layers(lora_exclude_modules=["mlp.up_proj"]) == {
        name for name in every if "up_proj" not in name
    }
    assert layers(lora_target_modules=["q_proj"]) == {
        f"model.layers.{i}.self_attn.q_proj" for i in range(2)
    }
    first = {name for name in every if ".layers.0." in name}
    assert layers(lora_target_modules=[r"model\.layers\.0\..*"]) == first
    for changes, named in (
        ({"lora_target_modules": ["lm_head"]}, "--lora-target-modules 'lm_head'"),
        ({"lora_exclude_modules": ["c_attn"]}, "--lora-exclude-modules 'c_attn'"),
        ({"lora_target_modules": ["q_proj"], "lora_exclude_modules": ["q_proj"]}, "no layer"),
    ):
        with pytest.raises(ModelError, match=named):
            layers(**changes)


def test_initial_values_follow_seed_and_flag(llama: Path) -> None:
    def factors(**changes: Any) -> torch.Tensor:
        torch.manual_seed(len(changes))  # the global generator does not matter
        layers = make_backend(lora_args(llama, **changes)).adapter.layers  # type: ignore[union-attr]
        return torch.cat([layer.lora_A.detach().flatten() for layer in layers.values()])

    kaiming, gaussian = factors(), factors(lora_init="gaussian")
    assert torch.equal(kaiming, factors(lora_init="kaiming")) and not torch.equal(
        kaiming, factors(seed=2)
    )
    assert gaussian.std() == pytest.approx(1 / 4, rel=0.1)
    assert 48**-0.5 < kaiming.abs().max() <= 32**-0.5


EXPERTS: dict[str, Any] = dict(lora_target_modules=["all-linear", "experts"], lora_sync="merged")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen3_moe(tmp_path_factory.mktemp("lora") / "moe")


def test_gradients_of_experts_are_those_of_merged_weights(moe: Path) -> None:
    """As for linear layers, expert by expert, in the fused tensors."""
    adapter = make_backend(lora_args(moe, **EXPERTS))
    randomize(adapter)
    whole = make_backend(make_args(moe))
    experts = adapter.adapter.experts  # type: ignore[union-attr]
    assert {name.rpartition(".")[2] for name in experts} == {"gate_up_proj", "down_proj"}
    with torch.no_grad():
        layers = {
            f"{name}.weight": layer for name, layer in adapter.adapter.layers.items()
        } | experts  # type: ignore[union-attr]
        for name, p in whole.scorer.hf.named_parameters():
            if (layer := layers.get(name)) is not None:
                base = adapter.scorer.hf.get_parameter(name)
                p.copy_(merged(base, layer.lora_A, layer.lora_B, layer.lora_scale))
    torch.testing.assert_close(log_probs(adapter), log_probs(whole), rtol=0, atol=1e-5)
    mine, theirs = (gradients(backend, whole_batch(make_samples())) for backend in (adapter, whole))
    for name, x in experts.items():
        d_w = theirs[name]
        assert d_w.abs().max() > 0
        expected = x.lora_scale * x.lora_B.mT @ d_w, x.lora_scale * d_w @ x.lora_A.mT
        for factor, values in zip("AB", expected, strict=True):
            torch.testing.assert_close(
                mine[f"{name}_lora.lora_{factor}"], values, rtol=1e-4, atol=1e-6
            )


def test_adapters_of_experts_train_are_switched_off_and_stored(moe: Path, tmp_path: Path) -> None:
    """The reference is the base bit for bit; exports name each expert; they are loaded again, and
    merged.
    """
    flags = EXPERTS | dict(lr=3e-3, use_kl_loss=True, kl_loss_coef=0.1)
    backend, base = make_backend(lora_args(moe, **flags)), log_probs(make_backend(make_args(moe)))
    assert torch.equal(log_probs(backend), base)
    train(backend)
    assert not torch.equal(log_probs(backend), base)
    assert torch.equal(log_probs(backend, "ref"), base)
    backend.save(tmp_path / "snapshot")
    backend.save_hf(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert set(config["target_modules"]) == {
        *("q_proj", "k_proj", "v_proj", "o_proj"), *("gate_proj", "up_proj", "down_proj")
    }  # fmt: skip
    again = make_backend(lora_args(moe, **flags, load=str(tmp_path / "adapter")))
    assert torch.equal(log_probs(again), log_probs(backend))
    merge_lora(tmp_path / "adapter", None, tmp_path / "merged")
    torch.testing.assert_close(
        log_probs(make_backend(make_args(tmp_path / "merged"))),
        log_probs(backend),
        rtol=0,
        atol=1e-5,
    )
    sent, stored = (
        dict(backend.named_weights()),
        dict(make_backend(make_args(tmp_path / "merged")).named_weights()),
    )
    assert backend.adapter_sync is not None and any(
        ".experts.0.up_proj" in x for x in backend.adapter_sync.changing
    )
    for name, weight in sent.items():
        torch.testing.assert_close(weight, stored[name], rtol=0, atol=1e-6)
    resumed = make_backend(lora_args(moe, **flags))
    resumed.load(tmp_path / "snapshot")
    train(resumed, seed=1)
    train(backend, seed=1)
    assert torch.equal(log_probs(resumed), log_probs(backend))


def test_what_adapters_of_experts_need(llama: Path, moe: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="routed experts"):
        make_backend(lora_args(llama, **EXPERTS))
    for pattern in ("experts", r"model\.layers\.0\..*"):
        with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp\.experts.*all layers"):
            make_backend(lora_args(moe, **EXPERTS, lora_exclude_modules=[pattern]))
    backend = make_backend(lora_args(moe, **EXPERTS))
    backend.save_hf(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("experts.1.up_proj.lora_A.weight"))
    tensors[name] = tensors[name] + 1
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"expert 1.*lora_A.*gate_proj.*up_proj"):
        make_backend(lora_args(moe, **EXPERTS, load=str(tmp_path / "adapter")))


def test_experts_have_no_adapters_unless_they_are_named(tmp_path: Path) -> None:
    backend = make_backend(lora_args(save_tiny_qwen3_moe(tmp_path / "moe")))
    assert {name.rpartition(".")[2] for name in backend.adapter.layers} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }  # type: ignore[union-attr]
    assert all("self_attn" in name for name in backend.adapter_sync.changing)
    with pytest.raises(ModelError, match="Fused experts"):
        make_backend(lora_args(tmp_path / "moe", lora_target_modules=["up_proj"]))


# --- snapshots and exports
# -------------------------------------------------------------------------


def stored_tensors(folder: Path) -> set[str]:
    from slime.backends.tensor_shards import StoredTensors

    return set(StoredTensors(folder / "dcp").shapes)


def test_snapshots_hold_the_adapter_and_resume_exactly(llama: Path, tmp_path: Path) -> None:
    flags = dict(lora_dropout=0.1, keep_old_actor=True)
    backend = make_backend(lora_args(llama, **flags))
    train(backend)
    backend.copy_weights("actor", "old_actor")
    train(backend, seed=1)
    backend.save(tmp_path / "snapshot")
    straight = train(backend, seed=2)
    again = make_backend(lora_args(llama, **flags))
    again.load(tmp_path / "snapshot")
    resumed = train(again, seed=2)
    same = [name for name in straight if not name.startswith("perf/")]
    assert {name: straight[name] for name in same} == {name: resumed[name] for name in same}
    left, right = weights_of(backend), weights_of(again)
    assert all(torch.equal(x, right[name]) for name, x in left.items())
    names = stored_tensors(tmp_path / "snapshot")
    assert all(".lora_" in name for name in names) and any(
        name.startswith("copy/old_actor/") for name in names
    )


def test_a_snapshot_needs_its_base_and_its_shape(llama: Path, tmp_path: Path) -> None:
    backend = make_backend(lora_args(llama))
    backend.save(tmp_path / "snapshot")
    other = save_tiny_llama(tmp_path / "other", seed=3)
    with pytest.raises(ValueError, match=f"adapter of the base {llama}, whose weights differ"):
        make_backend(lora_args(other)).load(tmp_path / "snapshot")
    with pytest.raises(ValueError, match=r"rank 4.*--lora-rank is 8"):
        make_backend(lora_args(llama, lora_rank=8)).load(tmp_path / "snapshot")
    with pytest.raises(ValueError, match="--use-rslora is True"):
        make_backend(lora_args(llama, use_rslora=True)).load(tmp_path / "snapshot")
    with pytest.raises(ValueError, match="add --lora-rank 4"):
        make_backend(make_args(llama)).load(tmp_path / "snapshot")
    part = lora_args(llama, lora_target_modules=["q_proj"])
    make_backend(part).save(tmp_path / "part")
    with pytest.raises(ValueError, match=r"q_proj.*down_proj"):
        make_backend(lora_args(llama)).load(tmp_path / "part")
    with pytest.raises(ValueError, match=r"down_proj.*q_proj"):
        make_backend(part).load(tmp_path / "snapshot")
    make_backend(lora_args(llama, lora_target_modules=[r".*\.q_proj"])).load(tmp_path / "part")
    whole = make_backend(make_args(llama))
    whole.save(tmp_path / "whole")
    with pytest.raises(ValueError, match="whole model"):
        make_backend(lora_args(llama)).load(tmp_path / "whole")


def test_exports_are_in_the_format_of_peft_and_can_be_loaded(tmp_path: Path) -> None:
    qwen = save_tiny_qwen3(tmp_path / "qwen")
    backend = make_backend(
        lora_args(qwen, lora_target_modules=["q_proj", "down_proj"], use_rslora=True)
    )
    randomize(backend)
    backend.save_hf(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["use_rslora"]) == (
        "LORA",
        4,
        8.0,
        True,
    )
    assert config["target_modules"] == ["down_proj", "q_proj"] and config[
        "base_model_name_or_path"
    ] == str(qwen)
    from safetensors.torch import load_file

    tensors = load_file(str(tmp_path / "adapter" / "adapter_model.safetensors"))
    assert tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"].shape == (
        4,
        32,
    )
    assert tensors["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"].shape == (32, 4)
    assert len(tensors) == 8
    flags = dict(
        lora_target_modules=["q_proj", "down_proj"], use_rslora=True, load=str(tmp_path / "adapter")
    )
    again = make_backend(lora_args(qwen, **flags, use_kl_loss=True))
    assert torch.equal(log_probs(again), log_probs(backend))
    assert torch.equal(log_probs(again, "ref"), log_probs(make_backend(make_args(qwen))))
    with pytest.raises(ModelError, match="do not select, or lacks some"):
        make_backend(lora_args(qwen, load=str(tmp_path / "adapter"), use_rslora=True))
    with pytest.raises(ModelError, match="does not fit the model"):
        make_backend(lora_args(qwen, **flags | dict(lora_rank=8)))


def test_merge_lora_writes_the_merged_model(llama: Path, tmp_path: Path) -> None:
    backend = make_backend(lora_args(llama, lora_export="peft"))
    randomize(backend)
    backend.save_hf(tmp_path / "adapter")
    backend.save(tmp_path / "iter_0000001" / "actor")
    merge_lora(tmp_path / "adapter", None, tmp_path / "merged")
    merge_lora(tmp_path / "iter_0000001", str(llama), tmp_path / "of_snapshot")
    expected = log_probs(backend)
    for name in ("merged", "of_snapshot"):
        torch.testing.assert_close(
            log_probs(make_backend(make_args(tmp_path / name))), expected, rtol=0, atol=2e-5
        )
    with pytest.raises(CommandError, match="exists already"):
        merge_lora(tmp_path / "adapter", None, tmp_path / "merged")
    with pytest.raises(CommandError, match="adapter"):
        merge_lora(llama, None, tmp_path / "x")
    other = save_tiny_qwen3(tmp_path / "other", hidden_size=48)
    with pytest.raises(CommandError, match="base"):
        merge_lora(tmp_path / "adapter", str(other), tmp_path / "x")


@pytest.mark.parametrize("rslora", [False, True])
def test_peft_reads_and_writes_the_same_adapters(llama: Path, tmp_path: Path, rslora: bool) -> None:
    """Where PEFT is installed, which slime does not need: an export in PEFT, and an adapter of PEFT
    in slime.
    """
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    flags = dict(lora_target_modules=["q_proj", "mlp.up_proj"], use_rslora=rslora)
    backend = make_backend(lora_args(llama, **flags))
    randomize(backend)
    backend.save_hf(tmp_path / "ours")
    ids = torch.tensor([[3, 5, 8, 13, 21, 34]])
    base = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    merge_lora(tmp_path / "ours", None, tmp_path / "merged")
    merged_here = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, merged_here(ids).logits, rtol=0, atol=1e-4)
    theirs.save_pretrained(tmp_path / "theirs")
    again = make_backend(lora_args(llama, **flags, load=str(tmp_path / "theirs")))
    assert torch.equal(log_probs(again), log_probs(backend))
