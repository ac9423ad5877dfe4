"""The folders that ``benchmarks/random_model.py`` writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import random_model


@pytest.mark.parametrize("shape", [shape for shape in random_model.FAMILIES if "gpt-oss" in shape])
def test_the_limit_of_gpt_oss_is_written(shape: str, tmp_path: Path) -> None:
    """transformers 5.12 to 5.17 do not write it unless it is given, and SGLang has no default for it."""
    random_model.make_config(shape).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["swiglu_limit"] == 7.0
