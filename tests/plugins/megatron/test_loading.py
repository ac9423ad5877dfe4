"""What each rank reads of a Hugging Face checkpoint; ``pytest -s`` prints the bytes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launch import run_ranks
from megatron_lm_folders import stacked, their_names, write
from safetensors.torch import load_file, save_file
from tiny_families import save_family

from slime.plugins.megatron.megatron_lm import open_megatron_lm
from slime.weights.hf_folder import HfFolder

pytestmark = pytest.mark.megatron

TP, EP, ETP, PP = (
    "tensor_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "pipeline_model_parallel_size",
)
LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "qwen3": [{TP: 2}, {}, {TP: 4}, {TP: 2, PP: 2}],  # tied embeddings: read by both stages
    "qwen3_moe": [{TP: 2, EP: 2, ETP: 1}, {EP: 2}, {TP: 2, ETP: 2}],
    "glm4": [{TP: 2}],
    "deepseek_v3": [{TP: 2, EP: 2, ETP: 1}, {PP: 2, EP: 2}],
    "gpt_oss": [{TP: 2, EP: 2, ETP: 1}, {EP: 2}],
}


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(x, marks=[pytest.mark.long] if x in ("glm4", "gpt_oss") else [])
        for x in LAYOUTS
    ],
)
def test_replicas_share_the_reading_and_ranks_read_their_parts(family: str, tmp_path: Path) -> None:
    """Four ranks together read the checkpoint about once; each had read all that its stage has."""
    path = save_family(family, tmp_path / "model")
    stored = sum(tensor.nbytes for tensor in load_file(path / "model.safetensors").values())
    run_ranks("loading_ranks:load", 4, path, LAYOUTS[family], tmp_path, 4, seconds=300)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(4)]
    for number, layout in enumerate(LAYOUTS[family]):
        found = [rank[number] for rank in ranks]
        before, after = [x["whole_read"] for x in found], [x["read"] for x in found]
        print(
            f"{family} {layout}, checkpoint {stored} bytes: read by each rank {before} before, "
            f"{after} now"
        )
        assert all(x["equal"] for x in found), layout
        # Norms and routers are read by each tensor-parallel rank, a tied embedding by each pipeline
        # stage.
        assert stored <= sum(after) < 1.3 * stored, layout
        assert max(after) < 0.45 * stored, layout


def test_what_one_rank_finds_damaged_ends_all(tmp_path: Path) -> None:
    """Of one tensor only two rows are damaged, and they are read by one of four ranks."""
    path = save_family("qwen3", tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.self_attn.v_proj.weight"
    tensors[name][-2:] = float("nan")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    run_ranks("loading_ranks:load_damaged", 4, path, tmp_path, seconds=200)
    errors = [(tmp_path / f"rank{rank}.txt").read_text() for rank in range(4)]
    assert all(
        name in error and "NaN" in error and error.startswith("ModelError") for error in errors
    ), errors
    assert sum("could not read the checkpoint" in error for error in errors) == 3, errors


THEIRS: dict[str, tuple[bool, list[dict[str, Any]]]] = {
    "qwen3": (True, [{TP: 2}, {PP: 2}]),
    "qwen3_moe": (False, [{TP: 2, EP: 2, ETP: 1}, {EP: 2}]),
    "glm4": (True, [{TP: 2}]),
    # MODEL_ARGS of the public recipes give head sizes that mean nothing for latent attention
    "deepseek_v3": (False, [{TP: 2, EP: 2, ETP: 1, "kv_channels": 128}, {"kv_channels": 64}]),
}


@pytest.mark.parametrize("family", THEIRS)
def test_a_checkpoint_of_megatron_lm_is_loaded_in_other_layouts(
    family: str, tmp_path: Path
) -> None:
    path = save_family(family, tmp_path / "model")
    in_one, layouts = THEIRS[family]
    tensors = their_names(path)
    theirs = write(tmp_path / "theirs", stacked(tensors) if in_one else tensors)
    run_ranks("loading_ranks:load_megatron_lm", 2, path, theirs, layouts, 2, seconds=300)


def test_what_megatron_core_writes_is_read_bit_for_bit(tmp_path: Path) -> None:
    path = save_family("glm4", tmp_path / "model")
    run_ranks(
        "loading_ranks:save_by_megatron_core",
        2,
        their_names(path),
        tmp_path / "theirs",
        2,
        seconds=200,
    )
    weights, source = open_megatron_lm(str(tmp_path / "theirs"), str(path)), HfFolder(path)
    assert weights is not None and set(weights.shapes()) == set(source.shapes())
    for name, tensor in weights.named():
        assert torch.equal(tensor, source.get(name)), name


def test_files_of_ranks_with_other_layers_on_a_stage_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slime.config.layout import ParallelLayout
    from slime.plugins.megatron import trained_model

    (tmp_path / "trainer.json").write_text(
        '{"format": "megatron", "ckpt_format": "torch", "layout": {}}'
    )
    stage = torch.nn.ModuleDict({"layer": torch.nn.Linear(2, 2)})
    monkeypatch.setattr(
        trained_model.rank_files, "read_weights", lambda *given: [{"other": torch.zeros(2)}]
    )
    model: Any = SimpleNamespace(chunks=[stage], layout=ParallelLayout())
    with pytest.raises(trained_model.MegatronError, match="pipeline stages had other layers"):
        trained_model.load_weights(model, tmp_path)


def test_an_export_contains_the_layers_for_multi_token_prediction(tmp_path: Path) -> None:
    path = save_family("glm4_moe", tmp_path / "model")
    file, config = path / "model.safetensors", json.loads((path / "config.json").read_text())
    name = f"model.layers.{config['num_hidden_layers']}.eh_proj.weight"
    tensors = {**load_file(file), name: torch.randn(32, 64)}
    save_file(tensors, file, metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    run_ranks("loading_ranks:export", 2, path, tmp_path / "out", 2, seconds=200)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert set(exported) == set(tensors) and all(
        torch.equal(exported[each], x) for each, x in tensors.items()
    )
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    )
