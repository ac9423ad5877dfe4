"""Weights as 8-bit floats: their values, which weights are quantized, and checkpoints of them."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import llama_config, read_tensors, save_model

from slime.models.fp8 import DTYPE, LARGEST, dequantize, fp8_folder, quantize, write_fp8
from slime.models.fp8_format import Fp8Format, Granularity, fp8_layout
from slime.models.stored import StoredWeights

GRANULARITIES: tuple[Granularity, ...] = ("block", "channel", "tensor")
SCALES = {"block": (3, 2), "channel": (300, 1), "tensor": (1,)}


def matrix(rows: int = 300, columns: int = 200) -> torch.Tensor:
    """Rows of very different sizes, one of zeros."""
    torch.manual_seed(0)
    weight = torch.randn(rows, columns) * torch.logspace(-3, 1, rows)[:, None]
    weight[5] = 0
    return weight


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_values_are_within_half_a_step_of_the_weights(granularity: Granularity) -> None:
    weight = matrix()
    values, scales = quantize(weight, granularity)
    assert values.dtype == DTYPE and values.shape == weight.shape and values.is_contiguous()
    assert scales.dtype == torch.float32 and scales.shape == SCALES[granularity]
    error = (dequantize(values, scales) - weight).abs()
    # E4M3 has three bits after the leading one: a relative error of 2**-4, or half of the smallest
    # step of 2**-9.
    whole = dequantize(torch.ones_like(weight), scales)
    assert (error <= torch.maximum(weight.abs() * 2.0**-4, whole * 2.0**-10) * (1 + 1e-6)).all()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_largest_value_of_each_scale_is_exact(granularity: Granularity) -> None:
    weight = matrix(256, 256).to(torch.bfloat16)
    values, scales = quantize(weight, granularity)
    assert values.float().abs().max() == LARGEST and torch.isfinite(values.float()).all()
    again = quantize(dequantize(values, scales), granularity)
    # Quantizing what an engine has gives the same values: a restart loses nothing more.
    assert torch.equal(again[0].float(), values.float()) and torch.allclose(
        again[1], scales, rtol=1e-6
    )


def test_a_block_is_scaled_by_its_own_largest_value() -> None:
    weight = torch.ones(256, 256)
    weight[128:, 128:] = 8.0
    values, scales = quantize(weight, "block")
    assert torch.allclose(scales * LARGEST, torch.tensor([[1.0, 1.0], [1.0, 8.0]]))
    assert (values.float() == LARGEST).all()
    assert quantize(torch.zeros(3, 4), "block")[0].float().eq(0).all()


def test_scales_of_another_shape_are_refused() -> None:
    values, _ = quantize(matrix(), "block")
    with pytest.raises(ValueError, match=r"2, 2.*shape \(300, 200"):
        dequantize(values, torch.ones(2, 2))


def shapes(
    q: int = 4096, kv: int = 1024, hidden: int = 2560, inter: int = 9728
) -> dict[str, tuple[int, ...]]:
    layer = "model.layers.0."
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (1000, hidden),
        "lm_head.weight": (1000, hidden),
        "model.norm.weight": (hidden,),
        f"{layer}self_attn.q_norm.weight": (128,),
        f"{layer}self_attn.q_proj.weight": (q, hidden),
        f"{layer}self_attn.q_proj.bias": (q,),
        f"{layer}self_attn.k_proj.weight": (kv, hidden),
        f"{layer}self_attn.v_proj.weight": (kv, hidden),
        f"{layer}self_attn.o_proj.weight": (hidden, q),
        f"{layer}mlp.gate_proj.weight": (inter, hidden),
        f"{layer}mlp.up_proj.weight": (inter, hidden),
        f"{layer}mlp.down_proj.weight": (hidden, inter),
    }
    return found


def short(layout_names: frozenset[str]) -> set[str]:
    return {name.split(".")[-2] for name in layout_names}


def test_projections_are_quantized_and_nothing_else() -> None:
    layout = fp8_layout(shapes(), Fp8Format("block", ranks=2, key_value_heads=8))
    assert short(layout.names) == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    }
    assert layout.kept == () and layout.quantization_config()["weight_block_size"] == [128, 128]


def test_shapes_that_blocks_do_not_divide_are_kept_with_their_siblings() -> None:
    """SmolLM2: 576 wide, three heads of 64 for keys and values."""
    small = shapes(q=576, kv=192, hidden=576, inter=1536)
    one = fp8_layout(small, Fp8Format("block", ranks=1, key_value_heads=3))
    assert short(one.names) == {"down_proj"}, "the columns of all others are no multiple of 128"
    assert "model.layers.0.self_attn.q_proj" in one.kept
    assert len(fp8_layout(small, Fp8Format("block")).names) == 7, (
        "the embedded engine takes any shape"
    )
    # 9728 rows are 76 blocks, which eight ranks cannot divide.
    eight = fp8_layout(shapes(), Fp8Format("block", ranks=8, key_value_heads=8))
    assert short(eight.names) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    sixteen = fp8_layout(shapes(), Fp8Format("block", ranks=16, key_value_heads=8))
    assert {"q_proj", "k_proj", "v_proj"} <= short(sixteen.names), (
        "two ranks have the same key-value head"
    )


def test_all_experts_of_a_layer_are_quantized_or_none() -> None:
    expert = {
        f"model.layers.0.mlp.experts.{i}.{name}_proj.weight": (256, 128)
        if name != "down"
        else (128, 256)
        for i in range(3)
        for name in ("gate", "up", "down")
    }
    assert len(fp8_layout(expert, Fp8Format("block", ranks=2)).names) == 9
    assert not fp8_layout(expert, Fp8Format("block", ranks=4)).names
    expert["model.layers.0.mlp.gate.weight"] = (128, 128)
    assert "model.layers.0.mlp.gate.weight" not in fp8_layout(expert, Fp8Format("block")).names, (
        "a router"
    )


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_quantized_folder_is_read_as_its_dequantized_weights(
    granularity: Granularity, tmp_path: Path
) -> None:
    source = save_model(llama_config(hidden_size=64, intermediate_size=160), tmp_path / "plain")
    (source / "tokenizer.json").write_text("{}")
    (tmp_path / "small").mkdir()
    layout = write_fp8(source, tmp_path / "small", Fp8Format(granularity), "float32")
    assert len(layout.names) == 14
    read, plain = StoredWeights(tmp_path / "small"), StoredWeights(source)
    assert read.shapes() == plain.shapes() and read.plan.weights.keys() == layout.names
    for name in plain.shapes():
        expected = plain.get(name)
        if name in layout.names:
            expected = dequantize(*quantize(expected, granularity))
        assert torch.equal(read.get(name), expected), name
    stored = read_tensors(tmp_path / "small")
    assert sum(t.dtype == DTYPE for t in stored.values()) == 14
    assert (tmp_path / "small" / "tokenizer.json").is_file()
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert config["dtype"] == "float32" and config["hidden_size"] == 64


def test_the_folder_is_made_once_and_anew_for_other_files(tmp_path: Path) -> None:
    source = save_model(llama_config(), tmp_path / "plain")
    how = Fp8Format("block")
    first = fp8_folder(str(source), how, cache=tmp_path / "cache")
    stamp = (first / "config.json").stat().st_mtime_ns
    (tmp_path / "cache" / f"{first.name}.part").mkdir()  # of a process that was killed on the way
    assert fp8_folder(str(source), how, cache=tmp_path / "cache") == first
    assert (first / "config.json").stat().st_mtime_ns == stamp
    assert fp8_folder(str(source), Fp8Format("tensor"), cache=tmp_path / "cache") != first
    save_model(llama_config(initializer_range=0.5), source)
    assert fp8_folder(str(source), how, cache=tmp_path / "cache") != first
    settings = source / "generation_config.json"
    settings.write_text(json.dumps({"eos_token_id": 77}))  # engines end sequences as this file says
    assert (
        fp8_folder(str(source), how, cache=tmp_path / "cache") / settings.name
    ).read_text() == settings.read_text()


def test_two_processes_make_one_folder(tmp_path: Path) -> None:
    source = save_model(llama_config(), tmp_path / "plain")
    with multiprocessing.get_context("fork").Pool(2) as pool:
        jobs = [
            pool.apply_async(fp8_folder, (str(source), Fp8Format("block"), None, tmp_path / "c"))
            for _ in "ab"
        ]
        folders = {job.get(60) for job in jobs}
    assert len(folders) == 1 and (folders.pop() / "config.json").is_file()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_largest_of_small_weights_gets_the_largest_value(granularity: Granularity) -> None:
    """With weights of the usual size (0.02 or less) the scales are small, and all of the format is
    used.
    """
    for size in (0.02, 1e-6):
        weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)) * size
        assert quantize(weight, granularity)[0].float().abs().max() == LARGEST
