"""Muon against a plain reference in float64, on one rank and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_helpers import make_args, make_backend, make_samples, save_tiny_llama, save_tiny_qwen3_moe
from fsdp_ranks import train
from muon_ranks import FLAGS, MATRICES, RANKS, reference, stepped, trained, worker
from quick_processes import start_ranks
from torch import nn

from slime.backends.lr_schedule import LrSchedule
from slime.engines.process import free_port
from slime.plugins.muon.optimizer import ScheduledMuon, newton_schulz, row_counts


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], rel: float) -> None:
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        difference = (tensor.double() - want[name].double()).norm() / want[name].double().norm()
        assert difference < rel, (name, float(difference))


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"muon_use_nesterov": False, "muon_momentum": 0.8},
        {"muon_num_ns_steps": 2, "muon_extra_scale_factor": 1.0},
        {"muon_scale_mode": "shape_scaling"},
        {"muon_scale_mode": "unit_rms_norm"},
    ],
)
def test_the_steps_are_those_of_the_reference(flags: dict[str, Any]) -> None:
    assert_close(stepped(3, **flags), reference(3, **flags), 1e-5)
    if flags:  # each of them does something
        usual = stepped(3)
        assert all((tensor - usual[n]).norm() > 1e-3 for n, tensor in stepped(3, **flags).items()
                   if n in MATRICES and n != "layers.0.mlp.experts.up"), flags  # fmt: skip


def test_singular_values_are_near_one() -> None:
    x = newton_schulz(torch.randn(2, 40, 30, generator=torch.Generator().manual_seed(0)), 5)
    values = torch.linalg.svdvals(x)
    assert values.min() > 0.6 and values.max() < 1.25


def test_rows_are_divided_as_fsdp_does() -> None:
    for rows in range(12):
        chunks = [len(part) for part in torch.arange(rows).chunk(4)] if rows else []
        assert row_counts(rows, 4) == [*chunks, *[0] * (4 - len(chunks))]


def test_without_a_matrix_it_says_what_to_use() -> None:
    args = make_args("model", **FLAGS)
    named = [("norm.weight", nn.Parameter(torch.ones(3)))]
    with pytest.raises(ValueError, match="use --optimizer adam"):
        ScheduledMuon(named, args, LrSchedule.from_args(args, "actor"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("muon")
    return {
        "llama": save_tiny_llama(root / "llama"),
        "experts": save_tiny_qwen3_moe(root / "experts"),
    }


def test_the_moments_of_a_new_rollout_begin_anew(models: dict[str, Path]) -> None:
    backend = make_backend(make_args(models["llama"], **FLAGS))
    train(backend, make_samples())
    moved = backend.optimizer.tensors()
    assert any(n.startswith("momentum_buffer/") and t.abs().sum() > 0 for n, t in moved.items())
    backend.reset_optimizer()
    assert not any(tensor.abs().sum() for tensor in backend.optimizer.tensors().values())


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_train_as_one_does(models: dict[str, Path], tmp_path: Path) -> None:
    """And a snapshot of two is read exactly by two, and by one."""
    context = start_ranks(worker, (models, free_port(), tmp_path), RANKS)
    try:
        while not context.join(timeout=200):
            pass
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(RANKS)]
    assert_close(ranks[0]["steps"], reference(3), 1e-5)
    alone = trained(models, 0, 1, free_port(), tmp_path / "alone")
    for name in models:
        for rank in ranks:
            both, one = rank[name], alone[name]
            assert_close(both["weights"], one["weights"], 1e-4)
            assert both["losses"][1]["train/grad_norm"] == pytest.approx(
                one["losses"][1]["train/grad_norm"], rel=1e-4
            )
            for result in (both, one):
                assert result["again"] == {
                    key: value for key, value in result["losses"][1].items()
                } | {key: result["again"][key] for key in result["again"] if "perf/" in key}
                for key, tensor in result["weights"].items():
                    assert torch.equal(tensor, result["weights_again"][key]), key
        backend = make_backend(make_args(models[name], **FLAGS))
        backend.load(tmp_path / "saved" / name)
        train(backend, make_samples(seed=3))
        got = {n: t.clone() for n, t in backend.named_weights()}
        assert_close(got, alone[name]["weights"], 1e-4)
        expert = "experts" if name == "experts" else "q_proj"
        assert any(expert in key and key.startswith("momentum_buffer/") for key in one["state"])
