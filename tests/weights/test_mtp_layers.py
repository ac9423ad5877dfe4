"""Layers for multi-token prediction: an export without them says so, in words and in config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from slime.backends.fsdp.hf_weights import save_hf_checkpoint
from slime.models.loading import load_hf_model
from slime.weights.hf_folder import copy_config, without_mtp_layers


def test_config_of_an_export_names_no_layers_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "glm4_moe", "num_nextn_predict_layers": 1}))
    changes, notice = without_mtp_layers(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    copy_config(tmp_path, out, **changes)
    assert json.loads((out / "config.json").read_text()) == {"model_type": "glm4_moe", "num_nextn_predict_layers": 0}
    assert notice and "1 layer(s) for multi-token prediction" in notice and "not trained and not written" in notice


def test_counts_inside_the_text_part_are_set_to_zero(tmp_path: Path) -> None:
    text = {"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    changes, notice = without_mtp_layers(tmp_path)
    assert changes == {"text_config": {"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 0}}
    assert notice and "2 layer(s)" in notice


def test_other_models_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert without_mtp_layers(tmp_path) == ({}, None)


def test_an_export_of_fsdp_counts_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers builds a model without these layers, but its config keeps their count."""
    config = Glm4MoeConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, moe_intermediate_size=8, n_routed_experts=2, num_experts_per_tok=1,
        first_k_dense_replace=1, num_nextn_predict_layers=1, pad_token_id=0,
    )  # fmt: skip
    Glm4MoeForCausalLM(config).save_pretrained(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    model = load_hf_model(tmp_path / "model", torch.float32, "cpu")
    save_hf_checkpoint(model, tmp_path / "out", torch.float32, str(tmp_path / "model"), writer=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert "1 layer(s) for multi-token prediction" in caplog.text
    load_hf_model(tmp_path / "out", torch.float32, "cpu")
