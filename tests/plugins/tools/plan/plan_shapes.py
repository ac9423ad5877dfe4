"""The configs of a dense model and of one with experts, and how tests read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime.plugins.tools.plan.setups import PlannedModel

DENSE: dict[str, Any] = dict(
    hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
    head_dim=128, hidden_act="silu", vocab_size=151936, tie_word_embeddings=True,
)  # fmt: skip
EXPERTS: dict[str, Any] = DENSE | dict(
    hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_key_value_heads=4, num_experts=128,
    num_experts_per_tok=8, moe_intermediate_size=768, tie_word_embeddings=False,
)  # fmt: skip


def read(folder: Path, config: dict[str, Any]) -> PlannedModel:
    (folder / "config.json").write_text(json.dumps(config))
    model = PlannedModel.from_checkpoint(str(folder))
    assert model is not None
    return model
