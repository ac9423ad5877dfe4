"""The converters read quantized checkpoints and write plain ones."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.models.loading import load_hf_model
from slime.weights.hf_folder import HfFolder

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.append(str(CHECKOUT / "tests" / "models"))
from every_family import save_tiny  # noqa: E402
from tiny_checkpoints import (  # noqa: E402
    FP8_CONFIG,
    INT4_CONFIG,
    MXFP4_CONFIG,
    deepseek_config,
    gpt_oss_config,
    read_tensors,
    rewrite,
    save_model,
    to_block_fp8,
    to_int4,
    to_mxfp4,
)

LAYOUTS: dict[str, Any] = {
    "fp8": (deepseek_config, FP8_CONFIG, to_block_fp8),
    "int4": (deepseek_config, INT4_CONFIG, to_int4),
    "mxfp4": (gpt_oss_config, MXFP4_CONFIG, to_mxfp4),
}


def run(monkeypatch: pytest.MonkeyPatch, tool: str, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", [tool, *map(str, words)])
    runpy.run_path(str(CHECKOUT / "tools" / f"{tool}.py"), run_name="__main__")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(deepseek_config(), tmp_path_factory.mktemp("plain"), torch.bfloat16)


def test_a_model_with_gated_delta_nets_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the shapes of its convolutions, and gates in the place that they had."""
    source = save_tiny("Qwen3.5-MoE", tmp_path / "hf")
    run(
        monkeypatch,
        "convert_hf_to_torch_dist",
        "--hf-checkpoint",
        source,
        "--save",
        tmp_path / "dist",
    )
    run(
        monkeypatch,
        "convert_torch_dist_to_hf",
        "--input-dir",
        tmp_path / "dist",
        "--output-dir",
        tmp_path / "back",
    )
    before, after = read_tensors(source), read_tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def quantized(plain: Path, folder: Path, layout: str) -> Path:
    model, config, convert = LAYOUTS[layout]
    if model is not deepseek_config:
        plain = save_model(model(), folder.parent / "another", torch.bfloat16)
    return rewrite(plain, folder, convert(read_tensors(plain)), quantization_config=config)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_to_megatron_and_back_gives_plain_weights(
    plain: Path, tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights that come back are those that the quantized checkpoint stands for, and
    config.json says so.
    """
    source = quantized(plain, tmp_path / "quantized", layout)
    expected = HfFolder(source)
    run(
        monkeypatch,
        "convert_hf_to_torch_dist",
        "--hf-checkpoint",
        source,
        "--save",
        tmp_path / "dist",
    )
    back = tmp_path / "back"
    run(
        monkeypatch,
        "convert_torch_dist_to_hf",
        "--input-dir",
        tmp_path / "dist",
        "--output-dir",
        back,
    )
    got = read_tensors(back)
    assert set(got) == set(expected.shapes())
    for name, tensor in got.items():
        assert tensor.is_floating_point() and torch.equal(tensor, expected.get(name)), name
    assert "quantization_config" not in json.loads((back / "config.json").read_text())
    before, after = (
        load_hf_model(folder, torch.float32, "cpu", attn_implementation="eager").state_dict()
        for folder in (source, back)
    )
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_a_plain_copy_of_a_quantized_checkpoint(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = quantized(plain, tmp_path / "quantized", "fp8"), tmp_path / "copy"
    (source / "tokenizer.json").write_text("{}")
    (source / "generation_config.json").write_text('{"eos_token_id": 5}')
    run(monkeypatch, "dequantize_hf", "--hf-checkpoint", source, "--save", target)
    expected = HfFolder(source)
    assert all(
        torch.equal(tensor, expected.get(name)) for name, tensor in read_tensors(target).items()
    )
    assert "quantization_config" not in json.loads((target / "config.json").read_text())
    assert (target / "tokenizer.json").is_file() and (target / "generation_config.json").is_file()
    with pytest.raises(SystemExit):
        run(monkeypatch, "dequantize_hf", "--hf-checkpoint", plain, "--save", tmp_path / "none")


def test_a_vocabulary_larger_than_the_stored_one_is_refused(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(
        monkeypatch,
        "convert_hf_to_torch_dist",
        "--hf-checkpoint",
        plain,
        "--save",
        tmp_path / "dist",
    )
    words = ["--input-dir", tmp_path / "dist", "--output-dir", tmp_path / "back", "--vocab-size"]
    with pytest.raises(SystemExit):
        run(monkeypatch, "convert_torch_dist_to_hf", *words, 200)
    assert (
        "--vocab-size 200" in capsys.readouterr().err
        and not (tmp_path / "back" / "config.json").exists()
    )
    run(monkeypatch, "convert_torch_dist_to_hf", *words, 100)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["vocab_size"] == 100
    assert (
        load_hf_model(tmp_path / "back", torch.float32, "cpu")
        .get_input_embeddings()
        .weight.shape[0]
        == 100
    )


def test_an_incomplete_checkpoint_is_not_converted(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = read_tensors(plain)
    gone = "model.layers.1.mlp.experts.3.up_proj.weight"
    del tensors[gone]
    source = rewrite(plain, tmp_path / "part", tensors)
    with pytest.raises(SystemExit):
        run(
            monkeypatch,
            "convert_hf_to_torch_dist",
            "--hf-checkpoint",
            source,
            "--save",
            tmp_path / "dist",
        )
    assert (
        f"lacks 1 tensors: {gone}" in capsys.readouterr().err and not (tmp_path / "dist").exists()
    )


def test_an_adapter_is_no_model(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A snapshot of a run with --lora-rank."""
    run(
        monkeypatch,
        "convert_hf_to_torch_dist",
        "--hf-checkpoint",
        plain,
        "--save",
        tmp_path / "dist",
    )
    file = tmp_path / "dist" / "trainer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "lora": {"base": str(plain)}}))
    with pytest.raises(SystemExit):
        run(
            monkeypatch,
            "convert_torch_dist_to_hf",
            "--input-dir",
            tmp_path / "dist",
            "--output-dir",
            tmp_path / "hf",
        )
    assert "adapter of" in (told := capsys.readouterr().err) and "slime merge-lora" in told
