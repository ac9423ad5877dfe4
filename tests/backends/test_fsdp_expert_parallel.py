"""Ranks that have some of the experts each (``--fsdp-expert-parallel-size``) train as one rank
does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expert_ranks import LONG, ONE_RANK, READERS, TWO, worker
from rank_processes import results_of_ranks
from safetensors.torch import load_file, save_file
from test_fsdp_ranks import assert_close, assert_equal, assert_same_metrics
from transformers import AutoModelForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[1] / "models"))
from every_family import FAMILIES, save_tiny, tiny_config

from slime.backends.fsdp.experts import exchange_tokens
from slime.config.lora import has_experts
from slime.engines.process import free_port
from slime.models.loading import ModelError, decoder_layers

pytestmark = [pytest.mark.real, pytest.mark.slow]
Ranks = list[dict[tuple[int, str], Any]]
BIASED = "one rank's experts"


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("experts")
    models = {model for model, _ in TWO.values()}
    paths = {
        model: save_tiny(
            "GLM-4.5" if model == BIASED else model,
            root / model,
            **({"num_local_experts": 4} if model == "Llama 4" else {}),
        )
        for model in models
    }
    # Each token chooses the two experts of the first rank.
    file = paths[BIASED] / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if name.endswith("e_score_correction_bias"):
            tensors[name] = torch.tensor([9.0, 9.0, -9.0, -9.0])
    save_file(tensors, file, metadata={"format": "pt"})
    (root / "output").mkdir()
    return paths | {"output": root / "output"}


@pytest.fixture(scope="module")
def ranks(paths: dict[str, Path]) -> Ranks:
    ports = [free_port() for _ in range(5)]
    return results_of_ranks(worker, (paths, ports), paths["output"], 400.0)


def test_every_family_with_experts_is_trained() -> None:
    of_families = {name for name in FAMILIES if has_experts(tiny_config(name).to_dict())}
    assert of_families <= set(TWO)


@pytest.mark.parametrize(
    ("family", "said"),
    [("Llama", "no decoder layer has routed experts"), ("Qwen3-MoE", "divides 4")],
)
def test_what_eight_ranks_cannot_divide_is_refused(family: str, said: str) -> None:
    mesh = {"shard": SimpleNamespace(size=lambda: 2), "expert": SimpleNamespace(size=lambda: 4)}
    layers = decoder_layers(AutoModelForCausalLM.from_config(tiny_config(family)))
    with pytest.raises(ModelError, match=said):
        exchange_tokens(layers, mesh)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "case"),
    [
        *(pytest.param(2, name, marks=[pytest.mark.long] if name in LONG else []) for name in TWO),
        *((4, name) for name in ONE_RANK),
    ],
)
def test_ranks_train_as_one(ranks: Ranks, size: int, case: str) -> None:
    one = ranks[0][1, ONE_RANK.get(case, case) if size == 4 else case]
    for rank in ranks[:size]:
        many = rank[size, case]
        for got, want in zip(many["metrics"], one["metrics"], strict=True):
            assert_same_metrics(got, want, rel=2e-5)
        whole = [i for i, group in enumerate(one["groups"]) if group in many["groups"]]
        for i, got in zip(whole, many["scores"], strict=True):
            torch.testing.assert_close(got, one["scores"][i], atol=1e-5, rtol=1e-5)
        assert_close(many["gradients"][0], one["gradients"][0], rtol=1e-4)
        assert_close(many["weights"], one["weights"], rtol=1e-4)
        assert many.get("identity") == one.get("identity")  # of the base of an adapter
        if "sent" in one:
            assert_close(many["sent"], one["sent"], rtol=1e-4)
            assert_equal(many["sent"], ranks[0][size, case]["sent"])


def test_experts_of_a_rank_without_tokens_are_not_trained(ranks: Ranks) -> None:
    gradients = ranks[0][2, BIASED]["gradients"][0]
    of_experts = [x for name, x in gradients.items() if ".experts." in name]
    assert of_experts and all(x[:2].any() and not x[2:].any() for x in of_experts)
    rows = [{count > 0 for _, count in rank[2, BIASED]["computed"]} for rank in ranks[:2]]
    assert rows == [{True}, {False}]


@pytest.mark.parametrize(
    ("size", "case", "computes"),
    [(2, "Qwen3-MoE", 2), (4, "two by two", 2), (4, "replicas", 2), (4, "bfloat16", 1)],
)
def test_a_rank_computes_with_its_experts_and_holds_its_share_of_them(
    ranks: Ranks, size: int, case: str, computes: int
) -> None:
    """Of four; FSDP divides further what several ranks compute with."""
    for rank in ranks[:size]:
        assert {count for count, _ in rank[size, case]["computed"]} == {computes}
        held = {n for name, n in rank[size, case]["held"].items() if ".experts." in name}
        assert held == {2 if case == "replicas" else 4 // size}


def test_bfloat16(ranks: Ranks) -> None:
    """Weights are float32, and the factors of experts as wide as without expert parallelism."""
    got, want = ranks[0][4, "bfloat16"], ranks[0][1, "Qwen3-MoE"]
    assert {x.dtype for x in got["weights"].values()} == {torch.float32}
    assert {x.dtype for x in got["sent"].values()} == {torch.bfloat16}
    for name in ("train/grad_norm", "train/entropy_loss"):
        assert got["metrics"][0][name] == pytest.approx(want["metrics"][0][name], rel=0.03)


@pytest.mark.parametrize(
    ("writer", "reader"), [(writer, reader) for writer in READERS for reader in READERS[writer]]
)
def test_any_layout_reads_a_snapshot_of_any_other(ranks: Ranks, writer: str, reader: str) -> None:
    (wrote,) = [x for (_, name), x in ranks[0].items() if name == f"saved {writer}"]
    (read,) = [x for (_, name), x in ranks[0].items() if name == f"{writer} read by {reader}"]
    for what in ("weights", "copy", "optimizer"):
        assert_equal(read[what], wrote[what])
    assert_same_metrics(read["next"], wrote["next"], rel=0.0 if reader == writer else 1e-5)


def test_an_export_is_the_whole_model(ranks: Ranks, paths: dict[str, Path]) -> None:
    original = load_file(paths["Qwen3-MoE"] / "model.safetensors")
    for writer, size in ("divided", 2), ("two by two", 4):
        exported = load_file(paths["output"] / f"hf {writer}" / "model.safetensors")
        assert {n: x.shape for n, x in exported.items()} == {
            n: x.shape for n, x in original.items()
        }
        assert_equal(exported, ranks[0][size, f"saved {writer}"]["weights"])
