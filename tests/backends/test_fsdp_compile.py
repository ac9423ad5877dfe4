"""Compiled layers compute what plain ones do, and compile once for all layers and shapes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from expert_ranks import ROUTES, with_routes
from fsdp_helpers import (
    make_args,
    make_backend,
    make_samples,
    save_tiny_qwen3,
    save_tiny_qwen3_moe,
    weights_of,
    whole_batch,
)
from torch._dynamo.utils import counters

from slime.backends.fsdp.backend import FsdpBackend
from slime.backends.fsdp.model import compile_layers
from slime.backends.train_loop import train_on_rollout
from slime.models import cpu_kernels, packed_attention, token_log_probs


@pytest.fixture
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``aot_eager`` traces as inductor does and spares the C++ compiler. Attention on the CPU is no
    part of it.
    """
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=request.param))
    # CUDA's varlen attention is an operator of its own, which compiled code calls; the CPU's is
    # Python.
    attention = torch._dynamo.disable(packed_attention.packed_attention_cpu)
    monkeypatch.setattr(packed_attention, "packed_attention_cpu", attention)
    # Layers are compiled on CUDA only. inductor cannot lower the CPU's oneDNN product with a
    # symbolic number of rows.
    monkeypatch.setattr(cpu_kernels, "onednn_available", lambda: False)
    token_log_probs.compiled.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    yield
    token_log_probs.compiled.cache_clear()
    torch._dynamo.reset()


CHANGES = {"gradient_checkpointing": True, "entropy_coef": 0.01}


class Traced(Exception):
    """Carries the graph that a layer became."""


def _raise_graph(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    raise Traced(graph)


def test_a_layer_with_the_varlen_kernel_is_one_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs on CUDA, traced here: the whole layer without a break, the kernel in it, lengths
    symbolic.
    """
    trainer = make_backend(make_args(save_tiny_qwen3(tmp_path)))
    monkeypatch.setattr(packed_attention, "has_varlen_kernel", lambda q: True)
    monkeypatch.setattr(cpu_kernels, "onednn_available", lambda: False)
    monkeypatch.setattr(
        torch, "compile", functools.partial(torch.compile, backend=_raise_graph, fullgraph=True)
    )
    compile_layers(trainer.scorer.hf)
    batch = whole_batch(make_samples(), micro_batch_size=16)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as failure:
        trainer.scorer(trainer.builder.from_batch(batch, batch["micro_batch_indices"][0]))
    graph = failure.value.inner_exception.args[0]
    kernels = [n for n in graph.graph.nodes if n.target is torch.ops.torch_attn._varlen_attn]
    assert len(kernels) == 1
    query, _, _, _, _, max_q, max_k = kernels[0].args[:7]
    assert isinstance(query.meta["example_value"].shape[0], torch.SymInt)
    # inputs, no constants
    assert isinstance(max_q, torch.fx.Node) and isinstance(max_k, torch.fx.Node)
    torch._dynamo.reset()


def run(backend: FsdpBackend, seed: int) -> dict[str, float]:
    batch = whole_batch(make_samples(seed=seed), micro_batch_size=2 + seed)
    return train_on_rollout(backend, batch)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiler", "changes"),
    [
        ("aot_eager", CHANGES),
        # the C++ that it generates here is not what runs on a GPU
        pytest.param("inductor", {}, marks=pytest.mark.long),
    ],
    indirect=["compiler"],
)
def test_same_steps_and_no_variant_per_shape(
    tmp_path: Path, compiler: None, changes: dict[str, Any]
) -> None:
    model = save_tiny_qwen3(tmp_path, num_hidden_layers=2)
    plain = make_backend(make_args(model, kl_coef=0.01, **changes))
    compiled = make_backend(make_args(model, kl_coef=0.01, compile_layers=True, **changes))
    graphs = []
    for seed in range(3):
        want, got = run(plain, seed), run(compiled, seed)
        graphs.append(counters["stats"]["unique_graphs"])
        for name in (
            "train/loss",
            "train/grad_norm",
            "train/kl_loss",
            "rollout/log_probs",
            "rollout/ref_log_probs",
        ):
            if name in want:
                assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-6), (seed, name)
    assert graphs[0] > 0
    # the second batch may show what varies; nothing is new after it
    assert graphs[-1] == graphs[1], graphs
    a, b = weights_of(plain), weights_of(compiled)
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["aot_eager"], indirect=True)
def test_layers_with_an_adapter_compile_once(tmp_path: Path, compiler: None) -> None:
    """With the adapter, and without it for the reference."""
    model = save_tiny_qwen3(tmp_path, num_hidden_layers=2)
    flags: dict[str, Any] = dict(
        lora_rank=4, lora_alpha=8.0, use_rslora=False, lora_target_modules=["all-linear"]
    )
    flags |= dict(use_kl_loss=True, kl_loss_coef=0.1, lora_sync="merged")
    plain, compiled = (
        make_backend(make_args(model, **flags)),
        make_backend(make_args(model, **flags, compile_layers=True)),
    )
    graphs = []
    for seed in range(3):
        want, got = run(plain, seed), run(compiled, seed)
        graphs.append(counters["stats"]["unique_graphs"])
        for name in ("train/loss", "train/grad_norm", "train/kl_loss", "rollout/ref_log_probs"):
            assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-6), (seed, name)
    assert graphs[0] > 0 and graphs[-1] == graphs[1], graphs


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["aot_eager"], indirect=True)
def test_layers_that_replay_routes_share_their_code(tmp_path: Path, compiler: None) -> None:
    graphs = []
    for layers in (2, 4):
        model = save_tiny_qwen3_moe(tmp_path / str(layers), num_hidden_layers=layers)
        batch = with_routes(whole_batch(make_samples()), layers)
        torch._dynamo.reset()
        counters.clear()
        want, got = (
            make_backend(make_args(model, **ROUTES, compile_layers=compiled)).log_probs(batch)
            for compiled in (False, True)
        )
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        graphs.append(counters["stats"]["unique_graphs"])
    assert 0 < graphs[0] == graphs[1], graphs
