"""The CPU scripts of the examples, from their first line to their last, on a tiny random model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from example_scripts import EXAMPLES
from scripted_engine import byte_tokenizer

VISION = ("geo3k_vlm", "geo3k_vlm_multi_turn")  # these make a model of their own, which is tiny
ELSEWHERE = {
    "reward_model": "its encoder is downloaded; tests/rollout/test_reward_models.py has an encoder of its own",
    "reproducibility": "its four runs are those of tests/e2e/test_train.py: killed, resumed and compared bit "
    "for bit",
    "train_infer_mismatch_helper": "its six runs take a minute; test_train_infer_mismatch_helper.py reads its settings",
    "multi_node": "it starts a Ray cluster; tests/e2e/test_seed_commands.py does the same",
}
SCRIPTS = sorted(
    path for path in EXAMPLES.glob("*/run_cpu.sh") if path.parent.name not in ELSEWHERE
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=8192, bos_token_id=None, eos_token_id=256, pad_token_id=256,
    )  # fmt: skip
    folder = byte_tokenizer(tmp_path_factory.mktemp("tiny"))
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.long  # the functions of each example have tests of their own
@pytest.mark.slow
@pytest.mark.real
@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.parent.name)
def test_the_script_of_an_example_runs_to_its_end(
    script: Path, model: Path, tmp_path: Path
) -> None:
    """Its own comparisons at the end included: of a resumed run with a whole one, for instance.

    Each run is one process, because several take three times as long.
    """
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\ncase "$1" in */train.py|*/train_async.py) set -- "$@" --inline ;; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    own = {
        "SLIME_PYTHON": str(python),
        "OUTPUT_DIR": str(tmp_path),
        "NUM_ROLLOUT": "2",
        "ROWS": "2",
    }
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("SGLANG", "SLIME_DATASETS")
    } | own
    if script.parent.name not in VISION:
        environment["MODEL"] = str(model)
    done = subprocess.run(
        ["bash", str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert any(tmp_path.glob("*/summary.json"))
