"""Gradients in CPU memory that a thread adds up; a whole training step with them:
test_fsdp_precision.py, on ranks test_fsdp_ranks.py, on a GPU test_fsdp_precision_cuda.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slime.backends.fsdp.gradients import HostGradients, ShardGradients


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
