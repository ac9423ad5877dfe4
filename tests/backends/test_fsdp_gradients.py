"""Mixed precision without FSDP: the values and gradients of a module that was cast by hand; and
gradients in CPU memory that a thread adds up (a whole training step with them: test_fsdp_precision.py,
on ranks test_fsdp_ranks.py, on a GPU test_fsdp_precision_cuda.py).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from slime.backends.fsdp import gradients
from slime.backends.fsdp.gradients import CastParameters, HostGradients, ShardGradients


def test_shards_have_gradients_of_one_micro_batch_within_a_pass_and_the_sums_after_it() -> None:
    used, rare, unused = parameters = [nn.Parameter(torch.zeros(3)) for _ in range(3)]
    used.grad = torch.ones(3)  # of another part of the step
    collected = ShardGradients(parameters)
    with collected.in_use():
        for number in range(4):
            assert all(parameter.grad is None for parameter in parameters)
            used.grad = torch.full((3,), 10.0**number)
            if number == 2:
                rare.grad = torch.ones(3)
            collected.end_backward()
    assert used.grad is not None and used.grad.tolist() == [1112.0] * 3
    assert rare.grad is not None and rare.grad.tolist() == [1.0] * 3
    assert unused.grad is None


def test_many_more_gradients_than_may_wait_are_added_in_their_order() -> None:
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(1000, generator=generator).bfloat16() for _ in range(50)]
    parameter = nn.Parameter(torch.zeros(1000))
    gradients = HostGradients(torch.device("cpu"), calls=2)
    for grad in given:
        gradients.add([(parameter, grad)])
    gradients.finish()
    expected = torch.zeros(1000)
    for grad in given:
        expected += grad.float()
    assert parameter.grad is not None and torch.equal(parameter.grad, expected)


def test_an_error_of_the_thread_is_raised_at_the_end_of_the_pass() -> None:
    gradients = HostGradients(torch.device("cpu"), calls=2)
    gradients.add([(nn.Parameter(torch.zeros(3)), torch.zeros(4))])
    with pytest.raises(RuntimeError, match="size"):
        gradients.finish()


class Layer(nn.Module):
    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.up.requires_grad_(not frozen)
        self.unused = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Tied(nn.Module):
    """Uses one weight twice, has a parameter without gradients, one that is not trained, and one in
    bfloat16.
    """

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([Layer(), Layer(frozen=True), Layer()])
        del self.layers[0].unused  # all parameters of this layer get a gradient
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.layers[2].down.bias = self.layers[1].down.bias  # of two layers
        self.narrow = nn.Linear(4, 4).requires_grad_(False).bfloat16()
        self.recompute = recompute

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = (
                checkpoint(layer, hidden, use_reentrant=False) if self.recompute else layer(hidden)
            )
        return self.head(hidden + self.narrow(hidden))


def _cast(module: Tied, keep: bool) -> CastParameters:
    return CastParameters(module, torch.bfloat16, list(module.layers), keep)


def _copies(cast: CastParameters) -> list[nn.Parameter]:
    return [copy for group in [*cast.layers, cast.rest] for copy in group.copies]


def _held(cast: CastParameters) -> list[int]:
    return [sum(copy.untyped_storage().nbytes() for copy in group.copies) for group in cast.layers]


def _loss(logits: Tensor) -> Tensor:
    assert logits.dtype == torch.bfloat16
    return logits.float().square().sum()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_a_pass_computes_as_the_cast_module_and_masters_collect_gradients(
    keep: bool, recompute: bool
) -> None:
    module, batches = Tied(recompute), [torch.tensor([1, 2, 2]), torch.tensor([4, 0, 2])]
    masters = dict(module.named_parameters())
    narrow = {
        name: p.detach().bfloat16().requires_grad_(p.requires_grad) for name, p in masters.items()
    }
    want: dict[str, Tensor] = {}
    outputs = []
    for ids in batches:
        out = functional_call(Tied(), narrow, ids, tie_weights=True)
        outputs.append(out.detach())
        _loss(out).backward()
        for name, p in narrow.items():
            if p.grad is not None:
                want[name] = want[name] + p.grad.float() if name in want else p.grad.float()
                p.grad = None
    cast = _cast(module, keep)
    with cast.in_use():
        assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
        assert module.head.weight is module.embed.weight
        for ids, expected in zip(batches, outputs, strict=True):
            out = module(ids)
            assert torch.equal(out, expected)
            assert all(_held(cast)) if keep else not any(_held(cast))
            _loss(out).backward()
            cast.end_backward()
            assert all(_held(cast)) if keep else not any(_held(cast))
    assert dict(module.named_parameters()) == masters
    assert {name for name, p in masters.items() if p.grad is not None} == set(want)
    for name, gradient in want.items():
        mine = masters[name].grad
        assert mine is not None and mine.dtype == torch.float32 and torch.equal(mine, gradient), (
            name
        )


@pytest.mark.parametrize("keep", [False, True])
def test_each_pass_sees_the_weights_of_now_and_no_copy_stays(keep: bool) -> None:
    module, ids = Tied(), torch.tensor([1, 2, 3])
    cast = _cast(module, keep)
    with torch.no_grad():
        with cast.in_use():
            before = module(ids)
        up = module.layers[0].up
        up.weight.data = up.weight.data + 1  # a swapped pointer, as the bank of copies does
        module.embed.weight.mul_(2.0)
        with cast.in_use():
            after = module(ids)
        want = functional_call(
            module, {n: p.bfloat16() for n, p in module.named_parameters()}, ids, tie_weights=True
        )
    assert torch.equal(after, want) and not torch.equal(before, after)
    assert all(copy.untyped_storage().nbytes() == 0 for copy in _copies(cast))


def test_an_error_within_a_pass_leaves_the_masters_in_place() -> None:
    module = Tied()
    masters = dict(module.named_parameters())
    cast = _cast(module, False)
    with pytest.raises(ZeroDivisionError), cast.in_use():
        raise ZeroDivisionError
    assert dict(module.named_parameters()) == masters
    assert all(copy.grad is None and copy.untyped_storage().nbytes() == 0 for copy in _copies(cast))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    "shape", [(16, 1024, 2048), (4097, 4099), (16,)], ids=["large", "no rows", "small"]
)
@pytest.mark.parametrize("turned", [False, True], ids=["", "strided"])
def test_gradients_on_a_gpu_are_added_bit_for_bit(shape: tuple[int, ...], turned: bool) -> None:
    total, grad = torch.randn(*shape, device="cuda"), torch.randn(*shape, device="cuda").bfloat16()
    if turned:
        grad = grad.transpose(0, -1).contiguous().transpose(0, -1)
    expected = total + grad.float()
    gradients.add_gradient(total, grad)
    assert torch.equal(total, expected)


def test_a_parameter_may_have_another_shape_in_the_next_pass() -> None:
    def factor(rank: int) -> Tensor:
        return torch.arange(4.0 * rank).view(rank, 4) / 7

    class Low(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(factor(2))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.a.t()) @ self.a

    module = Low()
    cast = CastParameters(module, torch.bfloat16, [module], keep=False)
    x = torch.tensor([[0.5, -1.0, 2.0, 0.25]], dtype=torch.bfloat16)
    for rank in (2, 3, 2):
        module.a.grad = None  # that of the other shape
        module.a.data = factor(rank)
        with cast.in_use():
            _loss(module(x)).backward()
            cast.end_backward()
        alone = Low().bfloat16()
        alone.a.data = factor(rank).bfloat16()
        _loss(alone(x)).backward()
        assert alone.a.grad is not None
        torch.testing.assert_close(module.a.grad, alone.a.grad.float(), rtol=0, atol=0)
