"""Host memory that the trainer sleeps in; what needs CUDA is in test_fsdp_cuda.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.backends.offload import HostArena, Offloader, copied_to


@given(st.lists(st.integers(0, 70), min_size=1, max_size=12))
def test_bytes_come_back_wherever_the_pieces_end(sizes: list[int]) -> None:
    arena = HostArena(piece_bytes=16, pinned=False)
    arena.reserve(sum(sizes))
    assert sum(sizes) <= arena.nbytes < max(2 * sum(sizes), 1)
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    for start, tensor in zip(starts, tensors, strict=True):
        for host, part in arena.pieces(start, tensor):
            host.copy_(part)
    for start, tensor in zip(starts, tensors, strict=True):
        back = torch.zeros_like(tensor)
        for host, part in arena.pieces(start, back):
            part.copy_(host)
        assert torch.equal(back, tensor)


@pytest.mark.parametrize("pinned", [False, True])
def test_memory_is_kept_and_grows(pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostArena, "allocate", lambda _, size: torch.zeros(size, dtype=torch.uint8))
    arena = HostArena(piece_bytes=16, pinned=pinned)
    arena.reserve(20)
    first = arena.memory[0]
    arena.memory[1].fill_(7)
    arena.reserve(7)
    assert arena.nbytes == 20  # 16 + 4
    arena.reserve(40)
    assert arena.memory[0] is first
    assert [piece.numel() for piece in arena.memory] == [16, 16, 8]
    assert arena.memory[1].tolist() == [7] * 4 + [0] * 12


def test_on_the_cpu_there_is_nothing_to_give_back() -> None:
    offloader = Offloader()
    tensor = torch.arange(4.0)
    assert offloader.sleep([tensor]) == 0 and not offloader.asleep
    offloader.wake()
    assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_some_sleep_first_and_the_others_later() -> None:
    """What shares memory with a tensor that stays is not put to sleep, and all bytes come back."""
    offloader = Offloader("cpu")
    offloader.host.piece_bytes = 64
    weights = torch.arange(30, dtype=torch.int64)
    moments, master = torch.arange(50.0), weights[10:20]
    expected = [tensor.clone() for tensor in (weights, moments, master)]
    assert offloader.sleep([weights, moments, master], keep=[weights]) == 200
    assert moments.untyped_storage().nbytes() == 0 and torch.equal(weights, expected[0])
    assert offloader.sleep([weights, moments, master], keep=[weights]) == 0, (
        "a repeated call changes nothing"
    )
    assert offloader.sleep([weights, moments, master]) == 240
    assert weights.untyped_storage().nbytes() == master.untyped_storage().nbytes() == 0
    offloader.wake()
    assert [
        torch.equal(*pair) for pair in zip((weights, moments, master), expected, strict=True)
    ] == [True] * 3


def test_memory_that_grows_keeps_what_sleeps_in_it() -> None:
    """More came to life between the two calls than the first one made room for."""
    offloader = Offloader("cpu")
    offloader.host.piece_bytes = 64
    first, second = torch.arange(5.0), torch.arange(100.0)
    offloader.sleep([first])
    offloader.sleep([first, second])
    offloader.wake()
    assert first.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0] and torch.equal(second, torch.arange(100.0))


def test_a_model_has_its_own_tensors_again_after_it_was_on_a_device() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = list(model.parameters())
    with copied_to(model, torch.device("meta")):
        assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
    assert all(torch.equal(tensor, values[name]) for name, tensor in model.state_dict().items())
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))


def test_parameters_that_stayed_the_same_objects_have_their_old_values_again() -> None:
    """As they do when a model is moved to a GPU: only their data are replaced."""
    model = torch.nn.Linear(3, 3)
    before = [(parameter.data_ptr(), parameter.clone()) for parameter in model.parameters()]
    with copied_to(model, torch.device("cpu")):
        for parameter in model.parameters():
            parameter.data = parameter.data + 1
    for (place, value), parameter in zip(before, model.parameters(), strict=True):
        assert parameter.data_ptr() == place and torch.equal(parameter, value)
