"""Mixed precision without FSDP: the values and gradients of a module that was cast by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from slime.backends.fsdp.cast_parameters import CastParameters


class Tied(nn.Module):
    """Uses one weight twice, another once, and has a part that is not trained and one in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.narrow = nn.Linear(4, 4).requires_grad_(False).bfloat16()

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.middle(self.embed(ids)).tanh()
        return self.head(hidden + self.frozen(hidden) + self.narrow(hidden))


def _loss(logits: Tensor) -> Tensor:
    assert logits.dtype == torch.bfloat16
    return logits.float().square().sum()


def test_a_pass_computes_as_the_cast_module_and_masters_collect_gradients() -> None:
    module, batches = Tied(), [torch.tensor([1, 2, 2]), torch.tensor([4, 0, 2])]
    masters = dict(module.named_parameters())
    narrow = {name: p.detach().bfloat16().requires_grad_(p.requires_grad) for name, p in masters.items()}
    want: dict[str, Tensor] = {}
    outputs = []
    for ids in batches:
        out = functional_call(module, narrow, ids, tie_weights=True)
        outputs.append(out.detach())
        _loss(out).backward()
        for name, p in narrow.items():
            if p.grad is not None:
                want[name] = want[name] + p.grad.float() if name in want else p.grad.float()
                p.grad = None
    cast = CastParameters(module, torch.bfloat16)
    with cast.in_use():
        assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
        assert module.head.weight is module.embed.weight
        for ids, expected in zip(batches, outputs, strict=True):
            out = module(ids)
            assert torch.equal(out, expected)
            _loss(out).backward()
    assert dict(module.named_parameters()) == masters
    assert {name for name, p in masters.items() if p.grad is not None} == set(want)
    for name, gradient in want.items():
        mine = masters[name].grad
        assert mine is not None and mine.dtype == torch.float32 and torch.equal(mine, gradient), name


def test_each_pass_sees_the_weights_of_now_and_no_copy_stays() -> None:
    module, ids = Tied(), torch.tensor([1, 2, 3])
    cast = CastParameters(module, torch.bfloat16)
    assert all(copy.untyped_storage().nbytes() == 0 for copy in cast.copies)
    with torch.no_grad():
        with cast.in_use():
            before = module(ids)
        module.middle.weight.data = module.middle.weight.data + 1  # a swapped pointer, as the bank of copies does
        module.embed.weight.mul_(2.0)
        with cast.in_use():
            after = module(ids)
        want = functional_call(module, {n: p.bfloat16() for n, p in module.named_parameters()}, ids, tie_weights=True)
    assert torch.equal(after, want) and not torch.equal(before, after)
    assert all(copy.untyped_storage().nbytes() == 0 for copy in cast.copies)


def test_an_error_within_a_pass_leaves_the_masters_in_place() -> None:
    module = Tied()
    masters = dict(module.named_parameters())
    cast = CastParameters(module, torch.bfloat16)
    with pytest.raises(ZeroDivisionError), cast.in_use():
        raise ZeroDivisionError
    assert dict(module.named_parameters()) == masters
    assert all(copy.grad is None for copy in cast.copies)
