"""Into which parts a rollout is divided, and how each is packed."""

from __future__ import annotations

import random

import pytest
from make_args import make_args

from slime.config.layout import ParallelLayout
from slime.data.convert import parts_of_ranks
from slime.data.fields import Wire
from slime.data.parts import cut, ready
from slime.data.sample import Sample
from slime.data.schedule import PackingSettings, build_dp_schedule
from slime.rollout.group import index_of


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
            expected = list(found[number]) if there else []
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
    layout = ParallelLayout(2)

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


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_part_that_is_converted_alone_is_that_of_the_whole_rollout(ranks: int) -> None:
    """The groups finish in another order than that of the batch."""
    args = make_args(
        hf_checkpoint=None, rollout_batch_size=8, n_samples_per_prompt=4, global_batch_size=32,
        train_during_rollout=3, use_dynamic_batch_size=True, balance_data=True, max_tokens_per_gpu=60,
        share_prompt_in_pack=True, attn_implementation=None, rewards_normalization=False,
    )  # fmt: skip
    lengths = random.Random(0)
    groups = [[_sample(4 * g + i, lengths.randint(2, 30)) for i in range(4)] for g in range(8)]
    finished = [groups[i] for i in (5, 2, 7, 0, 1, 6, 4, 3)]
    layout = ParallelLayout(world_size=ranks)
    whole = list(parts_of_ranks(args, groups, 0, layout, finished=finished))
    shared = 0
    begun = [0] * ranks
    for number in range(2):
        part = sorted(ready(finished, args, ranks, number), key=index_of)
        for rank, alone in enumerate(parts_of_ranks(args, part, 0, layout)):
            packs = [indices(alone, pack) for pack in alone["micro_batch_indices"]]
            count = whole[rank]["num_microbatches"][number]
            expected = whole[rank]["micro_batch_indices"][begun[rank] : begun[rank] + count]
            assert packs == [indices(whole[rank], pack) for pack in expected]
            begun[rank] += count
            shared += len(packs)
    assert shared > 4


def indices(wire: Wire, pack: list[int]) -> list[int]:
    return [int(wire["sample_indices"][i]) for i in pack]


def _sample(index: int, length: int) -> Sample:
    prompt = [7 + index // 4] * (5 + index // 4)
    return Sample(
        index=index, group_index=index // 4, tokens=[*prompt, *range(length)], response_length=length,
        reward=1.0, status=Sample.Status.COMPLETED,
    )  # fmt: skip
