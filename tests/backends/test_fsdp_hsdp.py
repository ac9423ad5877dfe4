"""Four ranks as two replicas of two shards (``--fsdp-shard-size 2``) train as four shards do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hsdp_ranks import (
    MICRO_BATCHES,
    PARTS,
    READERS,
    VARIANTS,
    worker,
)
from rank_processes import results_of_ranks, save_models
from safetensors.torch import load_file
from test_fsdp_ranks import assert_close, assert_equal, assert_same_metrics

from slime.engines.process import free_port

pytestmark = [pytest.mark.real, pytest.mark.slow]
DEADLINE_SECONDS = 300.0
GROUPS = 3  # of parameters that FSDP gathers together: two layers and the rest
Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("hsdp"))


@pytest.fixture(scope="module")
def ranks(paths: dict[str, Path]) -> Ranks:
    """The results of every rank; started once, and ended also when one of them hangs."""
    return results_of_ranks(
        worker, (paths, [free_port() for _ in range(3)]), paths["output"], DEADLINE_SECONDS
    )


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "flat"])
def test_every_way_to_communicate_gives_the_same_steps(ranks: Ranks, variant: str) -> None:
    for rank in ranks:
        got, want = rank[variant], rank["flat"]
        for mine, theirs in zip(got["metrics"], want["metrics"], strict=True):
            assert_same_metrics(mine, theirs, rel=2e-6)
        for mine, theirs in zip(got["log_probs"], want["log_probs"], strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
        assert_close(got["weights"], want["weights"], rtol=1e-5)
        assert_close(got["next_weights"], want["next_weights"], rtol=1e-5)
        assert got["placement"] == want["placement"]
    assert any(step["train/grad_norm"] > 1.0 for step in ranks[0]["flat"]["metrics"][:3]), (
        "clipping is tested, too"
    )


@pytest.mark.parametrize(("variant", "per_token"), PARTS)
def test_a_rollout_that_is_trained_in_parts_is_the_same_step(
    ranks: Ranks, variant: str, per_token: bool
) -> None:
    for rank in ranks:
        whole, late, early = rank[f"parts_{variant}_{per_token}"]
        for mine, theirs in zip(late["metrics"], whole["metrics"], strict=True):
            ratio = {"perf/trained_during_rollout_ratio": 0.0}
            assert_same_metrics(mine, theirs | ratio, rel=2e-5)
        assert_close(late["weights"], whole["weights"], rtol=1e-5)
        # When a part is trained changes nothing.
        assert_equal(early["weights"], late["weights"])
        assert [step["train/grad_norm"] for step in early["metrics"]] == [
            step["train/grad_norm"] for step in late["metrics"]
        ]
        ratios = [run["metrics"][1]["perf/trained_during_rollout_ratio"] for run in (late, early)]
        assert ratios == [0.0, 2 / 3]


@pytest.mark.parametrize("variant", ["hybrid", "replicas_of_one", "hybrid_accumulate_keep"])
def test_replicas_stay_equal_to_the_bit(ranks: Ranks, variant: str) -> None:
    size = VARIANTS[variant]["fsdp_shard_size"]
    for rank in range(4):
        assert_equal(ranks[rank][variant]["held"], ranks[rank % size][variant]["held"])
        assert_equal(ranks[rank][variant]["weights"], ranks[0][variant]["weights"])
        for mine, first in zip(
            ranks[rank][variant]["metrics"], ranks[0][variant]["metrics"], strict=True
        ):
            assert_same_metrics(mine, first, rel=0.0)


@pytest.mark.parametrize(
    ("variant", "size"),
    [
        ("flat", 4),
        ("hybrid", 2),
        ("replicas_of_one", 1),
    ],
)
def test_a_rank_holds_its_share_of_a_replica(ranks: Ranks, variant: str, size: int) -> None:
    whole = {
        name: t
        for name, t in ranks[0][variant]["weights"].items()
        if name in ranks[0][variant]["held"]
    }
    assert whole
    for rank in range(4):
        for name, tensor in whole.items():
            rows = tensor.chunk(size)[rank % size]
            assert torch.equal(ranks[rank][variant]["held"][name], rows)


def test_gradients_cross_between_replicas_once_per_step(ranks: Ranks) -> None:
    """Within a replica they are reduced after each micro-batch."""
    flat, hybrid = (ranks[0][name]["counts"] for name in ("flat", "hybrid"))
    assert (
        flat["_reduce_scatter_base_"] == hybrid["_reduce_scatter_base_"] == GROUPS * MICRO_BATCHES
    )
    assert hybrid["allreduce_"] - flat["allreduce_"] == GROUPS


def test_unsharded_gradients_are_reduced_once_per_step(ranks: Ranks) -> None:
    assert ranks[0]["hybrid_accumulate_keep"]["counts"]["_reduce_scatter_base_"] == GROUPS


def test_kept_parameters_are_gathered_once_per_step(ranks: Ranks) -> None:
    again = (GROUPS - 1) * 2 + 1  # the rest is not freed between the forward and the backward pass
    assert ranks[0]["flat"]["counts"]["_allgather_base_"] == again * MICRO_BATCHES
    assert ranks[0]["hybrid_accumulate_keep"]["counts"]["_allgather_base_"] == GROUPS


@pytest.mark.parametrize("case", ["critic", "context_parallel", "moe"])
def test_roles_and_layouts_on_replicas(ranks: Ranks, case: str) -> None:
    for rank in ranks:
        got, want = rank["others_hybrid"][case], rank["others_flat"][case]
        for mine, theirs in zip(got["metrics"], want["metrics"], strict=True):
            assert_same_metrics(mine, theirs, rel=1e-5)
        assert_close(got["weights"], want["weights"], rtol=1e-4)


def test_bfloat16_on_replicas(ranks: Ranks) -> None:
    for rank in ranks:
        got, want = (rank[f"others_{name}"]["bfloat16"] for name in ("hybrid", "flat"))
        assert_same_metrics(got["metrics"][0], want["metrics"][0], rel=1e-5)
        assert_close(got["weights"], want["weights"], rtol=0.01)


@pytest.mark.parametrize(("case", "model"), [("moe", "qwen3_moe"), ("vision", "qwen2_5_vl")])
def test_every_rank_gathers_all_weights_under_the_checkpoints_names(
    ranks: Ranks, paths: dict[str, Path], case: str, model: str
) -> None:
    """Whichever rank sends them to an engine."""
    on_disk = load_file(paths[model] / "model.safetensors")
    for rank in ranks:
        weights = rank["others_hybrid"][case]["weights"]
        assert {n: t.shape for n, t in weights.items()} == {n: t.shape for n, t in on_disk.items()}
        assert_equal(weights, ranks[0]["others_hybrid"][case]["weights"])
        if case == "vision":  # was not trained
            assert_equal(weights, {name: tensor.float() for name, tensor in on_disk.items()})


def test_export_of_replicas(ranks: Ranks, paths: dict[str, Path]) -> None:
    exported = load_file(paths["output"] / "hf_2" / "model.safetensors")
    assert_equal(exported, ranks[0]["others_hybrid"]["moe"]["weights"])


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        *((writer, reader) for writer, readers in READERS.items() for reader in readers),
        ("hybrid", "two"),
        ("hybrid", "two_replicas"),
        ("two", "hybrid"),
    ],
)
def test_any_layout_reads_a_snapshot_of_any_other(ranks: Ranks, writer: str, reader: str) -> None:
    for rank in ranks:
        if f"loaded_{writer}_by_{reader}" not in rank:
            continue
        read, wrote = rank[f"loaded_{writer}_by_{reader}"], ranks[0][f"saved_{writer}"]
        for what in ("weights", "copy", "optimizer"):
            assert_equal(read[what], wrote[what])
        assert_same_metrics(read["next"], wrote["next"])
    assert f"loaded_{writer}_by_{reader}" in ranks[0]


def test_replicas_write_a_snapshot_once_and_share_the_work(
    ranks: Ranks, paths: dict[str, Path]
) -> None:
    def sizes(name: str) -> list[int]:
        return [
            file.stat().st_size
            for file in sorted((paths["output"] / name / "dcp").glob("*.distcp"))
        ]

    flat, hybrid = sizes("snapshot_flat"), sizes("snapshot_hybrid")
    assert len(flat) == len(hybrid) == 4
    assert sum(hybrid) < 1.05 * sum(flat)
    assert max(hybrid) < 0.35 * sum(hybrid)
