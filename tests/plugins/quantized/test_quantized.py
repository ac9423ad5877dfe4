"""Quantized checkpoints become the plain weights that they stand for, in every reader."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import (
    FP8_CONFIG,
    INT4_CONFIG,
    MXFP4_CONFIG,
    deepseek_config,
    gpt_oss_config,
    linear_names,
    llama_config,
    read_tensors,
    rewrite,
    save_model,
    to_block_fp8,
    to_int4,
    to_mxfp4,
    to_scaled_fp8,
)

from slime.models.loading import load_hf_model
from slime.models.quantized import scaled
from slime.models.shards import ModelError
from slime.models.stored import StoredWeights
from slime.plugins.quantized.formats import E2M1, unpacked

PER_ROW = {"quant_method": "fbgemm_fp8"}
PER_TENSOR = {"quant_method": "modelopt", "quant_algo": "FP8"}
COMPRESSED_FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {},
}
STATIC_FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
LAYOUTS: dict[str, tuple[dict[str, Any], Callable[..., dict[str, torch.Tensor]], float]] = {
    # relative to the largest value of the block: 3 bits of mantissa
    "block fp8": (FP8_CONFIG, to_block_fp8, 1 / 16),
    "row fp8": (PER_ROW, lambda t: to_scaled_fp8(t, True), 1 / 16),
    "tensor fp8": (PER_TENSOR, lambda t: to_scaled_fp8(t, False), 1 / 16),
    "static fp8": (STATIC_FP8, lambda t: to_scaled_fp8(t, False), 1 / 16),
    "compressed fp8": (COMPRESSED_FP8, lambda t: to_scaled_fp8(t, True), 1 / 16),
    "int4": (INT4_CONFIG, to_int4, 1 / 14),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(deepseek_config(), tmp_path_factory.mktemp("plain"), torch.bfloat16)


def quantized(plain: Path, folder: Path, layout: str) -> Path:
    config, convert, _ = LAYOUTS[layout]
    return rewrite(plain, folder, convert(read_tensors(plain)), quantization_config=config)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_read_is_what_was_quantized(plain: Path, tmp_path: Path, layout: str) -> None:
    """Names, shapes and dtype of the plain checkpoint; values within the rounding of the format."""
    stored, tensors = StoredWeights(quantized(plain, tmp_path, layout)), read_tensors(plain)
    assert stored.shapes() == {name: tuple(t.shape) for name, t in tensors.items()}
    linears = linear_names(tensors)
    assert len(linears) > 20
    for name, tensor in tensors.items():
        got = stored.get(name)
        if name in linears:
            assert got.dtype == torch.bfloat16
            bound = LAYOUTS[layout][2] * float(tensor.float().abs().max())
            assert float((got.float() - tensor.float()).abs().max()) <= bound
            assert float((got.float() - tensor.float()).std()) < 0.12 * float(tensor.float().std())
        else:
            assert torch.equal(got, tensor)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_models_load_with_the_weights_that_are_read(
    plain: Path, tmp_path: Path, layout: str
) -> None:
    folder = quantized(plain, tmp_path, layout)
    stored = StoredWeights(folder)
    model = load_hf_model(folder, torch.float32, "cpu")
    assert getattr(model.config, "quantization_config", None) is None
    again = rewrite(
        plain, tmp_path / "plain again", {name: stored.get(name) for name in stored.shapes()}
    )
    expected = load_hf_model(again, torch.float32, "cpu").state_dict()
    assert all(torch.equal(t, expected[name]) for name, t in model.state_dict().items())


def test_blocks_agree_with_transformers(tmp_path: Path) -> None:
    """Its dequantization wants whole blocks; the values are the same."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    source = save_model(
        llama_config(hidden_size=128, intermediate_size=256, head_dim=64), tmp_path / "plain"
    )
    folder = rewrite(source, tmp_path / "fp8", to_block_fp8(read_tensors(source), 64))
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = {**FP8_CONFIG, "weight_block_size": [64, 64]}
    (folder / "config.json").write_text(json.dumps(values))
    dequantize = FineGrainedFP8Config(weight_block_size=(64, 64), dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=dequantize, dtype=torch.float32
    )
    ours = load_hf_model(folder, torch.float32, "cpu").state_dict()
    assert set(ours) == set(theirs.state_dict())
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor.float(), ours[name]), name


def numpy_blocks(values: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    out = np.empty_like(values)
    for i in range(values.shape[0]):
        for j in range(values.shape[1]):
            out[i, j] = values[i, j] * scales[i // block[0], j // block[1]]
    return out


@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(0, 10**6),
)
@settings(max_examples=60, deadline=None)
def test_every_value_has_the_scale_of_its_block(
    rows: int, columns: int, bm: int, bn: int, seed: int
) -> None:
    numbers = np.random.default_rng(seed)
    values = torch.from_numpy(numbers.normal(size=(rows, columns)).astype("float32")).to(
        torch.float8_e4m3fn
    )
    scales = numbers.uniform(0.1, 2, size=(-(-rows // bm), -(-columns // bn))).astype("float32")
    got = scaled(values, torch.from_numpy(scales), (bm, bn))
    assert np.array_equal(got.numpy(), numpy_blocks(values.float().numpy(), scales, (bm, bn)))


def test_powers_of_two_as_scales() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).to(torch.float8_e4m3fn)
    expected = values.float() * torch.tensor([[0.5], [4.0]])
    assert torch.equal(
        scaled(values, torch.tensor([[126], [129]], dtype=torch.uint8), (1, 2)), expected
    )
    exponents = torch.tensor([[0.5], [4.0]]).to(torch.float8_e8m0fnu)
    assert torch.equal(scaled(values, exponents, (1, 2)), expected)


@given(st.sampled_from([4, 8]), st.integers(1, 20), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_packed_integers_come_back(bits: int, columns: int, seed: int) -> None:
    numbers = np.random.default_rng(seed)
    values = numbers.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), size=(3, columns))
    per_word = 32 // bits
    padded = np.zeros((3, -(-columns // per_word) * per_word), dtype=np.uint64)
    padded[:, :columns] = values + 2 ** (bits - 1)
    words = (
        padded.reshape(3, -1, per_word) << (np.arange(per_word, dtype=np.uint64) * np.uint64(bits))
    ).sum(-1)
    packed = torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())
    assert np.array_equal(unpacked(packed, bits, columns).numpy(), values)


def gpt_oss_experts(seed: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 130, (2, 6, 3), generator=generator, dtype=torch.uint8)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    return {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": torch.randn(2, 6)}


def test_mxfp4_agrees_with_transformers_and_with_the_format(tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

    tensors = gpt_oss_experts()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "mxfp4"}})
    )
    stored, name = StoredWeights(tmp_path), "model.layers.0.mlp.experts.gate_up_proj"
    assert stored.shapes() == {name: (2, 96, 6), f"{name}_bias": (2, 6)}
    blocks, scales = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
    got = stored.get(name)
    assert torch.equal(got, _convert_moe_packed_tensors(blocks, scales))
    for expert, row, group, byte in ((0, 0, 0, 0), (1, 5, 2, 15), (0, 3, 1, 7)):
        packed, scale = (
            int(blocks[expert, row, group, byte]),
            2.0 ** (int(scales[expert, row, group]) - 127),
        )
        at = group * 32 + byte * 2
        assert float(got[expert, at, row]) == E2M1[packed & 15] * scale
        assert float(got[expert, at + 1, row]) == E2M1[packed >> 4] * scale


def test_gpt_oss_loads_as_transformers_dequantizes_it(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

    plain = save_model(gpt_oss_config(), tmp_path / "plain", torch.bfloat16)
    tensors = to_mxfp4(read_tensors(plain))
    expected = {
        name.removesuffix("_blocks"): _convert_moe_packed_tensors(
            blocks, tensors[name.replace("_blocks", "_scales")]
        ).float()
        for name, blocks in tensors.items()
        if name.endswith("_blocks")
    }
    folder = rewrite(plain, tmp_path / "mxfp4", tensors, quantization_config=MXFP4_CONFIG)
    model = load_hf_model(folder, torch.float32, "cpu", attn_implementation="eager").state_dict()
    assert len(expected) == 4 and all(torch.equal(model[name], t) for name, t in expected.items())


@pytest.mark.sglang  # its environment has compressed-tensors
def test_int4_agrees_with_compressed_tensors(tmp_path: Path) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import (
        pack_to_int32,
        unpack_from_int32,
    )

    for bits in (4, 8):
        values = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (6, 40), dtype=torch.int8)
        packed = pack_to_int32(values, bits)
        assert torch.equal(
            unpacked(packed, bits, 40), unpack_from_int32(packed, bits, torch.Size([6, 40]))
        )
        assert torch.equal(unpacked(packed, bits, 40), values)


# --- refusals
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantized with 'gptq'"),
        ({"quant_method": "awq"}, "quantized with 'awq'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantized with 'bitsandbytes'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quantized with 'modelopt NVFP4'"),
        ({}, "quantized with 'none'"),
        ({**INT4_CONFIG, "format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
        ({**INT4_CONFIG, "format": "marlin-24"}, "marlin-24"),
    ],
)
def test_unknown_methods_are_refused_by_name(
    plain: Path, tmp_path: Path, quantization: dict[str, Any], said: str
) -> None:
    folder = rewrite(
        plain, tmp_path, read_tensors(plain), quantization_config=quantization or {"bits": 4}
    )
    with pytest.raises(ModelError, match=said) as caught:
        StoredWeights(folder)
    assert "bfloat16 version" in str(caught.value)


O = "model.layers.0.self_attn.o_proj.weight"  # noqa: E741


@pytest.mark.parametrize(
    ("layout", "edit", "said"),
    [
        ("block fp8", lambda t: t.pop(f"{O}_scale_inv"), f"{O} .*has no {O}_scale_inv"),
        ("block fp8", lambda t: t.update({f"{O}_scale_inv": torch.ones(3, 7)}), "into blocks .*weight_block_size"),
        ("block fp8", lambda t: t[f"{O}_scale_inv"].fill_(float("nan")), f"'{O}' .*NaN or infinite"),
        ("int4", lambda t: t.pop(f"{O}_scale"), f"has no {O}_scale"),
        ("int4", lambda t: t.update({f"{O}_shape": torch.tensor([160, 7])}), "packed values"),
        ("int4", lambda t: t.update({f"{O}_zero_point": torch.zeros(1)}), "asymmetric"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_named(
    plain: Path,
    tmp_path: Path,
    layout: str,
    edit: Callable[[dict[str, torch.Tensor]], Any],
    said: str,
) -> None:
    config, convert, _ = LAYOUTS[layout]
    tensors = convert(read_tensors(plain))
    edit(tensors)
    folder = rewrite(plain, tmp_path, tensors, quantization_config=config)
    with pytest.raises(ModelError, match=said):
        load_hf_model(folder, torch.float32, "cpu")
