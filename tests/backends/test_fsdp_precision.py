"""Options of the FSDP trainer for precision and memory, each compared with the plain path on the
CPU.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_helpers import (
    make_args,
    make_backend,
    make_samples,
    save_tiny_llama,
    weights_of,
    whole_batch,
)
from torch import nn

from slime.backends.fsdp.low_precision import use_float8
from slime.backends.fsdp.model import checkpoint_offloaded
from slime.backends.fsdp.optimizer import first_state, plain_tensors
from slime.backends.shared import NonFiniteError
from slime.backends.train_loop import train_on_rollout
from slime.models.loading import ModelError


@pytest.fixture
def torchao() -> None:
    pytest.importorskip("torchao", reason="pip install 'slime-rl[torchao]'")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough for moments of 8 bits: rows of 128 and 192 values, 4,096 of them or more in each
    matrix.
    """
    return save_tiny_llama(
        tmp_path_factory.mktemp("tiny"),
        hidden_size=128,
        intermediate_size=192,
        initializer_range=0.05,
    )


def train(backend: Any, seed: int) -> dict[str, float]:
    metrics, _ = train_on_rollout(backend, whole_batch(make_samples(seed=seed)))
    return {k: v for k, v in metrics.items() if not k.startswith("perf/")}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Of two sets of weights, relative to the change that training made."""
    return float(sum((a[name].float() - b[name].float()).square().sum() for name in a)) ** 0.5


def test_moments_of_8_bits_follow_those_of_32(llama: Path, torchao: None) -> None:
    plain, small = (
        make_backend(make_args(llama)),
        make_backend(make_args(llama, optimizer_8bit=True)),
    )
    start = {name: tensor.clone() for name, tensor in weights_of(plain).items()}
    for seed in range(3):
        want, got = train(plain, seed), train(small, seed)
        assert got["train/grad_norm"] == pytest.approx(want["train/grad_norm"], rel=0.05)
    moved = distance(weights_of(plain), start)
    assert distance(weights_of(plain), weights_of(small)) < 0.25 * moved
    entries = small.optimizer.tensors()
    matrices = [name for name, p in small.named_parameters if p.dim() == 2]
    assert all(entries[f"exp_avg.codes/{name}"].dtype == torch.uint8 for name in matrices)
    large = sum(t.numel() * t.element_size() for t in plain.optimizer.tensors().values())
    assert sum(t.numel() * t.element_size() for t in entries.values()) < 0.3 * large


def test_weights_in_bfloat16_move_by_updates_below_half_a_step(llama: Path, torchao: None) -> None:
    """With a rate of 1e-5 an update is far less than half a step of most weights (2**-9 of 0.05):
    rounded to the nearest, they would not move. Rounded stochastically, the sum of many moves is
    that of the updates."""
    flags = dict(lr=1e-5, train_dtype="bfloat16", weight_decay=0.0, clip_grad=0.0)
    plain, small = (
        make_backend(make_args(llama, **flags)),
        make_backend(make_args(llama, bf16_master_weights=True, **flags)),
    )
    assert {p.dtype for _, p in small.named_parameters} == {torch.bfloat16}
    name = "model.layers.0.mlp.down_proj.weight"
    start = weights_of(small)[name].float().clone()
    before = dict(plain.named_parameters)[name].detach().clone()
    for backend in (plain, small):
        generator = torch.Generator().manual_seed(1)
        for _ in range(8):
            for _, p in backend.named_parameters:
                # mostly one direction
                sign = torch.rand(p.shape, generator=generator).sub(0.25).sign()
                p.grad = sign.to(p.dtype)
            backend.optimizer.step(backend.optimizer.grad_norm())
    want = (dict(plain.named_parameters)[name].detach() - before).mean()
    got = (weights_of(small)[name].float() - start).mean()
    assert want < 0 and got == pytest.approx(float(want), rel=0.1)
    assert (weights_of(small)[name].float() != start).float().mean() < 0.5, (
        "each step moves few weights, by a whole step"
    )
    assert {t.dtype for n, t in small.optimizer.tensors().items() if n.startswith("exp_avg")} == {
        torch.float32
    }


@pytest.mark.parametrize(
    "flags", [{"optimizer_8bit": True}, {"bf16_master_weights": True, "train_dtype": "bfloat16"}]
)
def test_resume_is_exact_to_the_bit(
    flags: dict[str, Any], llama: Path, tmp_path: Path, torchao: None
) -> None:
    first = make_backend(make_args(llama, **flags))
    for seed in range(2):
        train(first, seed)
    first.save(tmp_path / "state")
    straight = [train(first, seed) for seed in (2, 3)]
    second = make_backend(make_args(llama, **flags))
    second.load(tmp_path / "state")
    assert [train(second, seed) for seed in (2, 3)] == straight
    assert all(torch.equal(t, weights_of(second)[name]) for name, t in weights_of(first).items())
    entries = second.optimizer.tensors()
    assert all(torch.equal(t, entries[name]) for name, t in first.optimizer.tensors().items())


def test_moments_are_zero_after_a_reset(llama: Path, torchao: None) -> None:
    backend = make_backend(make_args(llama, optimizer_8bit=True))
    train(backend, 0)
    backend.reset_optimizer()
    state = next(iter(backend.optimizer.adam.state.values()))
    assert state["exp_avg"].dequantize().abs().max() == 0 and float(state["step"]) == 0


@pytest.mark.parametrize(
    ("shape", "block"),
    [((64, 512), 256), ((64, 384), 128), ((64, 576), 64), ((64, 100), None), ((4, 256), None), ((8192,), None),
     ((8, 32, 384), 128), ((8, 32, 100), None)],
)  # fmt: skip
def test_blocks_divide_the_rows_of_matrices(
    shape: tuple[int, ...], block: int | None, torchao: None
) -> None:
    parameter = nn.Parameter(torch.zeros(shape))
    tensors = plain_tensors(parameter, first_state(parameter, True))
    if block is None:
        assert tensors["exp_avg"].dtype == torch.float32
    else:
        assert tensors["exp_avg.scale"].shape == (shape[0], parameter[0].numel() // block)


# --- float8
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_gradients_of_float8_layers_are_near_the_plain_ones(recipe: str, torchao: None) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(32, 64, bias=False), nn.SiLU(), nn.Linear(64, 32)).bfloat16()
    plain = nn.Sequential(nn.Linear(32, 64, bias=False), nn.SiLU(), nn.Linear(64, 32)).bfloat16()
    plain.load_state_dict(layer.state_dict())
    assert use_float8([layer], recipe, emulate=True) == 2
    assert all(
        p is q
        for p, q in zip(layer.parameters(), dict(layer.named_parameters()).values(), strict=True)
    )
    assert [name for name, _ in layer.named_parameters()] == [
        name for name, _ in plain.named_parameters()
    ]
    x = torch.randn(16, 32).bfloat16()
    results = []
    for model in (layer, plain):
        out = model(x)
        out.float().square().mean().backward()
        results.append([out.detach(), *(p.grad for p in model.parameters())])
    for got, want in zip(*results, strict=True):
        error = float((got.float() - want.float()).norm() / want.float().norm())
        assert error < 0.1
    assert not torch.equal(results[0][0], results[1][0]), "the products were computed with 8 bits"


def test_layers_of_other_sizes_stay_as_they_are(torchao: None) -> None:
    layer = nn.Sequential(nn.Linear(20, 64), nn.Linear(64, 32))
    assert use_float8([layer], "tensorwise", emulate=True) == 1
    assert type(layer[0]) is nn.Linear
    with pytest.raises(ModelError, match="multiples of 16"):
        use_float8([nn.Sequential(nn.Linear(20, 20))], "tensorwise", emulate=True)


# --- activations in CPU memory
# ---------------------------------------------------------------------


def test_offloaded_activations_change_nothing(llama: Path) -> None:
    flags = dict(gradient_checkpointing=True, entropy_coef=0.01)
    plain, moved = (
        make_backend(make_args(llama, **flags)),
        make_backend(make_args(llama, offload_activations=True, **flags)),
    )
    for seed in range(2):
        assert train(moved, seed) == train(plain, seed)
    assert all(torch.equal(t, weights_of(moved)[name]) for name, t in weights_of(plain).items())


def test_the_input_of_a_layer_is_not_kept() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    runs = []

    def layer(x: torch.Tensor, scale: float) -> torch.Tensor:
        runs.append(weakref.ref(x))
        return (x @ weight).sin() * scale

    first = torch.randn(3, 4, requires_grad=True)
    hidden = first * 2
    out = checkpoint_offloaded(layer, hidden, 0.5)
    del hidden
    assert runs[0]() is None, "the graph, or the closure, holds the input"
    out.sum().backward()
    assert len(runs) == 2
    want_first, want_weight = torch.autograd.grad(
        (((first * 2) @ weight).sin() * 0.5).sum(), [first, weight]
    )
    assert torch.equal(first.grad, want_first) and torch.equal(weight.grad, want_weight)  # type: ignore[arg-type]
    with torch.no_grad():
        checkpoint_offloaded(layer, first, 0.5)
    assert len(runs) == 3, "a log-prob pass runs each layer once"


# --- master weights in CPU memory
# ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "keep"),
    [
        ("float32", False),
        ("bfloat16", True),
        pytest.param("float32", True, marks=pytest.mark.long),
        pytest.param("bfloat16", False, marks=pytest.mark.long),
    ],
)
def test_offloaded_masters_train_as_those_on_the_device(
    dtype: str, keep: bool, llama: Path, tmp_path: Path
) -> None:
    """Here both are in CPU memory; what is tested is that passes compute with copies of the current
    weights, and that all gradients reach the masters (test_fsdp_cuda.py: on a GPU)."""
    flags = dict(
        train_dtype=dtype, fsdp_reshard_after_forward=not keep, use_kl_loss=True, kl_loss_coef=0.1
    )
    plain = make_backend(make_args(llama, **flags))
    moved = make_backend(make_args(llama, fsdp_cpu_offload=True, **flags))
    assert moved.cast is not None
    for seed in range(3):
        assert train(moved, seed) == train(plain, seed)
    assert all(torch.equal(t, weights_of(moved)[name]) for name, t in weights_of(plain).items())
    for group in [*moved.cast.layers, moved.cast.rest]:
        assert all(copy.untyped_storage().nbytes() == 0 for copy in group.copies), (
            "a pass leaves nothing on the device"
        )
    moved.save(tmp_path / "state")
    again = make_backend(make_args(llama, fsdp_cpu_offload=True, **flags))
    again.load(tmp_path / "state")
    assert train(again, 3) == train(moved, 3)


# --- float16
# ---------------------------------------------------------------------------------------


def test_float16_follows_float32(llama: Path) -> None:
    plain, half = (
        make_backend(make_args(llama)),
        make_backend(make_args(llama, train_dtype="float16")),
    )
    assert {p.dtype for _, p in half.named_parameters} == {torch.float32}
    for seed in range(2):
        want, got = train(plain, seed), train(half, seed)
        assert got["train/grad_norm"] == pytest.approx(want["train/grad_norm"], rel=0.02)
        assert got["train/loss"] == pytest.approx(want["train/loss"], rel=0.02, abs=1e-3)
    assert got["train/loss_scale"] == 65536.0 and got["train/skipped_step"] == 0.0
    assert {t.dtype for _, t in half.named_weights()} == {torch.float16}


def test_without_a_scale_small_gradients_are_lost(llama: Path) -> None:
    """A loss that is 1e-5 times as large has gradients that float16 cannot hold."""
    norms = []
    for flags in (
        {"train_dtype": "float32"},
        {"train_dtype": "float16"},
        {"train_dtype": "float16", "loss_scale": 1.0},
    ):
        backend = make_backend(make_args(llama, **flags))
        shrink(backend, 1e-5)
        norms.append(train(backend, 0)["train/grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=0.05)
    assert norms[2] != pytest.approx(norms[0], rel=0.05)


def shrink(backend: Any, factor: float) -> None:
    plain = backend.share_of_loss

    def smaller(*given: Any) -> Any:
        loss, metrics = plain(*given)
        return loss * factor, metrics

    backend.share_of_loss = smaller


def test_a_step_that_overflows_is_left_out(llama: Path, tmp_path: Path) -> None:
    flags = dict(train_dtype="float16", initial_loss_scale=2.0**30, loss_scale_window=2)
    backend = make_backend(make_args(llama, **flags))
    before = {name: p.detach().clone() for name, p in backend.named_parameters}
    metrics = train(backend, 0)
    assert metrics["train/skipped_step"] == 1.0 and metrics["train/loss_scale"] == 2.0**29
    assert "train/grad_norm" not in metrics and backend.optimizer.steps == 0
    assert all(torch.equal(p, before[name]) for name, p in backend.named_parameters)
    count = 1
    while train(backend, 0)["train/skipped_step"]:
        count += 1
        assert count < 25
    assert backend.optimizer.steps == 1 and backend.optimizer.loss_scale.passed == 1
    backend.save(tmp_path / "state")
    again = make_backend(make_args(llama, **flags))
    again.load(tmp_path / "state")
    want = train(backend, 1)
    assert train(again, 1) == want
    assert want["train/loss_scale"] == 2.0 ** (30 - count + 1), "doubled after two good steps"


def test_a_constant_scale_is_that_of_the_flag_after_a_resume(llama: Path, tmp_path: Path) -> None:
    make_backend(make_args(llama, train_dtype="float16")).save(tmp_path / "state")
    again = make_backend(make_args(llama, train_dtype="float16", loss_scale=128.0))
    again.load(tmp_path / "state")
    assert train(again, 0)["train/loss_scale"] == 128.0


def test_an_overflow_at_the_smallest_scale_is_an_error(llama: Path) -> None:
    flags = dict(train_dtype="float16", initial_loss_scale=2.0**30, min_loss_scale=2.0**30)
    with pytest.raises(NonFiniteError, match="gradient norm"):
        train(make_backend(make_args(llama, **flags)), 0)
