"""Every family on one rank: logits of transformers, weights bit for bit, and what an embedded
engine gets of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launch import run_ranks
from tiny_families import CONFIGS, save_family

sys.path += [
    str(Path(__file__).resolve().parents[2] / part) for part in ("engines", "plugins/embedded")
]
from engine_parts import make_tokenizer

pytestmark = [pytest.mark.megatron, pytest.mark.real, pytest.mark.slow]


def test_logits_weights_and_engine(tmp_path: Path) -> None:
    """Log-probs and entropies to 1e-5 of transformers, in the engine after a weight update to
    1e-4.
    """
    folders = {}
    for name in CONFIGS:
        folders[name] = (
            save_family(name, tmp_path / name),
            save_family(name, tmp_path / f"{name} other", seed=1),
        )
        make_tokenizer().save_pretrained(folders[name][1])
    run_ranks("exact_ranks:compare", 1, folders, seconds=400)
