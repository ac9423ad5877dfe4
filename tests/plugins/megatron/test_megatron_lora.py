"""LoRA on Megatron's layers against FSDP on one rank: gradients of the factors, the reference,
snapshots and files.

One launch of four processes runs every layout (``megatron_lora_ranks.py``); the tests below look at
its results.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fsdp_helpers import make_args, make_backend
from launch import run_ranks
from megatron_lora_ranks import KEPT, LATER, OF_EXPERTS, PLAN, adapter_key, arguments, results_of
from megatron_ranks import Layout, rank_batch
from safetensors.torch import load_file
from tiny_families import CONFIGS, save_family

from slime.backends.fsdp.backend import FsdpBackend
from slime.backends.tensor_shards import StoredTensors, TensorShard
from slime.models.lora import LoraSettings
from slime.models.peft_files import Factors, factor_names, write_adapter
from slime.models.shards import ModelError
from slime.plugins.megatron.core import MegatronError
from slime.plugins.megatron.maps.family import family_of
from slime.plugins.tools.commands.merge_lora import merge_lora

pytestmark = [pytest.mark.megatron, pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models, and for each set of flags an adapter with random factors that ``--load``
    reads.
    """
    folder = tmp_path_factory.mktemp("megatron_lora")
    found: dict[str, Path] = {
        name: save_family(name, folder / name) for name in sorted({x.model for x in PLAN})
    }
    found["llama_reference"] = save_family("llama", folder / "llama_reference", seed=1)
    (folder / "output").mkdir()
    found["output"] = folder / "output"
    for number, layout in enumerate(PLAN):
        key = adapter_key(layout)
        if key not in found and layout.role == "actor":
            found[key] = folder / f"adapter_{number}"
            _random_adapter(layout, found, found[key])
    return found


def _random_adapter(layout: Layout, paths: dict[str, Path], folder: Path) -> None:
    args = make_args(paths[layout.model], **layout.flags)
    adapter = make_backend(args).adapter
    assert adapter is not None
    generator = torch.Generator().manual_seed(5)
    random = {
        name: Factors(*(torch.randn(x.shape, generator=generator) * 0.1 for x in factors))
        for name, factors in adapter.factors().items()
    }
    for name in [name for name in random if ".experts." in name and name.endswith(".up_proj")]:
        # one for both
        random[name] = Factors(
            random[name.replace(".up_proj", ".gate_proj")].a.clone(), random[name].b
        )
    write_adapter(folder, adapter.config(adapter.targets()), random)


@pytest.fixture(scope="module")
def ranks(paths: dict[str, Path]) -> list[Results]:
    """By rank: results by layout."""
    run_ranks("megatron_lora_ranks:worker", 4, paths)
    return [torch.load(paths["output"] / f"rank{rank}.pt", weights_only=False) for rank in range(4)]


@pytest.fixture(scope="module")
def expected(paths: dict[str, Path], ranks: list[Results]) -> dict[Any, dict[str, Any]]:
    found: dict[Any, dict[str, Any]] = {}
    for layout in PLAN:
        if layout.reference not in found:
            args = arguments(layout, paths, "fsdp")
            backend = make_backend(args, layout.role)
            # FSDP names its layers otherwise, so that they have other initial values
            if layout.role == "critic":
                _take_factors(backend, result(ranks, layout, 0)["loaded"])
            found[layout.reference] = results_of(
                backend, args, lambda seed, zero: rank_batch(seed, zero, 0, 1)
            )
    return found


def _take_factors(backend: FsdpBackend, factors: dict[str, torch.Tensor]) -> None:
    assert backend.adapter is not None
    for name, layer in backend.adapter.layers.items():
        layer.lora_A.data, layer.lora_B.data = (
            factors[x].clone() for x in factor_names(f"model.{name}")
        )


def result(ranks: list[Results], layout: Layout, rank: int) -> dict[str, Any]:
    found = ranks[rank][layout.name]
    assert "error" not in found, found["error"]
    return found


@pytest.mark.more
@pytest.mark.parametrize("layout", PLAN, ids=lambda layout: layout.name)
def test_loss_and_gradients_of_both_factors_are_those_of_fsdp(
    layout: Layout, ranks: list[Results], expected: dict[Any, dict[str, Any]]
) -> None:
    """The loaded or initial adapter is equal bit for bit. Gradients agree to 1e-5 of the largest of
    each factor.
    """
    reference = expected[layout.reference]
    prefix = "train/critic-" if layout.role == "critic" else "train/"
    if layout.role == "critic":
        named = {key: _as_actor(reference[key]) for key in ("loaded", "gradients")}
        reference = {**reference, **named}
    for rank in range(layout.world):
        mine = result(ranks, layout, rank)
        assert mine["loaded"].keys() == reference["loaded"].keys()
        assert all(torch.equal(x, reference["loaded"][name]) for name, x in mine["loaded"].items())
        ours, theirs = mine["metrics"], reference["metrics"]
        assert math.isclose(ours[f"{prefix}loss"], theirs[f"{prefix}loss"], rel_tol=0, abs_tol=5e-6)
        assert math.isclose(ours[f"{prefix}grad_norm"], theirs[f"{prefix}grad_norm"], rel_tol=1e-5)
        for name, gradient in reference["gradients"].items():
            gap = float((mine["gradients"][name] - gradient).abs().max())
            assert gap <= 1e-5 * max(float(gradient.abs().max()), 1e-2), (name, rank, gap)
        assert any(float(x.abs().max()) > 1e-3 for x in mine["gradients"].values())


def _as_actor(factors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Add the part of the names that FSDP's critics lack."""
    return {
        name.replace("base_model.model.", "base_model.model.model.", 1): x
        for name, x in factors.items()
    }


@pytest.mark.more
@pytest.mark.parametrize("layout", PLAN, ids=lambda layout: layout.name)
def test_only_the_adapter_is_trained_and_engines_get_what_fsdp_sends(
    layout: Layout, ranks: list[Results], expected: dict[Any, dict[str, Any]]
) -> None:
    one = expected[layout.reference]
    found = [result(ranks, layout, rank) for rank in range(layout.world)]
    assert len({str(x[key]) for x in found for key in ("base", "base_after")}) == 1
    changed = [x["base_changed"] for x in found]
    assert all(x == changed[0] and not x.items() & found[0]["base"].items() for x in changed), (
        "each value counts"
    )
    for mine in found:
        if layout.role == "critic":
            wanted = _own(layout, mine, one["values"])
            assert all(
                torch.allclose(a, b, rtol=0, atol=1e-5)
                for a, b in zip(mine["values"], wanted, strict=True)
            )
            continue
        assert mine["changing"] == one["changing"] and mine["sent"].keys() == one["sent"].keys()
        assert mine["targets"] == one["targets"], "the names in the adapter's files"
        # engines that have the base get the factors without a gather of it
        if layout.flags["lora_sync"] == "adapter":
            assert mine["asked"] == [True, False]
            assert list(mine["alone"]) == [name for name in mine["sent"] if ".lora_" in name] != []
            assert all(
                torch.equal(tensor, mine["sent"][name]) for name, tensor in mine["alone"].items()
            )
        for name, tensor in one["sent"].items():
            torch.testing.assert_close(mine["sent"][name], tensor, rtol=0, atol=1e-6)
        for scores in {"log_probs", "ref"} & one.keys():
            for ours, theirs in zip(mine[scores], _own(layout, mine, one[scores]), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


def _own(layout: Layout, mine: dict[str, Any], everyones: list[torch.Tensor]) -> list[torch.Tensor]:
    data_rank, size = mine["data_rank"]
    groups = rank_batch(0, 0, 0, 1)["group_indices"]
    return [x for x, group in zip(everyones, groups, strict=True) if group % size == data_rank]


@pytest.mark.parametrize(("overlapped", "plain"), LATER, ids=lambda layout: layout.name)
def test_each_step_has_the_weights_of_the_one_before(
    ranks: list[Results], overlapped: Layout, plain: Layout
) -> None:
    for rank in range(2):
        ours, theirs = (result(ranks, layout, rank)["later"] for layout in (overlapped, plain))
        for mine, wanted in zip(ours, theirs, strict=True):
            for name in ("train/loss", "train/grad_norm"):
                assert mine[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), (rank, name)


def test_weights_in_bfloat16() -> None:
    """With the adapter added they stay so, and the base has no digest of the float32 values, which
    it does not have.
    """
    from slime.plugins.megatron.lora import MegatronAdapter, ModelAdapters

    def named(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        yield from (
            (f"{name}.weight", torch.ones(4, 2, dtype=dtype)) for name in ("adapted", "other")
        )

    factors = {"adapted": Factors(torch.ones(1, 2), torch.full((4, 1), 0.25))}
    adapters: Any = SimpleNamespace(settings=LoraSettings(1, 2.0), whole=lambda: factors)
    for dtype, digests in (
        (torch.bfloat16, {"bfloat16"}),
        (torch.float32, {"bfloat16", "float32"}),
    ):
        weights = dict(ModelAdapters.merge(adapters, named(dtype)))
        assert {x.dtype for x in weights.values()} == {dtype}
        assert (weights["adapted.weight"] == 1.5).all() and (weights["other.weight"] == 1).all()
        adapter: Any = SimpleNamespace(_weights=SimpleNamespace(gather=partial(named, dtype)))
        assert MegatronAdapter.digests(adapter).keys() == digests


# --- reference, snapshots and files
# ----------------------------------------------------------------


@pytest.mark.more
@pytest.mark.parametrize("layout", KEPT, ids=lambda layout: layout.name)
def test_the_reference_is_the_base_bit_for_bit(layout: Layout, ranks: list[Results]) -> None:
    for rank in range(layout.world):
        mine = result(ranks, layout, rank)
        assert mine["copies"] == (["old_actor"], []), "the reference needs no copy"
        assert len(mine["ref_after"]) and all(map(torch.equal, mine["ref_after"], mine["separate"]))
        assert not any(map(torch.equal, mine["actor"], mine["separate"])), "the adapter is on again"


@pytest.mark.more
@pytest.mark.parametrize("layout", KEPT, ids=lambda layout: layout.name)
def test_resume_is_exact(layout: Layout, ranks: list[Results]) -> None:
    for rank in range(layout.world):
        mine = result(ranks, layout, rank)
        straight, resumed = (
            {k: v for k, v in mine[x].items() if "perf/" not in k} for x in ("straight", "resumed")
        )
        assert straight == resumed
        assert all(torch.equal(x, mine["resumed_end"][name]) for name, x in mine["end"].items())
        assert not all(torch.equal(x, mine["saved"][name]) for name, x in mine["end"].items())
        assert all(map(torch.equal, mine["old"], mine["resumed_old"]))


@pytest.mark.more
@pytest.mark.parametrize("layout", KEPT, ids=lambda layout: layout.name)
def test_snapshots_and_exports_hold_the_adapter(
    layout: Layout, ranks: list[Results], paths: dict[str, Path], tmp_path: Path
) -> None:
    """The export has the names and the configuration of FSDP's, and merges to the same model as the
    snapshot.
    """
    folder, saved = paths["output"] / str(PLAN.index(layout)), result(ranks, layout, 0)["saved"]
    stored = set(StoredTensors(folder / "iter_0000001" / "actor" / "torch_dist").shapes)
    factors = {
        _fused(name.removeprefix("base_model.model.").removesuffix(".weight")) for name in saved
    }
    moments = {
        f"optimizer.state.{moment}.{name}"
        for moment in ("exp_avg", "exp_avg_sq")
        for name in factors
    }
    assert stored == factors | moments
    written = load_file(str(folder / "adapter" / "adapter_model.safetensors"))
    assert written.keys() == saved.keys() and all(
        torch.equal(x, saved[name]) for name, x in written.items()
    )
    given = paths[adapter_key(layout)]
    config, fsdp = (
        json.loads((path / "adapter_config.json").read_text())
        for path in (folder / "adapter", given)
    )
    assert config == fsdp
    merge_lora(folder / "adapter", None, tmp_path / "merged")
    merge_lora(folder / "iter_0000001", None, tmp_path / "of_snapshot")
    first, second = (
        load_file(str(tmp_path / x / "model.safetensors")) for x in ("merged", "of_snapshot")
    )
    assert first.keys() == second.keys() and all(
        torch.equal(x, second[name]) for name, x in first.items()
    )


def _fused(name: str) -> str:
    """Return the name in a snapshot, where the factors of a layer's experts are one tensor."""
    name = re.sub(r"\.experts\.\d+\.(gate|up)_proj\.", ".experts.gate_up_proj_lora.", name)
    return re.sub(r"\.experts\.\d+\.down_proj\.", ".experts.down_proj_lora.", name)


def test_snapshots_of_experts_do_not_depend_on_the_layout(
    ranks: list[Results], paths: dict[str, Path]
) -> None:
    """Whole experts on each rank, or a part of each expert: the same tensors at the same places."""
    both = []
    for layout in OF_EXPERTS[1:3]:
        result(ranks, layout, 0)
        stored = StoredTensors(
            paths["output"] / str(PLAN.index(layout)) / "iter_0000001" / "actor" / "torch_dist"
        )
        names = [name for name in stored.shapes if ".experts." in name]
        values = {name: torch.empty(stored.shapes[name]) for name in names}
        stored.read(
            [TensorShard(name, x, (0,) * x.dim(), tuple(x.shape)) for name, x in values.items()]
        )
        both.append(values)
    divided, whole = both
    # layers, factors, moments and values
    assert divided.keys() == whole.keys() and len(whole) == 4 * 4 * 3
    for name, tensor in whole.items():
        # By norms: where a gradient is near zero, Adam makes a whole step of its rounding.
        assert (divided[name] - tensor).norm() <= 1e-2 * tensor.norm() > 0, name


@pytest.mark.parametrize(
    ("family", "exclude", "said"),
    [
        (
            "gpt_oss",
            (),
            r"has the experts of a layer as model\.layers\.0\.mlp\.experts\.gate_up_proj",
        ),
        (
            "minimax_m2",
            (),
            r"experts\.\{expert\}\.w1\.weight, .*w3\.weight, and with --train-backend megatron only",
        ),
        ("qwen3", (), "selects nothing, because no decoder layer has routed experts"),
        (
            "qwen3_moe",
            ("experts",),
            r"'experts' selects model\.layers\.0\.mlp\.experts, but .* of all layers",
        ),
    ],
)
def test_experts_that_cannot_have_adapters(
    family: str, exclude: tuple[str, ...], said: str
) -> None:
    from slime.plugins.megatron.lora_experts import expert_weights

    config = CONFIGS[family]
    described = family_of(config, None)
    entries = list(described.entries(described.settings(config.to_dict())))
    settings = LoraSettings(2, 4.0, targets=("experts",), exclude=exclude)
    with pytest.raises((MegatronError, ModelError), match=said):
        expert_weights(entries, settings)
    assert not expert_weights(entries, replace(settings, targets=("all-linear",)))
