"""An adapter whose base is in 8 or 4 bits: the same as on a base with the rounded weights, in fewer
bytes.

These tests need torchao, an extra: ``bash scripts/test_torchao.sh
tests/backends/test_fsdp_quantized_base.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_helpers import LORA, make_args, make_backend, make_samples, save_tiny_llama, whole_batch
from safetensors.torch import load_file
from torch import nn

from slime.backends.fsdp.backend import FsdpBackend
from slime.backends.fsdp.hf_weights import iter_hf_weights
from slime.backends.fsdp.low_precision import quantize_base, quantized_layers
from slime.backends.train_loop import train_on_rollout
from slime.models.loading import ModelError
from slime.models.lora import merged
from slime.plugins.tools.commands.merge_lora import merge_lora

torchao = pytest.importorskip("torchao", reason="pip install 'slime-rl[torchao]'")
FORMS = ("int8", "nf4")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With biases; rows of 64 and 96 weights."""
    return save_tiny_llama(
        tmp_path_factory.mktemp("base"), hidden_size=64, intermediate_size=96, attention_bias=True
    )


def quantized(folder: Path, form: str | None, **changes: Any) -> FsdpBackend:
    flags = dict(lora_target_modules=["q_proj", "k_proj", "down_proj"], lora_sync="adapter")
    return make_backend(
        make_args(folder, **(LORA | flags | {"lora_base_quantization": form} | changes))
    )


def randomize(backend: FsdpBackend) -> None:
    generator = torch.Generator().manual_seed(5)
    assert backend.adapter is not None
    for _, p in backend.adapter.trained:
        p.data = torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.1


def base_of(backend: FsdpBackend) -> dict[str, torch.Tensor]:
    return {
        name: x.clone()
        for name, x in iter_hf_weights(backend.scorer.hf, torch.float32, merge=False)
    }  # type: ignore[arg-type]


def train(backend: FsdpBackend, seed: int = 0) -> dict[str, float]:
    metrics = train_on_rollout(backend, whole_batch(make_samples(seed=seed)))[0]
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def rounded_twin(backend: FsdpBackend, folder: Path, **changes: Any) -> FsdpBackend:
    """The same adapter on a plain base that has the rounded weights."""
    twin, weights = quantized(folder, None, **changes), base_of(backend)
    with torch.no_grad():
        for name, p in twin.scorer.hf.named_parameters():  # type: ignore[union-attr]
            if name in weights:
                p.copy_(weights[name])
    for (_, mine), (_, theirs) in zip(twin.adapter.trained, backend.adapter.trained, strict=True):  # type: ignore[union-attr]
        mine.data = theirs.detach().clone()
    return twin


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "changes", [{}, {"gradient_checkpointing": True}, {"train_dtype": "bfloat16"}]
)
def test_log_probs_and_gradients_are_those_of_the_rounded_base(
    llama: Path, form: str, changes: dict[str, Any]
) -> None:
    backend = quantized(llama, form, **changes)
    randomize(backend)
    twin = rounded_twin(backend, llama, **changes)
    near: dict[str, Any] = (
        dict(rtol=2e-2, atol=1e-3) if "train_dtype" in changes else dict(rtol=1e-4, atol=1e-6)
    )
    batch = whole_batch(make_samples())
    for tag in ("actor", "ref"):
        mine, theirs = (x.log_probs(batch, tag)["log_probs"] for x in (backend, twin))  # type: ignore[arg-type]
        assert all(map(torch.equal, mine, theirs)), tag
    for one in (backend, twin):
        one.optimizer.step = lambda norm: 0.0  # type: ignore[method-assign]
    want, got = train(twin), train(backend)
    assert got["train/grad_norm"] == pytest.approx(want["train/grad_norm"], rel=near["rtol"])
    gradients = [[p.grad for _, p in x.adapter.trained] for x in (backend, twin)]  # type: ignore[union-attr]
    for one, two in zip(*gradients, strict=True):
        assert one is not None and two is not None
        torch.testing.assert_close(one, two, **near)
    assert any(float(x.abs().max()) > 1e-4 for x in gradients[0] if x is not None)


@pytest.mark.parametrize(("form", "share", "near"), [("int8", 0.29, 0.01), ("nf4", 0.15, 0.12)])
def test_codes_take_a_fraction_of_the_bytes(
    llama: Path, form: str, share: float, near: float
) -> None:
    """Of float32, with the scales. The rounded weights are near the weights, and all other weights
    are the same.
    """
    backend, plain = quantized(llama, form), base_of(quantized(llama, None))
    layers = quantized_layers(backend.scorer.hf)  # type: ignore[arg-type]
    assert len(layers) == 2 * 7  # also those without an adapter
    weights = base_of(backend)
    assert weights.keys() == plain.keys()
    for name, weight in plain.items():
        layer = layers.get(name.removesuffix(".weight"))
        if layer is None or name.endswith(".bias"):
            assert torch.equal(weights[name], weight)
            continue
        assert 0 < (weights[name] - weight).norm() < near * weight.norm()
        held = [x for key, x in layer.named_buffers(recurse=False) if key.startswith("weight_")]
        assert sum(x.nbytes for x in held) < share * weight.nbytes
        assert not any(p.shape == weight.shape for p in layer.parameters(recurse=False)), (
            "the weight is not kept"
        )
    assert sum(p.numel() for _, p in backend.adapter.base) < 0.2 * sum(
        x.numel() for x in plain.values()
    )  # type: ignore[union-attr]


@pytest.mark.parametrize("form", FORMS)
def test_nothing_of_the_weights_is_kept_for_the_backward_pass(llama: Path, form: str) -> None:
    backend = quantized(llama, form)
    layer = next(iter(quantized_layers(backend.scorer.hf).values()))  # type: ignore[arg-type]
    kept: list[torch.Tensor] = []
    x = torch.randn(5, layer.in_features, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        out = layer.plain(x)
    assert not any(t.shape[-2:] == (layer.out_features, layer.in_features) for t in kept)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient, torch.ones_like(out) @ layer.rounded(torch.float32))


@pytest.mark.parametrize("form", FORMS)
def test_a_sync_sends_the_rounded_base_once_and_then_the_adapter(llama: Path, form: str) -> None:
    backend, plain = quantized(llama, form), quantized(llama, None)
    sent = dict(backend.named_weights())
    assert sent.keys() == dict(plain.named_weights()).keys()
    assert all(torch.equal(sent[name], x) for name, x in base_of(backend).items())
    assert backend.adapter_sync == plain.adapter_sync and backend.adapter_sync is not None
    assert all(".lora_" in name for name in backend.adapter_sync.changing)


@pytest.mark.parametrize("form", FORMS)
def test_resume_is_exact_and_needs_the_same_base(llama: Path, form: str, tmp_path: Path) -> None:
    backend = quantized(llama, form)
    train(backend, 0)
    backend.save(tmp_path / "iter_0000001" / "actor")
    backend.save_hf(tmp_path / "export")
    expected = train(backend, 1)
    again = quantized(llama, form)
    again.load(tmp_path / "iter_0000001" / "actor")
    assert train(again, 1) == expected
    for (name, mine), (_, theirs) in zip(
        again.adapter.trained, backend.adapter.trained, strict=True
    ):  # type: ignore[union-attr]
        assert torch.equal(mine, theirs), name
    other = FORMS[1 - FORMS.index(form)]
    cases = (
        (other, f"base that is in {form}, but here it is in {other}"),
        (None, "but here it is not quantized"),
    )
    for wrong, said in cases:
        with pytest.raises(ValueError, match=said):
            quantized(llama, wrong).load(tmp_path / "iter_0000001" / "actor")
    # The base of a merged model is the checkpoint and not its rounded weights.
    merge_lora(tmp_path / "export", None, tmp_path / "merged")
    merge_lora(tmp_path / "iter_0000001", None, tmp_path / "of_snapshot")
    source, first, second = (
        load_file(str(folder / "model.safetensors"))
        for folder in (llama, tmp_path / "merged", tmp_path / "of_snapshot")
    )
    name = "model.layers.1.mlp.down_proj"
    factors = load_file(str(tmp_path / "export" / "adapter_model.safetensors"))
    a, b = (factors[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
    torch.testing.assert_close(first[f"{name}.weight"], merged(source[f"{name}.weight"], a, b, 2.0))
    assert all(torch.equal(x, second[key]) for key, x in first.items())


def test_the_identity_of_the_base_follows_from_its_codes(llama: Path, tmp_path: Path) -> None:
    other = save_tiny_llama(
        tmp_path, seed=1, hidden_size=64, intermediate_size=96, attention_bias=True
    )
    found = [
        quantized(folder, form).adapter.identity()
        for folder in (llama, other)
        for form in (*FORMS, None)
    ]  # type: ignore[union-attr]
    assert len({str(identity) for identity in found}) == 6
    assert quantized(llama, "nf4").adapter.identity() == found[1]  # type: ignore[union-attr]


def test_layers_whose_blocks_are_not_full_stay_as_they_are() -> None:
    layer = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    assert quantize_base([layer], "nf4", torch.device("cpu")) == 1
    assert type(layer[1]) is nn.Linear and layer[0](torch.ones(2, 8)).isfinite().all()
    with pytest.raises(ModelError, match="64 weights"):
        quantize_base([nn.Linear(8, 3)], "nf4", torch.device("cpu"))
    assert quantize_base([nn.Linear(8, 3)], "int8", torch.device("cpu")) == 1
