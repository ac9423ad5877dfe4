"""Every family in every layout of up to four ranks, against FSDP on one rank, which is tested
against plain torch.

One launch of four processes runs them all (``megatron_ranks.py``); the tests below look at its
results.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_helpers import make_backend
from launch import run_ranks
from megatron_ranks import (
    FORWARD_PACKS,
    PLAN,
    PP,
    ROUTED,
    VPP,
    Layout,
    make_arguments,
    rank_batch,
    results_of,
)
from tiny_families import CONFIGS, save_family

pytestmark = [pytest.mark.megatron, pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]
pytestmark += [pytest.mark.more]

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("megatron")
    models = {name: save_family(name, folder / name) for name in CONFIGS}
    reference = save_family("llama", folder / "llama_reference", seed=1)
    (folder / "output").mkdir()
    return models | {"llama_reference": reference, "output": folder / "output"}


@pytest.fixture(scope="module")
def ranks(paths: dict[str, Path]) -> list[Results]:
    """By rank: results by layout."""
    run_ranks("megatron_ranks:worker", 4, paths, [*PLAN, *ROUTED])
    return [torch.load(paths["output"] / f"rank{rank}.pt", weights_only=False) for rank in range(4)]


@pytest.fixture(scope="module")
def expected(paths: dict[str, Path]) -> dict[Any, dict[str, Any]]:
    found = {}
    for layout in [*PLAN, Layout(ROUTED[0].model)]:
        if layout.reference not in found:
            args = make_arguments(layout, paths, "fsdp")
            backend = make_backend(args, layout.role)
            found[layout.reference] = results_of(
                backend, args, lambda seed, zero: rank_batch(seed, zero, 0, 1)
            )
    return found


def result(ranks: list[Results], layout: Layout, rank: int) -> dict[str, Any]:
    found = ranks[rank][layout.name]
    assert "error" not in found, found["error"]
    return found


def assert_close_weights(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Adam makes a whole step of a gradient that is 0 but for rounding (that of a key's bias): 99%
    must agree.
    """
    assert set(mine) == set(theirs)
    gaps = torch.cat([(mine[name] - theirs[name]).abs().flatten() for name in theirs])
    assert float((gaps <= 2e-5).float().mean()) >= 0.99, float(gaps.max())


@pytest.mark.parametrize("layout", PLAN, ids=lambda layout: layout.name)
def test_same_training_as_fsdp_on_one_rank(
    layout: Layout, ranks: list[Results], expected: dict[Any, dict[str, Any]]
) -> None:
    """Loss to 5e-6, gradient norm to 1e-5 relative, on every rank, in both steps; then the
    weights.
    """
    reference = expected[layout.reference]
    loss, norm = ("train/critic-loss", "train/critic-grad_norm") if layout.role == "critic" else (
        "train/loss", "train/grad_norm"
    )  # fmt: skip
    for rank in range(layout.world):
        mine = result(ranks, layout, rank)
        for step in (0, 1):
            ours, theirs = mine["metrics"][step], reference["metrics"][step]
            assert set(ours) >= set(theirs) - {"perf/actor_train_tok_per_s"}
            assert math.isclose(ours[loss], theirs[loss], rel_tol=0, abs_tol=5e-6), (rank, step)
            assert math.isclose(ours[norm], theirs[norm], rel_tol=1e-5), (
                rank,
                step,
                ours[norm],
                theirs[norm],
            )
            for name in (
                "train/entropy_loss",
                "train/ppo_kl",
                "train/pg_clipfrac",
                "train/skipped_sample_ratio",
            ):
                if name in theirs:
                    assert math.isclose(ours[name], theirs[name], rel_tol=1e-5, abs_tol=1e-5), (
                        name,
                        rank,
                        step,
                    )
        if "weights" in reference:
            assert_close_weights(mine["weights"], reference["weights"])
            for name, tensor in mine["weights"].items():
                if ".indexer." in name:  # nothing trains it
                    assert torch.equal(tensor, mine["loaded"][name]), name


@pytest.mark.parametrize(
    "layout", [x for x in PLAN if x.role == "actor"], ids=lambda layout: layout.name
)
def test_scores_and_round_trip(
    layout: Layout, ranks: list[Results], expected: dict[Any, dict[str, Any]]
) -> None:
    """Log-probs and entropies (which see every logit) to 1e-5; weights come back bit for bit."""
    reference = expected[layout.reference]
    for rank in range(layout.world):
        mine = result(ranks, layout, rank)
        data_rank, size = mine["data_rank"]
        group_of = rank_batch(0, 0, 0, 1)["group_indices"]
        wanted = [i for i, group in enumerate(group_of) if group % size == data_rank]
        for key in ("log_probs", "entropy"):
            for i, ours in zip(wanted, mine[key], strict=True):
                torch.testing.assert_close(ours, reference[key][i], atol=1e-5, rtol=0)
        assert set(mine["loaded"]) == set(reference["loaded"])
        for name, tensor in reference["loaded"].items():
            assert torch.equal(mine["loaded"][name], tensor), name


@pytest.mark.parametrize("layout", FORWARD_PACKS, ids=lambda layout: layout.name)
def test_a_pass_without_a_backward_has_packs_of_its_own(
    layout: Layout, ranks: list[Results]
) -> None:
    """Their scores are compared above."""
    counts = {result(ranks, layout, rank)["packs"] for rank in range(layout.world)}
    assert len(counts) == 1, "ranks run as many"
    stages = layout.megatron.get(PP, 1)
    groups = 4 // result(ranks, layout, 0)["data_rank"][1]  # training has one micro-batch each
    (count,) = counts
    if stages > 1:
        assert count > groups
        assert count % layout.megatron.get(VPP, 1) == 0, "an interleaved pipeline takes multiples"
    else:
        assert count < groups


@pytest.mark.parametrize(
    "layout", [x for x in PLAN if x.role == "critic"], ids=lambda layout: layout.name
)
def test_values(layout: Layout, ranks: list[Results], expected: dict[Any, dict[str, Any]]) -> None:
    reference = expected[layout.reference]
    for rank in range(layout.world):
        mine = result(ranks, layout, rank)
        for key, tolerance in (("values", 1e-5), ("values_after", 1e-4)):
            for ours, theirs in zip(mine[key], reference[key], strict=True):
                torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)


@pytest.mark.parametrize("layout", ROUTED[1:], ids=lambda layout: layout.name)
def test_experts_are_those_of_the_engine(
    layout: Layout, ranks: list[Results], expected: dict[Any, dict[str, Any]]
) -> None:
    """Every layout sends every token where the engine said, in backward's recomputation too."""
    one = result(ranks, ROUTED[0], 0)
    free = Layout(layout.model)
    assert (
        abs(
            one["metrics"][0]["train/grad_norm"]
            / expected[free.reference]["metrics"][0]["train/grad_norm"]
            - 1
        )
        > 0.01
    )
    groups = rank_batch(0, 0, 0, 1)["group_indices"]
    for rank in range(layout.world):
        mine = result(ranks, layout, rank)
        for ours, theirs in zip(mine["metrics"], one["metrics"], strict=True):
            assert math.isclose(ours["train/loss"], theirs["train/loss"], rel_tol=0, abs_tol=5e-6)
            assert math.isclose(ours["train/grad_norm"], theirs["train/grad_norm"], rel_tol=1e-5)
        wanted = [
            i
            for i, group in enumerate(groups)
            if group % mine["data_rank"][1] == mine["data_rank"][0]
        ]
        for i, ours in zip(wanted, mine["log_probs"], strict=True):
            torch.testing.assert_close(ours, one["log_probs"][i], atol=1e-5, rtol=0)
