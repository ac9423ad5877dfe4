"""The FSDP backend sends tokens to the experts of the engine (``--use-rollout-routing-replay``).

Ranks that have some of the experts or of the tokens each are in ``test_fsdp_expert_parallel.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from expert_ranks import TWO, with_routes
from fsdp_helpers import LORA, make_args, make_backend, make_samples, weights_of, whole_batch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "models"))
from every_family import FAMILIES, save_tiny

from slime.backends.fsdp.backend import FsdpBackend
from slime.backends.train_loop import score_probe, train_on_rollout
from slime.data.fields import RankBatch
from slime.models.loading import ModelError, decoder_layers
from slime.models.scorer import PolicyScorer

MOE = sorted({family for family, _ in TWO.values() if family in FAMILIES})
REPLAY: dict[str, Any] = dict(use_rollout_routing_replay=True, use_routing_replay=True)
ROUTES = "rollout_routed_experts"
NO_PREFIXES: dict[str, Any] = dict(share_prompt_in_pack=False)


def family(name: str, folder: Path, **changes: Any) -> Path:
    more = {"num_local_experts": 4, "num_experts_per_tok": 2} if name == "Llama 4" else {}
    return save_tiny(name, folder, **more | changes)


def layers_of(backend: FsdpBackend) -> list[nn.Module]:
    assert isinstance(backend.scorer, PolicyScorer)
    return decoder_layers(backend.scorer.hf)


def routers_of(backend: FsdpBackend) -> dict[int, nn.Module]:
    """By the number of the layer."""
    found = {}
    for number, layer in enumerate(layers_of(backend)):
        for name, part in layer.named_modules():
            if "Router" in type(part).__name__:
                found[number] = part
                assert name.endswith(("gate", "router"))
    assert found
    return found


def chosen_by(output: tuple[Tensor, ...]) -> Tensor:
    """The experts in the output of a router, ``[rows, topk]``, in ascending order if it tells the
    weights of all experts."""
    whole = [x for x in output if x.dtype == torch.int64]
    if whole:
        return whole[0]
    scores = output[0]  # of Llama 4: 0 for all other experts
    return scores.topk(2).indices.sort(-1).values


@contextmanager
def choices(backend: FsdpBackend) -> Iterator[dict[int, list[Tensor]]]:
    """Note the experts of each forward within the context, by layer."""
    seen: dict[int, list[Tensor]] = {number: [] for number in routers_of(backend)}
    hooks = [
        router.register_forward_hook(
            lambda _module, _given, output, number=number: seen[number].append(chosen_by(output))
        )
        for number, router in routers_of(backend).items()
    ]
    yield seen
    for hook in hooks:
        hook.remove()


def own_routes(backend: FsdpBackend, batch: RankBatch) -> list[Tensor]:
    """What the routers choose for each sample, as an engine reports it: ``[total - 1, layers,
    topk]``, with zeros for layers without experts."""
    routes = []
    for tokens, response in zip(batch["tokens"], batch["response_lengths"], strict=True):
        with choices(backend) as seen, torch.no_grad():
            backend.scorer(backend.builder.build([tokens], [response], [0], [None]))
        own = torch.zeros(len(tokens) - 1, len(layers_of(backend)), 2, dtype=torch.uint8)
        for number, (found,) in seen.items():
            own[:, number] = found[: len(tokens) - 1]
        routes.append(own)
    return routes


def results(backend: FsdpBackend, batch: RankBatch) -> dict[str, Any]:
    """Log-probs, the metrics of a step, its gradients, and the new weights."""
    gradients: dict[str, Tensor] = {}
    norm = backend.optimizer.grad_norm

    def noted() -> float:
        named = backend.optimizer.named
        gradients.update((name, p.grad.clone()) for name, p in named if p.grad is not None)
        return norm()

    backend.optimizer.grad_norm = noted  # type: ignore[method-assign]
    log_probs = backend.log_probs(batch)["log_probs"]
    metrics = train_on_rollout(backend, batch)[0]
    metrics = {k: v for k, v in metrics.items() if k in ("train/loss", "train/grad_norm")}
    return dict(
        log_probs=log_probs, metrics=metrics, gradients=gradients, weights=weights_of(backend)
    )


def assert_alike(got: Any, want: Any, **tolerance: float) -> None:
    torch.testing.assert_close(got, want, **tolerance or dict(rtol=0, atol=0))


@pytest.mark.parametrize("name", MOE)
def test_the_routers_own_choice_changes_nothing(name: str, tmp_path: Path) -> None:
    folder, batch = family(name, tmp_path), whole_batch(make_samples(2))
    changes: dict[str, Any] = {"gradient_checkpointing": name != "Mixtral"}
    plain = make_backend(make_args(folder, **NO_PREFIXES, **changes))
    routes = own_routes(plain, batch)
    replays = make_backend(make_args(folder, **REPLAY, **changes))
    assert_alike(results(replays, batch | {ROUTES: routes}), results(plain, batch))


@pytest.mark.parametrize("name", MOE)
def test_tokens_go_to_the_experts_of_the_engine(name: str, tmp_path: Path) -> None:
    """Also when the layers are computed again in the backward pass."""
    folder, batch = family(name, tmp_path), whole_batch(make_samples(2))
    backend = make_backend(make_args(folder, **REPLAY, gradient_checkpointing=True))
    layers = len(layers_of(backend))
    routed = with_routes(batch, layers)
    with choices(backend) as seen:
        train_on_rollout(backend, routed)
    for number, found in seen.items():
        # Two micro-batches: the first forward and the second one, in the backward pass.
        for micro, twice in enumerate((found[:2], found[2:])):
            start = 0
            for i in batch["micro_batch_indices"][micro]:
                want = routed[ROUTES][i][:, number].long()
                for got in twice:
                    mine = got[start : start + len(want)]
                    assert torch.equal(mine.sort(-1).values, want.sort(-1).values)
                start += len(want) + 1
            assert start == len(twice[0])


def by_hand(backend: FsdpBackend, routes: list[Tensor]) -> None:
    """Let the experts of Qwen3-MoE compute one token after the other, with these routes."""

    def forward(self: Any, hidden: Tensor, number: int) -> Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        probs = (rows @ self.gate.weight.t()).softmax(-1)
        wanted: list[list[int] | None] = []
        for own in routes:
            wanted += [*own[:, number].tolist(), None]
        outputs = []
        for row, p, experts in zip(rows, probs, wanted, strict=True):
            experts = p.topk(2).indices.tolist() if experts is None else experts
            total = p[experts].sum()
            output = torch.zeros_like(row)
            for e in experts:
                gate, up = (self.experts.gate_up_proj[e] @ row).chunk(2)
                part = self.experts.down_proj[e] @ (torch.nn.functional.silu(gate) * up)
                output = output + p[e] / total * part
            outputs.append(output)
        return torch.stack(outputs).view_as(hidden)

    for number, layer in enumerate(layers_of(backend)):
        block: Any = layer.mlp
        block.forward = MethodType(lambda self, x, n=number: forward(self, x, n), block)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gradient_checkpointing": True},
        {"attn_implementation": "sdpa"},
        LORA | {"lora_target_modules": ["all-linear", "experts"]},
    ],
    ids=["packed", "recomputed", "padded", "adapter"],
)
def test_a_step_is_that_of_a_loop_over_tokens(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = family("Qwen3-MoE", tmp_path, norm_topk_prob=True)
    batch = with_routes(whole_batch(make_samples(2), micro_batch_size=8), 2)
    plain = make_backend(make_args(folder, **NO_PREFIXES))
    without = plain.log_probs(batch)["log_probs"]
    by_hand(plain, batch[ROUTES])
    got = results(make_backend(make_args(folder, **REPLAY, **changes)), batch)
    want = results(plain, batch)
    assert (
        max(float((a - b).abs().max()) for a, b in zip(without, want["log_probs"], strict=True))
        > 0.1
    )
    assert_alike(got["log_probs"], want["log_probs"], rtol=1e-4, atol=1e-5)
    if "lora_rank" in changes:  # its step is that of other parameters
        return
    assert_alike(got["metrics"], want["metrics"], rtol=1e-4, atol=1e-5)
    assert any(x.any() for name, x in want["gradients"].items() if "mlp.gate" in name)
    assert_alike(got["gradients"], want["gradients"], rtol=1e-3, atol=1e-5)


def test_layers_without_experts(tmp_path: Path) -> None:
    """Engines report all layers, or those with experts only."""
    folder = family("GLM-4.5", tmp_path, num_hidden_layers=3, first_k_dense_replace=1)
    batch = with_routes(whole_batch(make_samples(2)), 3)
    found = []
    for columns in ([0, 1, 2], [1, 2]):
        backend = make_backend(make_args(folder, **REPLAY))
        routes = [x[:, columns] for x in batch[ROUTES]]
        found.append(backend.log_probs(batch | {ROUTES: routes})["log_probs"])
    assert_alike(found[1], found[0])
    with pytest.raises(ModelError, match=r"in 1 layers, but .* 3, 2 of them with experts"):
        backend.log_probs(batch | {ROUTES: [x[:, :1] for x in batch[ROUTES]]})


def test_a_reference_model_and_unknown_routes_choose_themselves(tmp_path: Path) -> None:
    folder = family("Qwen3-MoE", tmp_path)
    batch = with_routes(whole_batch(make_samples(2)), 2)
    flags: dict[str, Any] = dict(use_kl_loss=True, kl_loss_coef=0.1)
    plain = make_backend(make_args(folder, **NO_PREFIXES, **flags))
    backend = make_backend(make_args(folder, **REPLAY, **flags))
    want = plain.log_probs(batch, "ref")["log_probs"]
    assert_alike(backend.log_probs(batch, "ref")["log_probs"], want)
    routed = backend.log_probs(batch)["log_probs"]
    assert all(not torch.equal(a, b) for a, b in zip(routed, want, strict=True))
    some = [x if i % 2 else x[:0] for i, x in enumerate(batch[ROUTES])]
    mixed = backend.log_probs(batch | {ROUTES: some})["log_probs"]
    assert_alike(mixed[1::2], routed[1::2], rtol=1e-5, atol=1e-5)
    assert_alike(mixed[::2], want[::2], rtol=1e-5, atol=1e-5)


def test_a_probe_of_the_weights_has_no_routes(tmp_path: Path) -> None:
    folder = family("Qwen3-MoE", tmp_path)
    plain, backend = (make_backend(make_args(folder, **flags)) for flags in ({}, REPLAY))
    assert score_probe(backend, range(9)) == score_probe(plain, range(9))


def test_what_cannot_be_replayed_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no decoder layer has routed experts"):
        make_backend(make_args(save_tiny("Llama", tmp_path / "dense"), **REPLAY))
    backend = make_backend(make_args(family("Qwen3-MoE", tmp_path / "moe"), **REPLAY))
    batch = whole_batch(make_samples(2))
    with pytest.raises(ModelError, match="no experts of the engine"):
        backend.log_probs(batch)
    wide = [x.repeat(1, 1, 2)[..., :3] for x in with_routes(batch, 2)[ROUTES]]
    with pytest.raises(ModelError, match=r"TopKRouter does not choose 3 experts"):
        backend.log_probs(batch | {ROUTES: wide})
