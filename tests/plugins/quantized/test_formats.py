"""Weights in a checkpoint's own quantization: unchanged ones get its bytes, changed ones the
nearest values.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_quantized import LAYOUTS, gpt_oss_experts, quantized
from tiny_checkpoints import (
    MXFP4_CONFIG,
    gpt_oss_config,
    llama_config,
    read_tensors,
    rewrite,
    save_model,
    to_mxfp4,
)

from slime.models.quantized import scaled
from slime.models.shards import ModelError
from slime.models.stored import StoredWeights
from slime.plugins.quantized import formats
from slime.plugins.quantized.formats import E2M1, unpacked

FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(llama_config(), tmp_path_factory.mktemp("plain"))


def check_bytes(folder: Path) -> None:
    """Of weights in float32, and rounded to bfloat16, as Megatron's parameters are."""
    stored, files = StoredWeights(folder), read_tensors(folder)
    for name in stored.plan.weights:
        for part, tensor in stored.store(name, stored.get(name).bfloat16()).items():
            assert torch.equal(
                tensor.flatten().view(torch.uint8), files[part].flatten().view(torch.uint8)
            ), part
    for name in stored.shapes():
        for part, tensor in stored.store(name, stored.get(name)).items():
            assert tensor.dtype == files[part].dtype, part
            same = tensor.flatten().view(torch.uint8), files.pop(part).flatten().view(torch.uint8)
            assert torch.equal(*same), part
    assert set(files) == stored.plan.left_out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unchanged_weights_have_the_bytes_of_the_checkpoint(
    plain: Path, tmp_path: Path, layout: str
) -> None:
    check_bytes(quantized(plain, tmp_path / "model", layout))


def test_unchanged_mxfp4_has_the_bytes_of_the_checkpoint(tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in gpt_oss_experts().items()}
    folder = save_model(gpt_oss_config(), tmp_path / "plain", torch.bfloat16)
    rest = {n: t for n, t in read_tensors(folder).items() if n not in tensors}
    check_bytes(
        rewrite(
            folder,
            tmp_path / "model",
            to_mxfp4({**rest, **tensors}),
            quantization_config=MXFP4_CONFIG,
        )
    )


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 70),
    st.integers(1, 70),
    st.integers(1, 32),
    st.integers(1, 32),
    st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.float8_e8m0fnu]),
    st.integers(0, 2**30),
)
def test_changed_values_are_near(
    rows: int, cols: int, bm: int, bn: int, dtype: torch.dtype, seed: int
) -> None:
    """Within half a step of a new scale, although the stored scales are far too small or far too
    large.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = (
        torch.randn(rows, cols, generator=generator)
        * torch.rand(rows, 1, generator=generator).mul(12).exp2()
    )
    counts = -(-rows // bm), -(-cols // bn)
    stored = torch.randint(1, 200, counts, generator=generator, dtype=torch.uint8)
    old = stored if dtype == torch.uint8 else torch.exp2(stored.float() - 127).to(dtype)
    values, scales = formats.to_scaled(weight, old, FP8, (bm, bn))
    assert (values.dtype, scales.dtype, scales.shape) == (FP8, dtype, counts)
    again = scaled(values, scales, (bm, bn))
    blocks = [[b for b in r.split(bn, 1)] for r in weight.split(bm, 0)]
    largest = torch.tensor([[float(b.abs().max()) for b in row] for row in blocks])
    bound = largest.repeat_interleave(bm, 0)[:rows].repeat_interleave(bn, 1)[:, :cols]
    # The sum over a block is at most that of a new scale: a few hundredths of its largest value per
    # element.
    assert float((again - weight).norm()) <= 0.07 * float(bound.norm())
    assert bool(torch.isfinite(again).all())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [32, 20])
def test_packed_integers_are_near(bits: int, columns: int) -> None:
    weight = torch.randn(5, columns, generator=torch.Generator().manual_seed(1))
    weight[0, :4] = 0.0
    for old in (0.0, 1e-4, 1.0, 1e4):
        packed, scales = formats.to_packed(weight, torch.full((5, columns // 4), old), bits)
        again = scaled(unpacked(packed, bits, columns), scales, (1, 4))
        largest = weight.abs().unflatten(1, (-1, 4)).amax(-1).repeat_interleave(4, 1)
        # The largest value of a group may be half a step outside the range of the integers.
        assert ((again - weight).abs() <= largest / (2**bits - 1) * 2 + 1e-7).all()
        assert torch.isfinite(again).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_the_new_scale_of_integers_spreads_a_group_over_their_whole_range(bits: int) -> None:
    """It is that of compressed-tensors: the largest value over half of the range, which is 7.5 with
    four bits.
    """
    _, scales = formats.to_packed(torch.tensor([[0.1, -0.2, 0.5, -1.0]]), torch.zeros(1, 1), bits)
    torch.testing.assert_close(scales, torch.tensor([[2.0 / (2**bits - 1)]]))


def test_fp4_is_rounded_to_the_nearest() -> None:
    grid = torch.tensor(sorted({abs(x) for x in E2M1}))
    values = torch.linspace(-7, 7, 281)
    codes = formats.nearest_e2m1(values)
    got = torch.tensor(E2M1)[codes.long()]
    nearest = (values.abs()[:, None] - grid).abs().amin(1).clamp(max=1.0)
    torch.testing.assert_close(
        (got - values).abs(), torch.where(values.abs() > 6, values.abs() - 6, nearest)
    )
    halfway = formats.nearest_e2m1(torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0]))
    # as IEEE 754 rounds: to the code that is even
    assert halfway.tolist() == [0, 2, 2, 4, 4, 6, 6, 14]


def test_mxfp4_takes_the_better_exponent() -> None:
    weight = torch.randn(64, 3, generator=torch.Generator().manual_seed(2))
    weight[:32, 0] = 0.0
    for old in (0, 120, 127, 140, 254):
        blocks, exponents = formats.to_mxfp4(weight, torch.full((3, 2), old, dtype=torch.uint8))
        table = torch.tensor(E2M1)
        codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(2)
        again = (
            (table[codes.long()] * torch.exp2(exponents.float() - 127).unsqueeze(-1)).flatten(1).t()
        )
        assert float((again - weight).norm()) <= 0.15 * float(weight.norm())


def test_another_shape_is_refused(plain: Path, tmp_path: Path) -> None:
    stored = StoredWeights(quantized(plain, tmp_path / "model", "block fp8"))
    name = next(iter(stored.plan.weights))
    with pytest.raises(ModelError, match=r"shape \[3\]"):
        stored.store(name, torch.zeros(3))


def relative_error(values: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor) -> float:
    return float((values.float() * scales - weight).norm() / weight.norm())


def test_a_stored_scale_that_fits_no_more_is_replaced() -> None:
    """Only an error that the rounding to bfloat16 explains counts as none."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(128, 128, generator=generator) * 0.02
    _, scale = formats.to_scaled(weight, torch.ones(1, 1), FP8, (128, 128))
    values, scales = formats.to_scaled(weight, scale * 40, FP8, (128, 128))
    assert torch.equal(scales, scale) and relative_error(values, scales, weight) < 0.03
    values, scales = formats.to_scaled(weight, torch.full((1, 1), 0.004), torch.int8, (128, 128))
    assert relative_error(values, scales, weight) < 0.012
    assert torch.equal(values.abs().max(), torch.tensor(127, dtype=torch.int8))


def test_a_new_exponent_is_that_of_ocp() -> None:
    """floor(log2(the largest value)) - 2, since the largest 4-bit float is 1.5 * 2**2."""
    weight = torch.zeros(32, 4)
    weight[3] = torch.tensor([6.0, 4.0, 3.9, 0.02])
    _, exponents = formats.to_mxfp4(weight, torch.full((4, 1), 90, dtype=torch.uint8))
    assert exponents.flatten().tolist() == [127, 127, 126, 127 - 6 - 2]
