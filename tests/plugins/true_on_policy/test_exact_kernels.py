"""The Triton kernels against float64, and their rows in other batches.

On a GPU they run in bfloat16. Elsewhere Triton's interpreter runs them in float32, where the package
is installed: ``python -m pip install triton 'numpy<2.4'``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.plugins.true_on_policy import functions
from slime.plugins.true_on_policy.model import token_log_probs

pytest.importorskip("triton")
pytestmark = pytest.mark.cuda
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
TOLERANCE = 2e-2 if ON_GPU else 1e-5
TOKENS = 150
STARTS = torch.tensor([0, 70, TOKENS], dtype=torch.int32)
SPANS = torch.stack([part for _ in "qk" for part in (STARTS[:-1], STARTS.diff())]).long()
HALF = torch.randn(TOKENS, 8, generator=torch.Generator().manual_seed(5))


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernels compute the dtype of the test, and plain torch float64."""
    from slime.plugins.true_on_policy import triton_kernels

    monkeypatch.setattr(
        functions, "kernels_for", lambda x: None if x.dtype == torch.float64 else triton_kernels
    )


def draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, DTYPE)


def turned(x: Tensor) -> Tensor:
    angle = HALF.to(x).repeat(1, 2)[: len(x)]
    return functions.rotate(x, angle.cos(), angle.sin())


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    starts = STARTS.to(q.device)
    return functions.attend(q, k, v, SPANS.to(q.device), (80, 80), 0.25, (starts, starts))


Case = tuple[Callable[..., Tensor], list[Tensor]]
CASES: dict[str, Case] = {
    "linear": (functions.linear, [draw(2, 70, 96), draw(304, 96), draw(304)]),
    "odd linear": (functions.linear, [draw(70, 40), draw(24, 40)]),
    "norm": (lambda x, w: functions.rms_norm(x, w, 1e-6), [draw(130, 3, 40), draw(40)]),
    "rotate": (turned, [draw(TOKENS, 3, 16)]),
    "swiglu": (functions.swiglu, [draw(70, 44), draw(70, 44)]),
    "attention": (attended, [draw(TOKENS, 6, 16), draw(TOKENS, 2, 16), draw(TOKENS, 2, 16)]),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_float64(name: str) -> None:
    function, values = CASES[name]
    found = []
    for dtype, device in ((DTYPE, DEVICE), (torch.float64, "cpu")):
        inputs = [x.to(device, dtype).requires_grad_() for x in values]
        out = function(*inputs)
        if name == "attention" and not ON_GPU:  # its gradient is a kernel of torch for GPUs
            found.append([out])
            continue
        weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out)
        found.append([out, *torch.autograd.grad((out * weights).sum(), inputs)])
    for got, want in zip(*found, strict=True):
        assert (got.cpu().double() - want).norm() < TOLERANCE * want.norm()


@pytest.mark.parametrize("name", ["odd linear", "norm", "rotate", "swiglu"])
def test_a_row_does_not_depend_on_the_others(name: str) -> None:
    function, values = CASES[name]
    whole = function(*values)
    for count in (1, 3, 65):
        first = values[0][:count]
        others = [x[:count] if name == "swiglu" else x for x in values[1:]]
        assert torch.equal(function(first, *others), whole[:count])
    if name != "rotate":
        others = [x[40:41] if name == "swiglu" else x for x in values[1:]]
        assert torch.equal(function(values[0][40:41], *others), whole[40:41])


def test_decode_over_slots_is_prefill() -> None:
    """A slot has nothing of value behind the tokens that are seen."""
    q, k, v = CASES["attention"][1]
    whole = attended(q, k, v)
    for first, count, position in ((0, 70, 69), (0, 70, 5), (70, 80, 64), (70, 80, 0)):
        slots = [torch.full((200, 2, 16), torch.nan).to(x) for x in (k, v)]
        for slot, x in zip(slots, (k, v), strict=True):
            slot[60 : 60 + position + 1] = x[first : first + position + 1]
        spans = torch.tensor([[0], [1], [60], [position + 1]], device=DEVICE)
        row = q[first + position][None]
        out = functions.attend(row, slots[0], slots[1], spans, (1, 0), 0.25)
        assert torch.equal(out[0], whole[first + position]), count


def test_keys_may_be_anywhere() -> None:
    """As in SGLang's cache, in which a table says where each token of a request is."""
    q, k, v = CASES["attention"][1]
    places = torch.randperm(200, generator=torch.Generator().manual_seed(0))[:TOKENS].to(DEVICE)
    stores = [torch.full((200, 2, 16), torch.nan).to(x).index_copy(0, places, x) for x in (k, v)]
    spans, table = SPANS.to(DEVICE), places.int()
    out = functions.attend(q, stores[0], stores[1], spans, (80, 80), 0.25, table=table)
    assert torch.equal(out, attended(q, k, v))


def test_stacked_weights_give_the_same_columns() -> None:
    """SGLang keeps those of q, k and v, and of gate and up, in one tensor."""
    x, parts = draw(70, 96), [draw(n, 96) for n in (304, 80, 80)]
    stacked = functions.linear(x, torch.cat(parts)).split([len(part) for part in parts], -1)
    for part, columns in zip(parts, stacked, strict=True):
        assert torch.equal(functions.linear(x, part), columns)


@pytest.mark.parametrize("wanted", ["log_probs", "entropy"])
def test_scores(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from slime.models import token_log_probs as usual

    if not ON_GPU:
        monkeypatch.setattr(usual, "compiled", lambda function: function)
    hidden, weight, targets = draw(20, 16), draw(504, 16), torch.arange(20, device=DEVICE)
    found = []
    for score, dtype in ((token_log_probs, DTYPE), (usual.token_log_probs, torch.float64)):
        inputs = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
        scores: Any = score(
            inputs[0], inputs[1], targets, 0.7, chunk_size=8, with_entropy=True, entropy_grad=True
        )
        values = getattr(scores, wanted)
        found.append([values, *torch.autograd.grad(values.sum(), inputs)])
    for got, want in zip(*found, strict=True):
        assert (got.double() - want).norm() < TOLERANCE * want.norm()
