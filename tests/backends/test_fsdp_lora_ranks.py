"""Two ranks train an adapter as one does: shards, replicas, context parallelism, recomputation,
bfloat16, a critic.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lora_ranks import FLAGS, MODELS, worker
from rank_processes import results_of_ranks, save_models
from safetensors.torch import load_file

from slime.engines.process import free_port

pytestmark = [pytest.mark.real, pytest.mark.slow]
Results = dict[tuple[str, int], dict[str, Any]]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def results(paths: dict[str, Path]) -> Results:
    ports = {world_size: free_port() for world_size in (2, 1)}
    return results_of_ranks(worker, (paths, ports), paths["output"], 400.0)[0]


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], rtol: float) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert (got[name] - want[name]).norm() <= rtol * want[name].norm() + 1e-6, name


@pytest.mark.parametrize("layout", [name for name in FLAGS if name != "bfloat16"])
def test_two_ranks_train_as_one(results: Results, layout: str) -> None:
    many, one = results[layout, 2], results[layout, 1]
    for got, want in zip(many["metrics"], one["metrics"], strict=True):
        assert got.keys() == want.keys()
        for name, value in want.items():
            if not name.startswith("perf/"):
                assert got[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert_close(many["trained"], one["trained"], rtol=1e-3)
    if layout != "critic":
        assert_close(many["weights"], one["weights"], rtol=1e-3)


@pytest.mark.parametrize("layout", ["plain", "bfloat16"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_reference_is_a_separate_base_bit_for_bit(
    results: Results, layout: str, ranks: int
) -> None:
    found = results[layout, ranks]
    assert len(found["ref"]) and all(map(torch.equal, found["ref"], found["separate"]))


def test_bfloat16_keeps_its_base_in_bfloat16_and_trains_alike(results: Results) -> None:
    many, one = results["bfloat16", 2], results["bfloat16", 1]
    assert many["dtypes"] == one["dtypes"] == {"torch.bfloat16"}
    for got, want in zip(many["metrics"], one["metrics"], strict=True):
        assert got["train/grad_norm"] == pytest.approx(want["train/grad_norm"], rel=0.05)


def test_the_identity_of_the_base_does_not_depend_on_the_layout(results: Results) -> None:
    found = [
        result["identity"]
        for (layout, _), result in results.items()
        if layout not in ("critic", *MODELS)
    ]
    assert len({identity["bfloat16"] for identity in found}) == 1
    assert len({identity["float32"] for identity in found if "float32" in identity}) == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_resume_is_exact(results: Results, ranks: int) -> None:
    straight, resumed = results["plain", ranks]["next"], results["plain", ranks]["resumed"]
    assert {k: v for k, v in straight.items() if "perf/" not in k} == {
        k: v for k, v in resumed.items() if "perf/" not in k
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_factors_can_be_sent_without_gathering_the_base(results: Results, ranks: int) -> None:
    found = results["plain", ranks]
    assert found["asked"] == [True, False]
    assert list(found["alone"]) == [name for name in found["sent"] if ".lora_" in name] != []
    assert len(found["sent"]) > len(found["alone"])
    assert all(torch.equal(tensor, found["sent"][name]) for name, tensor in found["alone"].items())


def test_exports_hold_the_whole_factors(results: Results, paths: dict[str, Path]) -> None:
    for layout in ("plain", "replicas"):
        stored = load_file(str(paths["output"] / f"{layout}_2" / "adapter_model.safetensors"))
        trained = results[layout, 2]["trained"]
        assert len(stored) == len(trained)
        for name, tensor in trained.items():
            assert torch.equal(stored[f"base_model.model.{name}.weight"], tensor), name


def test_exports_hold_the_factors_of_each_expert(results: Results, paths: dict[str, Path]) -> None:
    stored = load_file(str(paths["output"] / "experts_2" / "adapter_model.safetensors"))
    for name, tensor in results["experts", 2]["trained"].items():
        module, _, fused = name.removesuffix("_lora.lora_B").rpartition(".")
        if fused == "gate_up_proj":
            parts = [
                [
                    stored[f"base_model.model.{module}.{e}.{x}_proj.lora_B.weight"]
                    for x in ("gate", "up")
                ]
                for e in range(4)
            ]
            assert torch.equal(torch.stack([torch.cat(both) for both in parts]), tensor)
            return
    raise AssertionError("no factors of experts were trained")
