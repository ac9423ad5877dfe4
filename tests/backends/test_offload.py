"""Host memory that the trainer sleeps in; what needs CUDA is in test_fsdp_cuda.py."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.backends.offload import HostArena, Offloader


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


def test_memory_is_kept_and_grows() -> None:
    arena = HostArena(piece_bytes=16, pinned=False)
    arena.reserve(20)
    first = arena.memory[0]
    arena.reserve(7)
    assert arena.nbytes == 20  # 16 + 4
    arena.reserve(40)
    assert arena.memory[0] is first
    assert [piece.numel() for piece in arena.memory] == [16, 16, 8]


def test_on_the_cpu_there_is_nothing_to_give_back() -> None:
    offloader = Offloader()
    tensor = torch.arange(4.0)
    assert offloader.sleep([tensor]) == 0 and not offloader.asleep
    offloader.wake()
    assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0]
