"""Copies of weights: each way to swap them in gives and keeps the same values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp_helpers import make_args
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slime.backends.bank import CopySettings, WeightBank, keeps_copies_on_device
from slime.backends.base import TrainNeeds
from slime.backends.offload import HostArena, host_tensors

MODES: dict[str, dict[str, Any]] = {
    "pointers": {},
    "host": {"may_swap_pointers": False},
    "device": {"may_swap_pointers": False, "on_device": True},
}


def model(seed: int = 0) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(5, 3), (0, 3), (7,), (2, 2, 2)]
    named = [(f"p{i}", torch.randn(shape, generator=generator)) for i, shape in enumerate(shapes)]
    return [*named, ("count", torch.tensor([3, 4]))]


def values(named: list[tuple[str, Tensor]]) -> list[Tensor]:
    return [tensor.clone() for _, tensor in named]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_a_copy_is_in_the_model_while_it_is_used_and_the_actor_again_afterwards(mode: str) -> None:
    named = model()
    bank = WeightBank(named, **MODES[mode])
    start = values(named)
    bank.copy("actor", "ref")
    for _, tensor in named:
        tensor.add_(1)
    trained = values(named)
    for _ in range(2):
        with bank.using("ref"):
            assert equal(values(named), start)
        assert equal(values(named), trained)
    with pytest.raises(RuntimeError, match="inside"), bank.using("ref"):
        raise RuntimeError("inside")
    assert equal(values(named), trained)
    bank.copy("actor", "ref")
    with bank.using("ref"):
        assert equal(values(named), trained)
    bank.add("teacher", {name: tensor + 5 for name, tensor in named})
    with bank.using("teacher"):
        assert equal(values(named), [tensor + 5 for tensor in trained])
    with pytest.raises(KeyError, match=r"'old_actor'.*actor, ref, teacher"):
        bank.copy("old_actor", "ref")


@pytest.mark.parametrize("mode", MODES)
def test_what_is_written_while_a_copy_is_filled_becomes_the_copy(mode: str) -> None:
    named = model()
    bank = WeightBank(named, **MODES[mode])
    start = values(named)
    with bank.filling("ref"):
        for _, tensor in named:
            tensor.mul_(3)
    assert equal(values(named), start)
    with bank.using("ref"):
        assert equal(values(named), [3 * tensor for tensor in start])


def test_copies_in_the_dtype_that_computes_do_not_round_the_actor() -> None:
    named = model()
    bank = WeightBank(named, may_swap_pointers=False, dtype=torch.bfloat16)
    start = values(named)
    bank.copy("actor", "ref")
    assert {tensor.dtype for tensor in bank.copies["ref"]} == {torch.bfloat16, torch.int64}
    with bank.using("ref"):
        rounded = [t.bfloat16().float() if t.is_floating_point() else t for t in start]
        assert equal(values(named), rounded)
    assert equal(values(named), start)


def test_the_arena_of_the_actor_is_shared_and_kept() -> None:
    arena = HostArena(piece_bytes=16, pinned=False)
    bank = WeightBank(model(), may_swap_pointers=False, arena=arena)
    for tag in ("ref", "teacher"):
        bank.copy("actor", tag)
        with bank.using(tag):
            pass
    assert arena.nbytes == sum(tensor.nbytes for _, tensor in model())


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=20),
    st.sampled_from([None, "bf16"]),
)
def test_host_tensors_do_not_overlap(shapes: list[list[int]], kind: str | None) -> None:
    like = [
        torch.zeros(shape, dtype=torch.int64 if i % 3 == 2 else torch.float32)
        for i, shape in enumerate(shapes)
    ]
    made = host_tensors(like, torch.bfloat16 if kind else None)
    for i, tensor in enumerate(made):
        tensor.fill_(i)
    for i, (tensor, want) in enumerate(zip(made, like, strict=True)):
        assert tensor.shape == want.shape and bool((tensor == i).all())
        assert tensor.dtype == (torch.bfloat16 if kind and want.is_floating_point() else want.dtype)
    pieces = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in made
    }
    assert sum(pieces.values()) < 2 * (64 * len(like) + sum(t.nbytes for t in like))


@pytest.mark.parametrize(
    ("flags", "free", "kept"),
    [
        ({"use_kl_loss": True}, 8 * 128, True),
        ({"use_kl_loss": True}, 8 * 128 - 8, False),
        ({"use_kl_loss": True, "keep_old_actor": True}, 8 * 3 * 128, True),
        ({"use_kl_loss": True, "keep_old_actor": True}, 8 * 2 * 128, False),
        ({}, 10**9, False),
        ({"use_kl_loss": True, "offload_train": True}, 10**9, False),
        ({"use_kl_loss": True, "colocate": True}, 10**9, False),
    ],
)
def test_copies_stay_on_the_accelerator_where_they_take_an_eighth_of_what_is_free(
    flags: dict[str, Any], free: int, kept: bool
) -> None:
    named = [("weight", torch.zeros(4, 8))]  # 128 bytes
    args = make_args("x", **({"offload_train": False, "colocate": False} | flags))
    settings = CopySettings.of(TrainNeeds.from_args(args), args, args, False, None)
    assert keeps_copies_on_device(settings, named, free) == kept
    assert not keeps_copies_on_device(settings, named), "there is no accelerator here"


def test_a_rank_without_parameters_takes_part_in_the_choice_of_the_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pipeline stage without adapters: the others would wait for it."""
    asked: list[Tensor] = []
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (1000, 2000))
    monkeypatch.setattr("slime.backends.bank.dist.is_initialized", lambda: True)
    monkeypatch.setattr(
        "slime.backends.bank.dist.all_reduce", lambda tensor, op: asked.append(tensor)
    )
    args = make_args("x", use_kl_loss=True, offload_train=False, colocate=False)
    settings = CopySettings.of(TrainNeeds.from_args(args), args, args, False, None)
    assert keeps_copies_on_device(settings, []) and len(asked) == 1
