"""Layers for multi-token prediction: an export contains those of the checkpoint unchanged, or says
that it has none.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from slime.backends.fsdp.hf_weights import save_hf_checkpoint
from slime.config.parser import check_args
from slime.models.loading import check_checkpoint, load_hf_model
from slime.weights.hf_folder import MtpLayers, write_side_files

CHECKOUT = Path(__file__).resolve().parents[2]
LAYERS = 2


def save_model(folder: Path, **more: Any) -> Path:
    config = Glm4MoeConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, moe_intermediate_size=8, n_routed_experts=2, num_experts_per_tok=1,
        first_k_dense_replace=1, num_nextn_predict_layers=1, pad_token_id=0, attention_bias=False, **more,
    )  # fmt: skip
    Glm4MoeForCausalLM(config).save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 1
    return folder


def mtp_tensors() -> dict[str, Tensor]:
    prefix = f"model.layers.{LAYERS}."
    return {
        f"{prefix}eh_proj.weight": torch.randn(16, 32),
        f"{prefix}shared_head.norm.weight": torch.randn(16).to(torch.bfloat16),
        f"{prefix}mlp.experts.1.up_proj.weight": torch.randn(8, 16),
    }


def add_mtp(folder: Path) -> dict[str, Tensor]:
    file, added = folder / "model.safetensors", mtp_tensors()
    save_file({**load_file(file), **added}, file, metadata={"format": "pt"})
    return added


def assert_carried(folder: Path, added: dict[str, Tensor]) -> None:
    got = load_file(folder / "model.safetensors")
    for name, tensor in added.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 1
    check_checkpoint(folder, by_transformers=True)  # raises if it does not fit


def test_an_export_of_fsdp_contains_the_layers_of_the_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The other weights are trained, those of these layers are not."""
    source = save_model(tmp_path / "model")
    added = add_mtp(source)
    model = load_hf_model(source, torch.float32, "cpu")
    with torch.no_grad():
        model.get_output_embeddings().weight.add_(1)
    save_hf_checkpoint(model, tmp_path / "out", torch.bfloat16, str(source), writer=True)
    assert_carried(tmp_path / "out", added)
    before, after = (
        load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out")
    )
    assert set(before) == set(after) and not torch.equal(
        before["lm_head.weight"], after["lm_head.weight"].float()
    )
    assert "1 layer(s)" in caplog.text


def test_the_converter_of_megatron_weights_carries_the_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_model(tmp_path / "model")
    added = add_mtp(source)

    def run(tool: str, *words: object) -> None:
        monkeypatch.setattr(sys, "argv", [tool, *map(str, words)])
        runpy.run_path(str(CHECKOUT / "tools" / f"{tool}.py"), run_name="__main__")

    run("convert_hf_to_torch_dist", "--hf-checkpoint", source, "--save", tmp_path / "dist")
    run(
        "convert_torch_dist_to_hf",
        "--input-dir",
        tmp_path / "dist",
        "--output-dir",
        tmp_path / "out",
    )
    assert_carried(tmp_path / "out", added)


def test_an_export_counts_no_layers_that_the_files_lack(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers builds a model without these layers, but its config keeps their count."""
    source = save_model(tmp_path / "model")
    model = load_hf_model(source, torch.float32, "cpu")
    save_hf_checkpoint(model, tmp_path / "out", torch.float32, str(source), writer=True)
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    )
    assert "not written" in caplog.text
    load_hf_model(tmp_path / "out", torch.float32, "cpu")


def test_counts_inside_the_text_part_are_set_to_zero(tmp_path: Path) -> None:
    text = {"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 2, "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3_5", "text_config": text})
    )
    mtp = MtpLayers(tmp_path)
    (tmp_path / "out").mkdir()
    write_side_files(tmp_path, tmp_path / "out", mtp, {})
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["text_config"][
            "mtp_num_hidden_layers"
        ]
        == 0
    )
    assert mtp.notice and "2 layer(s)" in mtp.notice


def test_names_of_other_families_and_of_vision_towers(tmp_path: Path) -> None:
    text = {"mtp_num_hidden_layers": 1, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3_5", "text_config": text})
    )
    theirs = [
        "mtp.fc.weight",
        "model.mtp_layers.0.norm.weight",
        "model.language_model.layers.1.norm.weight",
    ]
    others = [
        "model.layers.0.norm.weight",
        "model.visual.layers.5.norm.weight",
        "vision_tower.layers.7.x",
        "lm_head.mtpx",
    ]
    save_file({name: torch.ones(2) for name in theirs + others}, tmp_path / "model.safetensors")
    assert sorted(MtpLayers(tmp_path).names) == sorted(theirs)


def test_other_models_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    mtp = MtpLayers(tmp_path)
    assert (mtp.count, mtp.names, mtp.notice, MtpLayers(None).names) == (0, [], None, [])


def test_the_flags_are_accepted_with_one_notice(tmp_path: Path) -> None:
    words = ["--mtp-num-layers", "1", "--enable-mtp-training", "--mtp-loss-scaling-factor", "0.3"]
    args, problems = check_args([*words, "--hf-checkpoint", str(save_model(tmp_path / "model"))])
    assert not [problem for problem in problems if "mtp" in problem]
    (notice,) = [notice for notice in args.notices if "mtp" in notice]
    assert all(word in notice for word in words if word.startswith("--"))
    assert "--save-hf" in notice and "--hf-checkpoint" in notice
