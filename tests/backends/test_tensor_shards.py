"""Tensors as rectangles: every element in exactly one, and any division reads what any other
wrote.
"""

from __future__ import annotations

import itertools
import math
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from needs import of_all

from slime.backends.tensor_shards import (
    ShardMemory,
    StoredTensors,
    TensorShard,
    boxes,
    own_storage,
    share,
    write_shards,
)
from slime.checkpoint.files import file_digest

SHAPES = st.lists(st.integers(1, 5), max_size=4)


@settings(max_examples=of_all(300, 100))
@given(SHAPES, st.data())
def test_boxes_are_the_range(shape: list[int], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(start, numel))
    whole = torch.arange(numel).view(shape)
    found = []
    for offsets, sizes in boxes(shape, start, end):
        part = whole
        for axis, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            assert size > 0
            part = part.narrow(axis, offset, size)
        found.append(part.reshape(-1))
    assert torch.equal(torch.cat([torch.arange(0), *found]), torch.arange(start, end))
    assert len(found) <= max(2 * len(shape) - 1, 1)


@given(st.integers(0, 1000), st.integers(1, 17))
def test_shares_are_a_partition(numel: int, ranks: int) -> None:
    ends = [share(numel, rank, ranks) for rank in range(ranks)]
    assert ends[0][0] == 0 and ends[-1][1] == numel
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ends))


def flat_shards(name: str, tensor: torch.Tensor, cuts: list[int]) -> list[TensorShard]:
    found = []
    for start, end in zip([0, *cuts], [*cuts, tensor.numel()], strict=True):
        done = start
        for offsets, sizes in boxes(tuple(tensor.shape), start, end):
            data = tensor.view(-1)[done : done + math.prod(sizes)].view(sizes)
            found.append(TensorShard(name, data, offsets, tuple(tensor.shape)))
            done += math.prod(sizes)
    return found


def test_another_division_reads_it_and_the_digests_are_those_of_the_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "matrix": torch.randn(7, 5),
        "experts": torch.randn(3, 2, 4, 5).bfloat16(),
        "vector": torch.randn(11),
        "number": torch.tensor(3.0),
    }
    shards = [
        shard for name, x in tensors.items() for shard in flat_shards(name, x, [x.numel() // 3])
    ]
    (tmp_path / "actor").mkdir()
    entries = write_shards(ShardMemory().copied(shards), tmp_path / "actor" / "dcp", tmp_path)
    assert sorted(entry["path"] for entry in entries) == [
        "actor/dcp/.metadata",
        "actor/dcp/__0_0.distcp",
    ]
    for entry in entries:
        path = tmp_path / entry["path"]
        assert (entry["size"], entry["digest"]) == (path.stat().st_size, file_digest(path))
    read = {name: torch.zeros(x.shape) for name, x in tensors.items()}  # in float32
    cuts = [
        s
        for name, x in read.items()
        for s in flat_shards(name, x, sorted({x.numel() // 2, x.numel() - 1}))
    ]
    StoredTensors(tmp_path / "actor" / "dcp").read([shard for shard in cuts if shard.data.numel()])
    for name, x in tensors.items():
        assert torch.equal(read[name], x.float()), name


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    write_shards(flat_shards("a", torch.zeros(4, 3), []), tmp_path / "dcp", tmp_path)
    stored = StoredTensors(tmp_path / "dcp")
    assert "a" in stored and "b" not in stored
    wrong = [*flat_shards("b", torch.zeros(2), []), *flat_shards("a", torch.zeros(5, 3), [])]
    with pytest.raises(ValueError, match=r"shape \(4, 3\), but \(5, 3"):
        stored.read(wrong)
    padded = torch.full((5, 3), 7.0)
    stored.read([shard._replace(may_be_padded=True) for shard in flat_shards("a", padded, [])])
    assert not padded[:4].any() and bool((padded[4] == 7).all())


def test_parts_that_overlap_or_miss_something_are_refused(tmp_path: Path) -> None:
    whole = flat_shards("a", torch.zeros(4, 3), [])
    with pytest.raises(RuntimeError, match="rank 0"):
        write_shards(
            [*whole, whole[0]._replace(offsets=(1, 0), data=torch.zeros(1, 3))],
            tmp_path / "dcp",
            tmp_path,
        )


def test_copies_are_made_in_the_same_memory_each_time() -> None:
    memory = ShardMemory()
    tensors = [torch.randn(3, 5), torch.randn(7).to(torch.bfloat16), torch.tensor(2.0)]

    def shards() -> list[TensorShard]:
        return [
            TensorShard(str(i), x, (0,) * x.dim(), tuple(x.shape)) for i, x in enumerate(tensors)
        ]

    first = memory.copied(shards())
    before = [tensor.clone() for tensor in tensors]
    places = [shard.data.data_ptr() for shard in first]
    for tensor in tensors:
        tensor.add_(1)
    assert all(torch.equal(shard.data, tensor) for shard, tensor in zip(first, before, strict=True))
    second = memory.copied(shards())
    assert [shard.data.data_ptr() for shard in second] == places
    assert all(
        torch.equal(shard.data, tensor) for shard, tensor in zip(second, tensors, strict=True)
    )
    tensors.append(torch.randn(4))  # the moments of an optimizer after its first step
    third = memory.copied(iter(shards()))
    assert all(
        torch.equal(shard.data, tensor) for shard, tensor in zip(third, tensors, strict=True)
    )
    assert [shard.name for shard in third] == ["0", "1", "2", "3"]


def test_memory_that_was_taken_before_is_used() -> None:
    memory, tensors = ShardMemory(), [torch.randn(64, 5), torch.randn(7)]
    shards = [TensorShard(str(i), x, (0,) * x.dim(), tuple(x.shape)) for i, x in enumerate(tensors)]
    assert not memory.is_taken
    memory.take(shards)
    assert memory.is_taken and memory._taking is not None
    memory._taking.join()
    places = [tensor.data_ptr() for tensor in memory.tensors]
    copies = memory.copied(shards)
    assert [shard.data.data_ptr() for shard in copies] == places
    assert all(
        torch.equal(shard.data, tensor) for shard, tensor in zip(copies, tensors, strict=True)
    )
    assert memory.is_taken


def test_one_stored_tensor_is_in_memory_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = [TensorShard(name, torch.randn(5), (0,), (5,)) for name in "abc"]
    (tmp_path / "actor").mkdir()
    write_shards(shards, tmp_path / "actor" / "dcp", tmp_path)
    stored = StoredTensors(tmp_path / "actor" / "dcp")
    load, loaded, alive = torch.load, [], []

    def watched(*arguments: object, **keywords: object) -> object:
        alive.append(sum(before() is not None for before in loaded))
        tensor = load(*arguments, **keywords)
        loaded.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(torch, "load", watched)
    stored.read([shard._replace(data=torch.zeros(5)) for shard in shards])
    assert alive == [0, 0, 0]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3)])
def test_a_view_is_written_alone_and_without_a_copy(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    numel = math.prod(shape)
    view = torch.arange(3, 12).to(dtype)[2 : 2 + numel].view(shape)
    own = own_storage(view)
    assert (
        own.untyped_storage().nbytes() == numel * dtype.itemsize
        and own.dtype == dtype
        and own.shape == view.shape
    )
    assert torch.equal(own.double(), view.double()) and (
        not numel or own.data_ptr() == view.data_ptr()
    )


def test_a_view_with_gaps_is_written_alone() -> None:
    view = torch.arange(12.0).view(3, 4)[:, 1:3]
    own = own_storage(view)
    assert torch.equal(own, view) and own.untyped_storage().nbytes() == 24
