"""Exports in another dtype, or as the source stores its weights (``--save-hf-dtype``)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1] / "models"))
from tiny_checkpoints import (
    FP8_CONFIG,
    INT4_CONFIG,
    MXFP4_CONFIG,
    deepseek_config,
    gpt_oss_config,
    llama_config,
    moe_config,
    read_tensors,
    rewrite,
    save_model,
    to_block_fp8,
    to_int4,
    to_mxfp4,
    to_scaled_fp8,
)

from slime.backends.fsdp.hf_weights import save_hf_checkpoint
from slime.models.loading import load_hf_model
from slime.models.shards import ModelError
from slime.models.stored import StoredWeights
from slime.weights.hf_folder import ExportForm

Quantize = Callable[[dict[str, Tensor]], dict[str, Tensor]]
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
SOURCES: dict[str, tuple[Any, dict[str, Any] | None, Quantize]] = {
    "DeepSeek's block FP8": (
        deepseek_config(),
        {**FP8_CONFIG, "weight_block_size": [16, 16]},
        lambda t: to_block_fp8(t, 16),
    ),
    "FP8 with scales of activations": (llama_config(), STATIC, lambda t: to_scaled_fp8(t, False)),
    "INT4 of experts": (moe_config(), INT4_CONFIG, lambda t: to_int4(t, 16)),
    "MXFP4 of gpt-oss": (gpt_oss_config(), MXFP4_CONFIG, to_mxfp4),
    "not quantized": (llama_config(), None, lambda t: t),
}


def source_of(name: str, folder: Path) -> Path:
    config, quantization, quantize = SOURCES[name]
    plain = save_model(config, folder / "plain", torch.bfloat16)
    more = {} if quantization is None else {"quantization_config": quantization}
    return rewrite(plain, folder / "source", quantize(read_tensors(plain)), **more)


@pytest.mark.parametrize("name", SOURCES)
def test_an_untrained_export_has_the_bytes_of_its_source(name: str, tmp_path: Path) -> None:
    source = source_of(name, tmp_path)
    model = load_hf_model(source, torch.float32, "cpu", "eager")
    save_hf_checkpoint(
        model, tmp_path / "out", torch.float32, str(source), writer=True, choice="source"
    )
    want, got = read_tensors(source), read_tensors(tmp_path / "out")
    assert set(got) == set(want)
    for key, tensor in want.items():
        assert got[key].dtype == tensor.dtype, key
        assert torch.equal(
            got[key].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)
        ), key
    configs = [
        json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "out")
    ]
    assert (
        configs[1].get("quantization_config")
        == configs[0].get("quantization_config")
        == SOURCES[name][1]
    )
    assert configs[1]["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("name", "step"),
    [("DeepSeek's block FP8", 0.05), ("INT4 of experts", 0.1), ("MXFP4 of gpt-oss", 0.2)],
)
def test_a_trained_export_is_near_its_weights(name: str, step: float, tmp_path: Path) -> None:
    """Of weights that are no longer those of the source; what is not quantized is rounded once,
    from float32.
    """
    source = source_of(name, tmp_path)
    model = load_hf_model(source, torch.float32, "cpu", "eager")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.2 * torch.randn(parameter.shape, generator=generator)).mul_(3)
    exact, out = tmp_path / "exact", tmp_path / "out"
    save_hf_checkpoint(model, exact, torch.float32, str(source), writer=True)
    save_hf_checkpoint(model, out, torch.float32, str(source), writer=True, choice="source")
    want, got = StoredWeights(exact), StoredWeights(out)
    assert set(got.plan.weights) == set(StoredWeights(source).plan.weights)
    for key in want.shapes():
        value = want.get(key)
        if key in got.plan.weights:
            assert float((got.get(key).float() - value).norm()) <= step * float(value.norm()), key
        else:
            assert torch.equal(got.get(key), value.to(got.get(key).dtype)), key
    load_hf_model(out, torch.float32, "cpu", "eager")


def test_dtypes_by_name(tmp_path: Path) -> None:
    source = save_model(llama_config(), tmp_path / "model")
    model = load_hf_model(source, torch.float32, "cpu", "eager")
    save_hf_checkpoint(
        model, tmp_path / "out", torch.float32, str(source), writer=True, choice="bfloat16"
    )
    assert {t.dtype for t in read_tensors(tmp_path / "out").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    given = {bias: torch.tensor([8.01, 8.02]), "model.norm.weight": torch.ones(2)}
    written = dict(ExportForm("bfloat16", source, True).tensors(iter(given.items())))
    assert torch.equal(written[bias], given[bias]), "rounded, it would choose other experts"
    assert written["model.norm.weight"].dtype == torch.bfloat16


def test_an_error_comes_when_every_tensor_was_read(tmp_path: Path) -> None:
    """Other ranks read the stream too, and would wait for this one."""
    source = source_of("DeepSeek's block FP8", tmp_path)
    weights, read = StoredWeights(source), []
    quantized = next(iter(weights.plan.weights))

    def stream(skip: str = "") -> Iterator[tuple[str, Tensor]]:
        for name in weights.shapes():
            read.append(name)
            if name != skip:
                yield (
                    name,
                    torch.zeros(3, 3) if name == quantized and not skip else weights.get(name),
                )

    with pytest.raises(ModelError, match=r"\[3, 3\]"):
        list(ExportForm("source", source, True).tensors(stream()))
    assert len(read) == len(weights.shapes())
    with pytest.raises(ModelError, match="the model does not write"):
        list(ExportForm("source", source, True).tensors(stream(quantized)))
    with pytest.raises(ModelError, match="--hf-checkpoint"):
        list(ExportForm("source", None, True).tensors(stream()))
    assert len(read) == 3 * len(weights.shapes())
    names = [name for name, _ in ExportForm("source", None, False).tensors(stream())]
    assert names == list(weights.shapes())
