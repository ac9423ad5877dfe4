"""Whole runs with checkpoints that are incomplete, quantized or of another program."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path += [
    str(Path(__file__).resolve().parents[1] / room) for room in ("models", "plugins/megatron")
]
from megatron_lm_folders import stacked, their_names, write
from tiny_checkpoints import FP8_CONFIG, to_block_fp8

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


def copy_with(
    model: Path, target: Path, tensors: dict[str, torch.Tensor], **config: object
) -> Path:
    shutil.copytree(model, target)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**values, **config}))
    return target


def test_what_is_wrong_with_checkpoints_is_told_together_before_any_process_starts(
    runner, flags, tiny_model
) -> None:
    tensors = load_file(tiny_model / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors[f"{name}_renamed"] = tensors.pop(name)
    model = copy_with(tiny_model, runner.tmp / "renamed", tensors)
    theirs = runner.tmp / "theirs"
    (theirs / "iter_0000100").mkdir(parents=True)
    (theirs / "latest_checkpointed_iteration.txt").write_text("100")
    words = ["--hf-checkpoint", model, "--load", theirs, "--save", theirs, "--save-interval", 1]
    result = runner.inline(
        *flags,
        *words,
    )
    assert result.code == 2
    for said in (
        f"lacks 1 tensors: {name} (it has {name}_renamed",
        "--save",
        "--load",
        "slime did not write",
    ):
        assert said in result.output, result.output
    assert not (runner.tmp / "outputs").exists()
    assert sorted(path.name for path in theirs.iterdir()) == [
        "iter_0000100",
        "latest_checkpointed_iteration.txt",
    ]


@pytest.mark.slow
def test_trainer_and_engine_read_the_same_weights_from_a_quantized_checkpoint(
    runner, flags, tiny_model
) -> None:
    """Block FP8: the gap between their log-probs is that of a plain checkpoint, and what is
    exported is plain.
    """
    tensors = to_block_fp8(load_file(tiny_model / "model.safetensors"), 32)
    assert sum(t.dtype == torch.float8_e4m3fn for t in tensors.values()) == 14
    quantization = {**FP8_CONFIG, "weight_block_size": [32, 32]}
    model = copy_with(tiny_model, runner.tmp / "fp8", tensors, quantization_config=quantization)
    export = runner.tmp / "export"
    words = [
        "--hf-checkpoint",
        model,
        "--num-rollout",
        1,
        "--save-hf",
        export / "{rollout_id}",
        "--save-interval",
        1,
    ]
    result = runner.inline(*flags, *words)
    assert result.code == 0, result.output
    (row,) = result.metrics()
    assert row["train/train_rollout_logprob_abs_diff"] < 1e-4
    exported = load_file(export / "0" / "model.safetensors")
    assert all(t.dtype in (torch.float32, torch.bfloat16) for t in exported.values())
    assert "quantization_config" not in json.loads((export / "0" / "config.json").read_text())


@pytest.mark.slow
def test_a_run_starts_from_the_weights_of_megatron_lm(runner, flags, tiny_model) -> None:
    """Engines get them with the first sync; with a learning rate of 0 the export has them
    unchanged. The snapshot goes to a folder of its own."""
    tensors = load_file(tiny_model / "model.safetensors")
    other = {name: tensor * 0.9 if tensor.ndim == 2 else tensor for name, tensor in tensors.items()}
    trained = copy_with(tiny_model, runner.tmp / "trained", other)
    theirs = write(runner.tmp / "theirs", stacked(their_names(trained, padded=512)))
    before = sorted(path.name for path in theirs.rglob("*"))
    export, save = runner.tmp / "export", runner.tmp / "save"
    words = ["--load", theirs, "--ref-load", theirs, "--use-kl-loss", "--lr", 0, "--num-rollout", 1]
    result = runner.inline(
        *flags, *words, "--save", save, "--save-interval", 1, "--save-hf", export / "{rollout_id}"
    )
    assert result.code == 0, result.output
    assert "only the weights are read from this checkpoint of Megatron-LM" in result.output
    (row,) = result.metrics()
    assert row["train/train_rollout_logprob_abs_diff"] < 1e-4 and row[
        "train/kl_loss"
    ] == pytest.approx(0, abs=1e-6)
    exported = load_file(export / "0" / "model.safetensors")
    for name, tensor in exported.items():
        assert torch.equal(tensor, other[name].to(tensor.dtype)), name
    assert (save / "iter_0000000" / "manifest.json").is_file()
    assert sorted(path.name for path in theirs.rglob("*")) == before
