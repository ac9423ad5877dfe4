"""Layers for multi-token prediction: an export without them says so, in words and in config.json."""

from __future__ import annotations

import json
from pathlib import Path

from slime.weights.hf_folder import copy_config, without_mtp_layers


def test_config_of_an_export_names_no_layers_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "glm4_moe", "num_nextn_predict_layers": 1}))
    changes, notice = without_mtp_layers(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    copy_config(tmp_path, out, **changes)
    assert json.loads((out / "config.json").read_text()) == {"model_type": "glm4_moe", "num_nextn_predict_layers": 0}
    assert notice and "1 layer(s) for multi-token prediction" in notice and "not trained and not written" in notice


def test_other_models_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert without_mtp_layers(tmp_path) == ({}, None)
