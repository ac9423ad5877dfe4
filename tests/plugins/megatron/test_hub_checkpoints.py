"""Public checkpoints of Qwen3.5 and Qwen3.6: the text part goes through Megatron's weights, and the
rest of the checkpoint comes back unchanged.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from hub_checkpoints import save_dense, save_experts, tensors_of, together, untrained
from launch import run_ranks
from make_args import rule_problems

from slime.config.args import Args
from slime.plugins.megatron.flags import check_family
from slime.plugins.megatron.maps.family import family_of, text_config
from slime.weights.hf_folder import HfFolder

CHECKOUT = Path(__file__).resolve().parents[3]


def convert(monkeypatch: pytest.MonkeyPatch, name: str, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
    runpy.run_path(str(CHECKOUT / "tools" / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize("kind", ["dense", "experts", "fp8"])
def test_there_and_back_has_every_tensor(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "hf"
    source = save_dense(source) if kind == "dense" else save_experts(source, kind == "fp8")
    dist, back = tmp_path / "dist", tmp_path / "back"
    convert(monkeypatch, "convert_hf_to_torch_dist", "--hf-checkpoint", source, "--save", dist)
    convert(monkeypatch, "convert_torch_dist_to_hf", "--input-dir", dist, "--output-dir", back)
    stored, got = tensors_of(source), tensors_of(back)
    rest = untrained(stored)
    assert rest.keys() == untrained(got).keys() and {"mtp.norm.weight"} < rest.keys()
    for name, tensor in rest.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name
    if kind == "experts":
        got = together(got)
    plain = HfFolder(source)
    assert got.keys() == plain.shapes().keys()
    for name, tensor in got.items():
        assert torch.equal(tensor, plain.get(name)), name
    config = json.loads((back / "config.json").read_text())
    assert "vision_config" in config and config["text_config"]["mtp_num_hidden_layers"] == 1
    assert json.loads((back / "generation_config.json").read_text())["eos_token_id"] == [2, 1]


def test_only_families_whose_text_part_is_known_are_accepted(tmp_path: Path) -> None:
    folder = save_dense(tmp_path / "qwen")
    args = Args(train_backend="megatron", hf_checkpoint=str(folder))
    assert check_family(args) == []
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["model_type"] = "gemma3_text"
    (folder / "config.json").write_text(json.dumps(config))
    (problem,) = check_family(args)
    assert "has a vision part: use --train-backend fsdp" in problem


def test_the_whole_model_decides_whether_embeddings_are_tied(tmp_path: Path) -> None:
    for tied, folder in (True, save_dense(tmp_path / "a")), (False, save_experts(tmp_path / "b")):
        config = text_config(folder)
        settings = family_of(config).settings_of(config.to_dict())
        assert settings["untie_embeddings_and_output_weights"] is not tied


def test_images_are_not_trained() -> None:
    args = Args(train_backend="megatron", multimodal_keys={"image": "images"})
    assert any("--multimodal-keys" in x and "text part" in x for x in rule_problems(args))


@pytest.mark.megatron
def test_ranks_read_experts_in_one_tensor_and_engines_get_the_vision_part(tmp_path: Path) -> None:
    source = save_experts(tmp_path / "hf")
    layouts = [
        {"expert_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2},
    ]
    run_ranks("loading_ranks:name_weights", 2, source, layouts, tmp_path, seconds=300)
    stored = {name: x for name, x in tensors_of(source).items() if not name.startswith("mtp.")}
    for number, layout in enumerate(layouts):
        sent = together(torch.load(tmp_path / f"{number}.pt"))
        assert sent.keys() == stored.keys(), layout
        for name, tensor in stored.items():
            assert torch.equal(sent[name].to(tensor.dtype), tensor), (layout, name)
