"""SGLang's own model takes quantized weights from a sync in the layout that it loads from a
checkpoint.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config, Qwen3MoeConfig

from slime.models.fp8 import write_fp8
from slime.models.fp8_format import Fp8Format

sys.path.append(str(Path(__file__).parents[1] / "models"))
from tiny_checkpoints import save_model

pytestmark = [pytest.mark.sglang, pytest.mark.long]
HERE = Path(__file__).parent


def quantized(folder: Path, kind: str, **config: Any) -> tuple[Path, Path]:
    shape = dict(
        hidden_size=256,
        intermediate_size=384,
        head_dim=64,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    shape |= dict(vocab_size=64, num_hidden_layers=2, max_position_embeddings=64)
    if kind == "experts":
        experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128)
        made: Any = Qwen3MoeConfig(tie_word_embeddings=False, **shape, **experts, **config)
    else:
        made = Qwen3Config(tie_word_embeddings=False, **shape, **config)
    plain = save_model(made, folder / "plain")
    (folder / "fp8").mkdir()
    write_fp8(plain, folder / "fp8", Fp8Format("block", 1, 2), "bfloat16")
    return plain, folder / "fp8"


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_sync_gives_what_a_checkpoint_gives(kind: str, tmp_path: Path) -> None:
    _, first = quantized(tmp_path / "first", kind)
    plain, second = quantized(tmp_path / "second", kind, initializer_range=0.1)
    script = HERE / "sglang_fp8_load.py"
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, str(script), str(first), str(second), str(plain)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    small = [name for name, dtype in found["dtypes"].items() if dtype == "float8_e4m3fn"]
    mlp = ("mlp.gate_up_proj.weight", "mlp.down_proj.weight")
    if kind == "experts":
        mlp = ("mlp.experts.w13_weight", "mlp.experts.w2_weight")
    parts = ("self_attn.qkv_proj.weight", "self_attn.o_proj.weight", *mlp)
    assert sorted(small) == sorted(f"model.layers.{i}.{part}" for i in range(2) for part in parts)
    assert found["different"] == [], (
        "a parameter differs from that of the model that was loaded from the checkpoint"
    )
    norms_and_cache = {
        name for name in found["dtypes"] if name.endswith(("norm.weight", "k_scale", "v_scale"))
    }
    assert set(found["unchanged"]) == norms_and_cache, (
        "norms are 1 in both; the cache has no scales here"
    )
