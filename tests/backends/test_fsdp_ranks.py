"""1, 2 and 4 ranks over gloo give the same losses, gradients and weights; snapshots move between
them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_ranks import worker
from rank_processes import results_of_ranks, save_models
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[1] / "models"))
from every_family import save_tiny

from slime.engines.process import free_port

pytestmark = [pytest.mark.real, pytest.mark.slow]
DEADLINE_SECONDS = 240.0
Results = dict[tuple[str, int], dict[str, Any]]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("ranks")
    return save_models(root) | {"hybrid": save_tiny("Qwen3.5-MoE", root / "hybrid")}


@pytest.fixture(scope="module")
def ranks(paths: dict[str, Path]) -> list[Results]:
    """The results of every rank; started once, and ended also when one of them hangs."""
    ports = {world_size: free_port() for world_size in (4, 2, 1)}
    return results_of_ranks(worker, (paths, ports), paths["output"], DEADLINE_SECONDS)


@pytest.fixture(scope="module")
def results(ranks: list[Results]) -> Results:
    return ranks[0]


def assert_same_metrics(got: dict[str, float], want: dict[str, float], rel: float = 1e-5) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        if not name.startswith("perf/"):
            assert got[name] == pytest.approx(value, rel=rel, abs=1e-7), name


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], rtol: float) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert (got[name] - want[name]).norm() <= rtol * want[name].norm() + 1e-9, name


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    assert [n for n in want if not torch.equal(got[n], want[n])] == []


@pytest.mark.parametrize(
    ("scenario", "world_size"),
    [
        ("two_steps", 2),
        ("two_steps", 4),
        ("context_parallel", 2),
        ("context_parallel", 4),
        ("ulysses", 2),
        ("ulysses", 4),
        ("whole_sequences", 2),
        ("checkpointed", 2),
        ("qwen3", 2),
        ("critic", 2),
        ("hf_export", 4),
    ],
)
def test_ranks_agree_with_one(results: Results, scenario: str, world_size: int) -> None:
    many, one = results[scenario, world_size], results[scenario, 1]
    for got, want in zip(many["metrics"], one["metrics"], strict=True):
        assert_same_metrics(got, want)
    # Adam's first steps are ±lr where a gradient is rounding noise, so weights are looser than
    # gradients.
    assert_close(many["weights"], one["weights"], rtol=1e-4)


def test_offloaded_shards_train_as_others(results: Results) -> None:
    for size in (1, 2):
        got, want = results["cpu_offload", size], results["bfloat16", size]
        for mine, theirs in zip(got["metrics"], want["metrics"], strict=True):
            assert_same_metrics(mine, theirs)
        assert_equal(got["weights"], want["weights"])
        assert_equal(got["named"], {name: t.bfloat16() for name, t in want["weights"].items()})


@pytest.mark.parametrize("scenario", ["small_states", "small_states_of_experts"])
def test_moments_of_8_bits_on_ranks(results: Results, scenario: str) -> None:
    pytest.importorskip("torchao", reason="pip install 'slime-rl[torchao]'")
    two, one = results[scenario, 2], results[scenario, 1]
    for got, want in zip(two["metrics"], one["metrics"], strict=True):
        assert_same_metrics(got, want, rel=1e-3)
    for result in (two, one):
        assert_equal(result["loaded"], result["saved"])
        assert_same_metrics(result["resumed"], result["straight"], rel=0.0)
    in_layers = [{name for name in result["saved"] if "layers." in name} for result in (two, one)]
    assert in_layers[0] == in_layers[1] and any(".codes/" in name for name in in_layers[0])
    if scenario == "small_states":
        assert "exp_avg/model.embed_tokens.weight" in two["saved"], (
            "two ranks cannot divide its 61 rows"
        )
    else:
        assert any(
            name.startswith("exp_avg.codes/") and "experts." in name for name in two["saved"]
        )


def test_all_ranks_keep_copies_of_the_weights_in_one_place(ranks: list[Results]) -> None:
    """A snapshot of copies is a collective that depends on the place."""
    for rank in range(2):
        assert ranks[rank]["place_of_copies", 2] == {"everywhere": True, "on_one_rank": False}


@pytest.mark.parametrize(
    ("scenario", "world_size"), [("context_parallel", 2), ("ulysses", 2), ("ulysses", 4)]
)
def test_context_parallel_scores_are_those_of_one_rank(
    ranks: list[Results], scenario: str, world_size: int
) -> None:
    """All ranks of a group have all of each sample's log-probs."""
    expected = ranks[0]["context_parallel", 1]["log_probs"]
    for rank in range(world_size):
        for got, want in zip(ranks[rank][scenario, world_size]["log_probs"], expected, strict=True):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_ulysses_exchanges_tokens_for_heads(results: Results) -> None:
    assert [results["ulysses", size]["ranks_that_exchange"] for size in (1, 2, 4)] == [
        set(),
        {2},
        {4},
    ]


@pytest.mark.parametrize(("world_size", "context"), [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_ranks_run_as_many_packs_of_their_own_size(
    ranks: list[Results], world_size: int, context: int
) -> None:
    """As many on each rank although some have twice the samples, and each sample gets its own
    log-probs.
    """
    one = ranks[0]["forward_packs", 1]["context 1"]
    mine = [
        ranks[rank]["forward_packs", world_size][f"context {context}"] for rank in range(world_size)
    ]
    assert len({found["runs"] for found in mine}) == 1, [found["runs"] for found in mine]
    assert mine[0]["runs"] > max(found["training"] for found in mine), (
        "training has one micro-batch a group"
    )
    for found in mine:
        assert found["own"] == min(found["runs"], len(found["groups"])), (
            "none runs an empty one that has samples"
        )
        wanted = [i for i, group in enumerate(one["groups"]) if group in found["groups"]]
        for i, got in zip(wanted, found["log_probs"], strict=True):
            torch.testing.assert_close(got, one["log_probs"][i], atol=1e-5, rtol=0)


def test_every_rank_reports_the_same(ranks: list[Results]) -> None:
    for world_size in (2, 4):
        for rank in range(1, world_size):
            for mine, first in zip(
                ranks[rank]["two_steps", world_size]["metrics"],
                ranks[0]["two_steps", world_size]["metrics"],
                strict=True,
            ):
                assert_same_metrics(mine, first, rel=0.0)


def test_second_step_left_groups_out(results: Results) -> None:
    for world_size in (1, 2, 4):
        metrics = results["two_steps", world_size]["metrics"]
        assert [m["train/skipped_sample_ratio"] for m in metrics] == [0.0, 0.5, 0.0]
        assert metrics[0]["rollout/ref_log_probs"] != pytest.approx(
            metrics[0]["rollout/log_probs"], rel=1e-3
        )


def test_log_probs_of_a_sample_do_not_depend_on_its_rank(ranks: list[Results]) -> None:
    one = ranks[0]["two_steps", 1]["log_probs"]
    for world_size in (2, 4):
        for rank in range(world_size):
            mine = ranks[rank]["two_steps", world_size]["log_probs"]
            whole = [x for i, x in enumerate(one) if (i // 4) % world_size == rank]
            for a, b in zip(mine, whole, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_resume_is_exact_to_the_bit(results: Results) -> None:
    run = results["resume", 2]
    assert {k: v for k, v in run["straight"].items() if "perf" not in k} == {
        k: v for k, v in run["resumed"].items() if "perf" not in k
    }
    assert_equal(run["resumed_weights"], run["weights"])


def test_one_rank_reads_what_two_saved(results: Results) -> None:
    saved, loaded = results["resume", 2], results["load_of_two_ranks", 1]
    assert_equal(loaded["weights"], saved["saved_weights"])
    assert_equal(loaded["optimizer"], saved["saved_optimizer"])
    assert loaded["steps"] == 2
    assert_same_metrics(loaded["next"], saved["straight"])


def test_bfloat16_keeps_float32_masters(results: Results) -> None:
    for world_size in (1, 2):
        run = results["bfloat16", world_size]
        assert run["masters"] == {"torch.float32"}
        assert {t.dtype for t in run["weights"].values()} == {torch.bfloat16}
        for got, want in zip(run["metrics"], results["two_steps", 1]["metrics"][:1], strict=False):
            assert got["train/entropy_loss"] == pytest.approx(want["train/entropy_loss"], rel=0.02)
    pairs = zip(results["bfloat16", 2]["metrics"], results["bfloat16", 1]["metrics"], strict=True)
    for two, one in pairs:
        assert two["train/grad_norm"] == pytest.approx(one["train/grad_norm"], rel=0.05)


def test_gradients_are_summed_in_bfloat16_on_request(results: Results) -> None:
    found = results["bf16_sums", 2]
    plain, reduced = found["reduced False"], found["reduced True"]
    assert reduced["in_bf16"] and not plain["in_bf16"]
    norms = [run["metrics"][0]["train/grad_norm"] for run in (reduced, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=0.01)


def test_nan_on_one_rank_is_told_by_all(ranks: list[Results]) -> None:
    for rank in range(4):
        message = ranks[rank]["nan_on_the_last_rank", 4]["message"]
        assert "rank 3" in message and "step 0" in message


def test_experts_are_exported_one_by_one(results: Results, paths: dict[str, Path]) -> None:
    original = load_file(paths["qwen3_moe"] / "model.safetensors")
    for world_size in (1, 4):
        exported = load_file(paths["output"] / f"hf_{world_size}" / "model.safetensors")
        assert exported.keys() == original.keys()
        assert any("experts.3.down_proj" in name for name in exported)
        assert {n: t.shape for n, t in exported.items()} == {
            n: t.shape for n, t in original.items()
        }
        assert_equal(exported, results["hf_export", world_size]["weights"])
        model, info = AutoModelForCausalLM.from_pretrained(
            paths["output"] / f"hf_{world_size}", output_loading_info=True
        )
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert model.dtype == torch.float32


@pytest.mark.parametrize("model", ["qwen3_moe", "qwen2_5_vl"])
def test_every_rank_names_its_weights_as_the_checkpoint_does(
    ranks: list[Results], paths: dict[str, Path], model: str
) -> None:
    on_disk = sorted(load_file(paths[model] / "model.safetensors"))
    for rank in range(2):
        assert sorted(ranks[rank]["names", 2][model]) == on_disk, f"rank {rank}"


def test_a_weight_sync_takes_one_collective_for_many_tensors(
    ranks: list[Results], paths: dict[str, Path]
) -> None:
    on_disk = load_file(paths["qwen3_moe"] / "model.safetensors")
    for rank in range(2):
        found = ranks[rank]["collectives", 2]
        assert found["parameters"] > 20 and len(found["calls"]) == 1, found["calls"]
        assert_equal(found["weights"], on_disk)


def test_the_reference_is_never_whole_on_other_ranks_than_the_one_that_reads_it(
    ranks: list[Results],
) -> None:
    """Tied weights once: of two ranks each keeps half, and sees one whole tensor at a time."""
    reader, other = (ranks[rank]["reference_in_shards", 2] for rank in range(2))
    assert reader["peak"] > reader["whole"]
    assert other["peak"] < 0.6 * other["whole"] + 1.1 * other["largest"]
    one = ranks[0]["reference_in_shards", 1]["log_probs"]
    for rank in range(2):
        mine = ranks[rank]["reference_in_shards", 2]["log_probs"]
        whole = [x for i, x in enumerate(one) if (i // 4) % 2 == rank]
        for got, want in zip(mine, whole, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
