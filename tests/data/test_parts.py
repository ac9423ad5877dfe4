"""Into which parts a rollout is divided, and how each is packed."""

from __future__ import annotations

import pytest
from make_args import make_args

from slime.data.parts import cut, ready
from slime.data.schedule import PackingSettings, build_dp_schedule


@pytest.mark.parametrize(
    ("groups", "parts", "samples", "ranks", "sizes"),
    [
        (8, 1, 4, 1, [8]),
        (8, 4, 4, 1, [2, 2, 2, 2]),
        (8, 3, 4, 1, [2, 2, 4]),
        (5, 2, 4, 1, [2, 3]),
        (3, 9, 4, 1, [1, 1, 1]),
        (8, 8, 2, 4, [2, 2, 2, 2]),  # each rank needs a sample
        (3, 3, 2, 8, [3]),
    ],
)
def test_parts_are_of_equal_size_and_the_last_is_no_smaller(
    groups: int, parts: int, samples: int, ranks: int, sizes: list[int]
) -> None:
    args = make_args(
        rollout_batch_size=groups, n_samples_per_prompt=samples, train_during_rollout=parts
    )
    found = cut(range(groups), args, ranks)
    assert [len(part) for part in found] == sizes
    assert [i for part in found for i in part] == list(range(groups))
    # While groups finish one after the other, a part is there with its last group, and the last
    # part never is.
    for finished in range(groups + 1):
        for number in range(len(found) + 1):
            there = number < len(found) - 1 and finished > found[number][-1]
            expected = list(found[number]) if there else None
            assert ready(range(finished), args, ranks, number) == expected
    # A part that was handed out is converted alone.
    for part in found[:-1]:
        assert [list(one) for one in cut(part, args, ranks)] == [list(part)]


@pytest.mark.parametrize("dynamic", [False, True])
def test_each_part_is_packed_as_if_it_were_alone(dynamic: bool) -> None:
    settings = PackingSettings(
        dynamic=dynamic, max_tokens=40, micro_batch_size=2, balanced=dynamic, global_batch_size=12
    )
    lengths = [5, 9, 30, 7, 11, 3, 20, 8, 6, 4, 10, 12]
    parts = [[0, 1, 6, 7], [2, 3, 4, 5, 8, 9, 10, 11]]
    layout = {"dp_size": 2}

    partitions, micro_batches, counts, sizes = build_dp_schedule(
        settings, layout, lengths, global_batch_size=12, rollout_indices=range(12), parts=parts
    )
    assert sizes == [12, 12] and len(counts) == 2
    for rank in range(2):
        begun = 0
        for part, count in zip(parts, counts, strict=True):
            alone = build_dp_schedule(
                settings,
                layout,
                [lengths[i] for i in part],
                global_batch_size=len(part),
                rollout_indices=range(len(part)),
            )
            packs = micro_batches[rank][begun : begun + count]
            begun += count
            assert [[partitions[rank][i] for i in pack] for pack in packs] == [
                [part[alone[0][rank][i]] for i in pack] for pack in alone[1][rank]
            ]
    assert sorted(partitions[0] + partitions[1]) == list(range(12))
