"""Layers with an adapter, without a trainer: gradients in float64, and names in PEFT's files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from slime.models.lora import LoraLinear, LoraSettings, attach, merged, selects, shortest_targets
from slime.models.peft_files import (
    CONFIG,
    WEIGHTS,
    Factors,
    peft_config,
    read_config,
    read_factors,
    write_adapter,
)
from slime.models.shards import ModelError


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4)),
    rows=st.integers(1, 6),
    rslora=st.booleans(),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_gradients_in_float64(
    sizes: tuple[int, int, int], rows: int, rslora: bool, bias: bool, seed: int
) -> None:
    """Output, and gradients of A, B and the input, against autograd on the merged weight."""
    generator = torch.Generator().manual_seed(seed)
    n_in, n_out, rank = sizes

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    layer = nn.Linear(n_in, n_out, bias=bias, dtype=torch.float64).requires_grad_(False)
    shape = LoraSettings(rank, 3.0, rslora=rslora)
    attach(layer, random(rank, n_in), random(n_out, rank), shape)
    assert isinstance(layer, LoraLinear)
    x, weight = random(rows, n_in).requires_grad_(), random(rows, n_out)
    (layer(x) * weight).sum().backward()
    whole = merged(layer.weight, layer.lora_A, layer.lora_B, shape.scale).detach().requires_grad_()
    y = x.detach().clone().requires_grad_()
    (nn.functional.linear(y, whole, layer.bias) * weight).sum().backward()
    assert whole.grad is not None and layer.weight.grad is None
    close: dict[str, Any] = dict(rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, whole, layer.bias), **close)
    torch.testing.assert_close(
        layer.lora_A.grad, shape.scale * layer.lora_B.T @ whole.grad, **close
    )
    torch.testing.assert_close(
        layer.lora_B.grad, shape.scale * whole.grad @ layer.lora_A.T, **close
    )
    torch.testing.assert_close(x.grad, y.grad, **close)


def test_the_scale() -> None:
    assert LoraSettings(16, 32.0).scale == 2.0
    assert LoraSettings(16, 32.0, rslora=True).scale == 32.0 / math.sqrt(16)


@pytest.mark.parametrize(
    ("pattern", "selected"),
    [
        ("q_proj", True),
        ("self_attn.q_proj", True),
        ("proj", False),
        ("attn.q_proj", False),
        (r"model\.layers\.[0-3]\.self_attn\..*", True),
        (r"layers\.3\..*", False),
    ],
)
def test_patterns(pattern: str, selected: bool) -> None:
    assert selects(pattern, "model.layers.3.self_attn.q_proj") is selected


def test_targets_select_exactly_the_layers() -> None:
    linears = ["l.0.q", "l.0.k", "l.1.q", "l.1.k", "head"]
    assert shortest_targets(["l.0.q", "l.1.q"], linears) == ["q"]
    assert shortest_targets(["l.0.q"], linears) == ["l.0.q"]
    assert shortest_targets(linears[:4], linears) == ["k", "q"]


def test_files_of_peft(tmp_path: Path) -> None:
    shape = LoraSettings(2, 4.0, dropout=0.1, rslora=True, targets=("q",))
    adapter = {"l.0.q": Factors(torch.randn(2, 3), torch.randn(5, 2))}
    write_adapter(tmp_path, peft_config(shape, ["q"], "base"), adapter)
    assert read_config(tmp_path)[0] == shape
    found = read_factors(tmp_path, 2)
    assert found.keys() == adapter.keys() and all(
        map(torch.equal, found["l.0.q"], adapter["l.0.q"])
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"use_dora": True},
        {"rank_pattern": {"q": 4}},
        {"modules_to_save": ["lm_head"]},
        {"bias": "all"},
        {"peft_type": "LOHA"},
        # these have changed the base weights, which PEFT does again
        {"init_lora_weights": "pissa_niter_4"},
        {"init_lora_weights": "olora"},
        {"r": 0},
    ],
)
def test_other_adapters_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = peft_config(LoraSettings(2, 4.0), ["q"], "base")
    (tmp_path / CONFIG).write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match="not support"):
        read_config(tmp_path)


@pytest.mark.parametrize("init", [True, False, "gaussian", "orthogonal", "eva"])
def test_an_initialization_that_leaves_the_base_alone_is_read(tmp_path: Path, init: object) -> None:
    config = peft_config(LoraSettings(2, 4.0), ["q"], "base") | {"init_lora_weights": init}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    assert read_config(tmp_path)[0].rank == 2


def test_damaged_files_are_errors(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        read_config(tmp_path)
    with pytest.raises(ModelError, match="cannot be read"):
        read_factors(tmp_path, 2)
    for names in (
        ["base_model.model.q.lora_A.weight"],
        ["base_model.model.lm_head.weight"],
        ["q.lora_A.weight"],
    ):
        save_file({name: torch.zeros(2, 3) for name in names}, str(tmp_path / WEIGHTS))
        with pytest.raises(ModelError, match="pairs of"):
            read_factors(tmp_path, 2)


@pytest.mark.parametrize("alpha", [1e308, 0, -1.0, float("nan")])
def test_a_scale_that_makes_weights_infinite_is_refused(tmp_path: Path, alpha: float) -> None:
    config = peft_config(LoraSettings(2, 4.0), ["q"], "base") | {"lora_alpha": alpha}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    with pytest.raises(ModelError, match="see lora_alpha"):
        read_config(tmp_path)


def test_a_long_error_of_a_library_is_cut(tmp_path: Path) -> None:
    header = json.dumps(
        {"w": {"dtype": "F32", "shape": ["x" * 9000], "data_offsets": [0, 0]}}
    ).encode()
    (tmp_path / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError) as raised:
        read_factors(tmp_path, 2)
    assert "cannot be read" in str(raised.value) and len(str(raised.value)) <= 2000


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (torch.full((2, 3), float("nan")), torch.zeros(5, 2), "finite"),
        (torch.zeros(2, 3, dtype=torch.int8), torch.zeros(5, 2), "finite"),
        (torch.zeros(4, 3), torch.zeros(5, 4), "have rank 2"),
        (torch.zeros(2, 3), torch.zeros(5, 3), "have rank 2"),
        (torch.zeros(2, 3), torch.zeros(0, 2), "have rank 2"),
    ],
)
def test_factors_that_cannot_be_right_are_refused(
    tmp_path: Path, a: torch.Tensor, b: torch.Tensor, said: str
) -> None:
    """They were loaded, merged and trained without a word."""
    write_adapter(
        tmp_path, peft_config(LoraSettings(2, 4.0), ["q"], "base"), {"l.0.q": Factors(a, b)}
    )
    with pytest.raises(ModelError, match=said):
        read_factors(tmp_path, 2)


@pytest.mark.parametrize(
    "changes", [{"lora_alpha": float("nan")}, {"lora_alpha": 0}, {"lora_dropout": 2}, {"r": 1.5}]
)
def test_numbers_that_cannot_be_right_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    (tmp_path / CONFIG).write_text(
        json.dumps(peft_config(LoraSettings(2, 4.0), ["q"], "base") | changes)
    )
    with pytest.raises(ModelError, match=r"adapter_config\.json (has values|cannot be read)"):
        read_config(tmp_path)
