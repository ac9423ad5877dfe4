"""The part of a parameter that one tensor-parallel rank reads, against the whole parameter cut into
parts.
"""

from __future__ import annotations

from types import EllipsisType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slime.plugins.megatron.maps import (
    COLUMNS,
    REPLICATED,
    ROWS,
    ByHead,
    Interleaved,
    Layout,
    QueryKeyValue,
    Stacked,
    Transposed,
    Vocabulary,
)


class Counted:
    """A tensor that counts the elements that were read of it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.shape, self.read = tensor, tensor.shape, 0

    def __getitem__(self, index: EllipsisType | tuple[slice, ...]) -> Tensor:
        found = self.tensor[index]
        self.read += found.numel()
        return found


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, list[int], int, bool]:
    """A layout, the rows of its tensors, the number of ranks, and whether the tensors are
    matrices.
    """
    size = draw(st.sampled_from([1, 2, 3, 4]))
    rows = size * draw(st.integers(1, 4))
    matrices = draw(st.booleans())
    kind = draw(
        st.sampled_from(
            [
                "replicated",
                "rows",
                "columns",
                "vocabulary",
                "stacked",
                "fused",
                "qkv",
                "fused qkv",
                "by head",
            ]
        )
    )
    if kind == "columns":
        return COLUMNS, [draw(st.integers(1, 4))], size, True
    if kind == "vocabulary":
        return Vocabulary(rows=draw(st.integers(1, rows)), padded=rows), [], size, matrices
    if kind == "stacked":
        return Stacked(), [rows, rows], size, matrices
    if kind == "fused":
        return Stacked(fused=True), [2 * rows], size, matrices
    if "qkv" in kind:
        groups, heads, dim = (draw(st.integers(1, 4)) for _ in range(3))
        dim *= size  # more ranks than groups cut a group, perhaps within a head
        gated, fused = draw(st.booleans()), kind != "qkv"
        layout = QueryKeyValue(
            groups=groups, heads_per_group=heads, dim=dim, gated=gated, fused=fused
        )
        return layout, [], size, matrices
    if kind == "by head":
        sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
        return ByHead(heads=rows, sizes=sizes), [rows * sum(sizes)], size, matrices
    return (ROWS if kind == "rows" else REPLICATED), [rows], size, matrices


@given(cases())
def test_a_part_is_what_the_whole_gives_and_nothing_else_is_read(
    case: tuple[Layout, list[int], int, bool],
) -> None:
    layout, rows, size, matrices = case
    if isinstance(layout, Vocabulary):
        rows = [layout.rows]
    elif isinstance(layout, QueryKeyValue):
        queries = layout.heads_per_group * (2 if layout.gated else 1)
        rows = [layout.groups * layout.dim * heads for heads in (queries, 1, 1)]
        rows = [sum(rows)] if layout.fused else rows
    columns = (3 * size,) if matrices else ()
    tensors = [torch.randn(count, *columns) for count in rows]
    whole = layout.join(tensors)
    read = 0
    for rank in range(size):
        sources = [Counted(tensor) for tensor in tensors]
        part = layout.part(sources, rank, size)
        assert torch.equal(
            part, whole if layout.axis is None else whole.chunk(size, layout.axis)[rank]
        )
        read += sum(source.read for source in sources)
    assert read == sum(tensor.numel() for tensor in tensors) * (
        1 if layout.axis is not None else size
    )
    assert all(torch.equal(*pair) for pair in zip(layout.split(whole), tensors, strict=True))


def test_gates_come_after_the_queries_of_their_group() -> None:
    layout = QueryKeyValue(groups=2, heads_per_group=2, dim=1, gated=True)
    query = torch.tensor([1, -1, 2, -2, 3, -3, 4, -4])  # a gate after its query
    assert layout.join([query, torch.tensor([5, 6]), torch.tensor([7, 8])]).tolist() == [
        *(1, 2, -1, -2, 5, 7),
        *(3, 4, -3, -4, 6, 8),
    ]


def test_the_heads_of_a_part_are_a_smaller_tensor_of_the_same_kind() -> None:
    """Queries of two rows, keys and values of one row, of four heads; the second of two ranks has
    the last two.
    """
    layout = ByHead(heads=4, sizes=(2, 1, 1))
    tensor = torch.tensor([*(1, 1, 2, 2, 3, 3, 4, 4), *(10, 20, 30, 40), *(100, 200, 300, 400)])
    part = layout.part([tensor], 1, 2)
    assert part.tolist() == [3, 3, 30, 300, 4, 4, 40, 400]
    assert ByHead(heads=2, sizes=(2, 1, 1)).split(part)[0].tolist() == [
        3,
        3,
        4,
        4,
        30,
        40,
        300,
        400,
    ]


@pytest.mark.parametrize(
    ("layout", "shape", "full"),
    [
        (Interleaved(), (3, 8), (2, 4, 3)),
        (Interleaved(), (8,), (2, 4)),
        (Transposed(), (4, 3), (3, 4)),
    ],
)
def test_an_expert_of_a_stacked_tensor(
    layout: Layout, shape: tuple[int, ...], full: tuple[int, ...]
) -> None:
    """Its parts are those of the whole, the shapes are known before, and what is split again is the
    same.
    """
    tensor = torch.randn(shape)
    whole = layout.join([tensor])
    assert whole.shape == full
    assert layout.axis is not None
    for rank in range(2):
        part = layout.part([tensor], rank, 2)
        assert torch.equal(part, whole.chunk(2, layout.axis)[rank])
        assert layout.full_shape(part.shape, 2) == list(full)
    if isinstance(layout, Interleaved):
        assert torch.equal(whole[0, 1], tensor[..., 2]), "gate and up in turn"
        assert torch.equal(whole[1, 1], tensor[..., 3])
    assert all(torch.equal(*pair) for pair in zip(layout.split(whole), [tensor], strict=True))


@pytest.mark.parametrize(
    ("layout", "rows"),
    [(ROWS, [4]), (Stacked(), [4, 4]), (Vocabulary(rows=4, padded=4), [4]), (COLUMNS, [1])],
)
def test_what_cannot_be_cut_into_equal_parts_is_refused(layout: Layout, rows: list[int]) -> None:
    with pytest.raises(ValueError, match=r"4 cannot.*3 tensor"):
        layout.part([torch.zeros(count, 4) for count in rows], 0, 3)
