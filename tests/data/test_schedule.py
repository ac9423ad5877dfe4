"""The data-parallel schedule: the documented example, and what must hold for any batch."""

from __future__ import annotations

import json
import logging
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_args import make_args

from slime.config.hf_config import model_config
from slime.config.layout import ParallelLayout
from slime.data.balance import ModelShape, first_fit, forward_flops, split_in_two
from slime.data.convert import parts_of_ranks
from slime.data.fields import Wire
from slime.data.lock_step import deal
from slime.data.sample import Sample
from slime.data.schedule import PackingSettings, build_dp_schedule, cut, ready
from slime.rollout.group import index_of
from slime.utils import dp_schedule

DYNAMIC = PackingSettings(dynamic=True, max_tokens=10)


def schedule(
    settings: PackingSettings,
    lengths: list[int],
    gbs: int,
    dp: int,
    ids: list[int] | None = None,
    **cfg: int,
) -> Any:
    rollouts = list(range(len(lengths))) if ids is None else ids
    layout = ParallelLayout(dp * cfg.get("cp", 1), **cfg)
    return build_dp_schedule(
        settings, layout, lengths, global_batch_size=gbs, rollout_indices=rollouts
    )


def test_the_documented_example() -> None:
    partitions, micro_batches, counts, sizes = schedule(
        DYNAMIC, [3, 7, 5, 5, 9, 2, 12, 1], gbs=4, dp=2
    )
    assert partitions == [[0, 1, 4, 6], [2, 3, 5, 7]]
    assert micro_batches == [[[0, 1], [2], [3]], [[0, 1], [2], [3]]]
    assert counts == [1, 2] and sizes == [4, 4]


def check_schedule(
    settings: PackingSettings, ids: list[int], lengths: list[int], gbs: int, dp: int
) -> None:
    """What holds for every schedule of samples whose rollouts are numbered 0, 1, 2, ... in
    order.
    """
    partitions, micro_batches, counts, sizes = schedule(settings, lengths, gbs, dp, ids)
    steps = (ids[-1] + 1) // gbs
    assert sorted(p for part in partitions for p in part) == [
        i for i, r in enumerate(ids) if r < steps * gbs
    ]
    assert sizes == [gbs] * steps and len(counts) == steps
    for part, batches in zip(partitions, micro_batches, strict=True):
        assert [i for batch in batches for i in batch] == list(range(len(part))), (
            "trained in the partition's order"
        )
        assert len(batches) == sum(counts) and all(batches), (
            "equally many micro-batches, none empty"
        )
        for step, count in enumerate(counts):
            begin = sum(counts[:step])
            in_step = {
                ids[part[i]] // gbs for batch in batches[begin : begin + count] for i in batch
            }
            assert in_step == {step}, "siblings and steps stay together"


@given(
    siblings=st.lists(st.integers(1, 3), min_size=8, max_size=24),
    lengths=st.lists(st.integers(1, 14), min_size=72, max_size=72),
    dp=st.sampled_from([1, 2, 3, 4]),
    steps=st.integers(1, 2),
    balance=st.booleans(),
)
def test_every_sample_exactly_once(
    siblings: list[int], lengths: list[int], dp: int, steps: int, balance: bool
) -> None:
    ids = [rollout for rollout, n in enumerate(siblings) for _ in range(n)]
    check_schedule(
        replace(DYNAMIC, balanced=balance), ids, lengths[: len(ids)], len(siblings) // steps, dp
    )


@given(
    st.integers(1, 4),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
)
def test_static_schedules(size: int, dp: int, per_rank: int, steps: int, balance: bool) -> None:
    gbs = size * dp * per_rank
    settings = PackingSettings(micro_batch_size=size, balanced=balance)
    check_schedule(
        settings, list(range(gbs * steps)), [1 + i % 5 for i in range(gbs * steps)], gbs, dp
    )


@given(st.lists(st.integers(1, 10), min_size=4, max_size=40), st.sampled_from([1, 2, 4]))
def test_token_cap_holds(lengths: list[int], dp: int) -> None:
    lengths = lengths[: len(lengths) // dp * dp]
    partitions, micro_batches, _, _ = schedule(DYNAMIC, lengths, len(lengths), dp)
    for part, batches in zip(partitions, micro_batches, strict=True):
        for batch in batches:
            assert sum(lengths[part[i]] for i in batch) <= 10


def test_context_parallel_multiplies_the_cap() -> None:
    assert schedule(DYNAMIC, [10, 10], 2, 1)[2] == [2]
    assert schedule(DYNAMIC, [10, 10], 2, 1, cp=2)[2] == [1]


def test_interleaved_pipeline_groups() -> None:
    assert schedule(DYNAMIC, [2] * 12, 12, 2, vpp=2, vpp_group=3)[2] == [3]
    args = SimpleNamespace(use_dynamic_batch_size=True, max_tokens_per_gpu=10, balance_data=False)
    sizes = {"dp_size": 2, "microbatch_group_size_per_vp_stage": 3}
    for vpp, count in ((2, 3), (1, 2)):
        counts = dp_schedule.build_dp_schedule(
            args,
            {**sizes, "vpp_size": vpp},
            [2] * 12,
            global_batch_size=12,
            rollout_indices=range(12),
        )[2]
        assert counts == [count], "stages that are not interleaved have no groups"


def test_odd_long_samples_are_joined_not_refused(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        partitions, micro_batches, counts, _ = schedule(DYNAMIC, [9, 8, 9, 7, 9], 5, 2)
    assert counts == [2] and sorted(partitions[0] + partitions[1]) == [0, 1, 2, 3, 4]
    assert "the shortest" in caplog.text and "15 tokens" in caplog.text
    assert {len(b) for rank in micro_batches for b in rank} == {1, 2}


def test_static_batches() -> None:
    settings = PackingSettings(micro_batch_size=2)
    partitions, micro_batches, counts, _ = schedule(settings, [1] * 8, 8, 2)
    assert partitions == [[0, 1, 4, 5], [2, 3, 6, 7]] and counts == [2]
    assert micro_batches[0] == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match=r"6 samples.*micro-batch-size 2 = 3 micro-batches.*of 2"):
        schedule(settings, [1] * 6, 6, 2)


@pytest.mark.parametrize("dynamic", [True, False])
def test_micro_batches_are_dealt_out_in_order_without_balancing(dynamic: bool) -> None:
    """Which rank trains a sample then follows from the order of the samples, and not from their
    lengths.
    """
    # no two fit together; dealt out by cost, each rank would get both lengths
    lengths = [9, 6, 9, 6, 9, 6, 9, 6]
    settings = replace(DYNAMIC, dynamic=dynamic)
    assert schedule(settings, lengths, gbs=8, dp=2)[0] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    settings = replace(settings, balanced=True)
    assert [
        sum(lengths[i] for i in part) for part in schedule(settings, lengths, gbs=8, dp=2)[0]
    ] == [30, 30]


def test_balancing_evens_out_flops() -> None:
    lengths = [100, 90, 10, 10, 95, 12, 8, 99]
    work = []
    for balance in (False, True):
        settings = replace(DYNAMIC, max_tokens=100, balanced=balance)
        partitions = schedule(settings, lengths, 8, 2)[0]
        sums = [sum(forward_flops(None, lengths[i]) for i in part) for part in partitions]
        work.append(max(sums) / sum(sums))
    assert work[1] <= work[0] and work[1] < 0.52


def test_impossible_and_leftover_batches(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=r"3 rollouts.*--global-batch-size 4"):
        schedule(DYNAMIC, [1] * 3, 4, 1)
    with pytest.raises(ValueError, match=r"step 0 has 2.*for 4"):
        schedule(DYNAMIC, [1] * 2, 2, 4)
    with caplog.at_level(logging.WARNING):
        assert schedule(DYNAMIC, [1] * 7, 3, 1)[3] == [3, 3]
    assert "last 1" in caplog.text


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 6))
def test_micro_batches_are_dealt_out_in_rows_of_about_equal_costs(
    costs: list[int], ranks: int
) -> None:
    costs = costs * ranks
    batches = [[j] for j in range(len(costs))]
    dealt = deal(batches, costs, ranks)
    assert sorted(j for mine in dealt for batch in mine for j in batch) == list(range(len(costs)))
    assert all(len({costs[batch[0]] for batch in row}) == 1 for row in zip(*dealt, strict=True))
    assert deal([[0], [1], [2], [3]], [8, 7, 6, 5], 2) == [[[0], [3]], [[1], [2]]], "13 : 13"


def test_small_partition_helpers() -> None:
    assert first_fit([3, 7, 12, 5, 5], 10) == [[0, 1], [2], [3, 4]]
    assert split_in_two([4, 7, 9], lambda i: {4: 5, 7: 3, 9: 3}[i]) == ([4], [7, 9])


DENSE = dict(
    hidden_size=64, num_layers=2, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=128, vocab_size=100,
    swiglu=True,
)  # fmt: skip


def flops(length: int, **changes: Any) -> float:
    return forward_flops(ModelShape.from_megatron(DENSE | changes), length)


def test_flops_of_a_dense_model() -> None:
    per_layer = (
        2 * (64 * 64 + 2 * 64 * 32 + 64 * 64) * 10 + 2 * 64 * 10 * 10 + 2 * 3 * 64 * 128 * 10
    )
    assert flops(10) == 2 * per_layer + 2 * 64 * 100 * 10
    assert flops(10) - flops(10, swiglu=False) == 2 * 10 * 2 * 64 * 128, (
        "one matrix fewer in each of two layers"
    )
    assert flops(10, num_query_groups=None, kv_channels=None) == flops(
        10, num_query_groups=4, kv_channels=16
    )


def test_flops_of_experts() -> None:
    moe = dict(num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=32)
    saved = 2 * 10 * (3 * 64 * 128 - (3 * 64 * 64 + 64 * 8))
    assert flops(10) - flops(10, **moe, moe_layer_freq=[0, 1]) == saved
    assert flops(10) - flops(10, **moe) == 2 * saved
    every_other = flops(10, **moe, num_layers=5, moe_layer_freq=[1, 0, 1, 0, 1])
    assert flops(10, **moe, num_layers=5, moe_layer_freq=2) == every_other


@pytest.mark.parametrize("query_rank", [None, 24])
def test_flops_of_multi_latent_attention(query_rank: int | None) -> None:
    """Four heads; keys of 16 + 8 (the latter with rotary embeddings, shared by the heads), values
    of 12, rank 32.
    """
    mla = dict(
        multi_latent_attention=True,
        qk_head_dim=16,
        qk_pos_emb_head_dim=8,
        v_head_dim=12,
        kv_lora_rank=32,
    )
    queries = 64 * 4 * 24 if query_rank is None else 64 * 24 + 24 * 4 * 24
    down, up, out = 64 * (32 + 8), 32 * 4 * (16 + 12), 4 * 12 * 64
    per_layer = (
        2 * (queries + down + up + out) * 10 + 4 * (24 + 12) * 10 * 10 + 2 * 3 * 64 * 128 * 10
    )
    assert flops(10, **mla, q_lora_rank=query_rank) == 2 * per_layer + 2 * 64 * 100 * 10


def test_the_shape_of_a_checkpoint_is_that_of_its_flags(tmp_path: Path) -> None:
    dense = dict(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
    )
    dense |= dict(intermediate_size=128, hidden_act="silu")
    (tmp_path / "config.json").write_text(json.dumps(dense))
    assert ModelShape.from_config(model_config(str(tmp_path))) == ModelShape.from_megatron(DENSE)
    moe = dict(
        n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1
    )
    (tmp_path / "config.json").write_text(json.dumps(dense | moe | dict(n_shared_experts=1)))
    flags = dict(num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=32, moe_layer_freq=[0, 1])
    expected = ModelShape.from_megatron(
        DENSE | flags | dict(moe_shared_expert_intermediate_size=32)
    )
    assert ModelShape.from_config(model_config(str(tmp_path))) == expected
    assert ModelShape.from_config(model_config(str(tmp_path / "nowhere"))) is None


def test_flops_without_a_shape_only_say_how_quadratic_attention_is() -> None:
    assert ModelShape.from_megatron({}) is None
    assert forward_flops(None, 20) > 2 * forward_flops(None, 10)


def test_settings_from_flags() -> None:
    args = make_args(
        balance_by_flops=True,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=10,
        global_batch_size=8,
    )
    settings = PackingSettings.from_args(args)
    assert (
        settings.dynamic
        and settings.max_tokens == 10
        and settings.balanced
        and settings.shape is None
    )
    args = make_args(
        max_tokens_per_gpu=10, use_dynamic_batch_size=True, megatron=dict(DENSE), balance_data=False
    )
    settings = PackingSettings.from_args(args)
    assert not settings.balanced and settings.shape is not None and settings.shape.kv_heads == 2
    lengths = [3, 7, 5, 5, 9, 2, 12, 1]
    of_args = dp_schedule.build_dp_schedule(
        args, {"dp_size": 2}, lengths, global_batch_size=4, rollout_indices=range(8)
    )
    assert of_args == schedule(settings, lengths, 4, 2), "the documented import path takes args"
    shared = PackingSettings(dynamic=True, max_tokens=10, balanced=True)
    args = make_args(balance_data=True, use_dynamic_batch_size=True, max_tokens_per_gpu=10)
    sizes, prompts = (
        {"global_batch_size": 4, "rollout_indices": range(4)},
        [("p", 7)] * 4,
    )
    of_args = dp_schedule.build_dp_schedule(args, {"dp_size": 1}, [8] * 4, **sizes, prompts=prompts)
    assert of_args == build_dp_schedule(shared, ParallelLayout(), [8] * 4, **sizes, prompts=prompts)
    assert of_args != build_dp_schedule(shared, ParallelLayout(), [8] * 4, **sizes), (
        "four samples with one prompt fit together"
    )


def test_the_documented_path_takes_a_plain_namespace() -> None:
    args = SimpleNamespace(use_dynamic_batch_size=True, max_tokens_per_gpu=10, balance_data=False)
    lengths = [3, 7, 5, 5, 9, 2, 12, 1]
    parts, _, micro_batches, sizes = dp_schedule.build_dp_schedule(
        args, {"dp_size": 2, "cp_size": 1}, lengths, global_batch_size=4, rollout_indices=range(8)
    )
    assert (parts, micro_batches, sizes) == ([[0, 1, 4, 6], [2, 3, 5, 7]], [1, 2], [4, 4])


@pytest.mark.parametrize("balanced", [False, True])
@given(
    sizes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=4, max_size=16),
    dp=st.integers(1, 2),
)
def test_whole_rollouts_stay_together_in_order(
    balanced: bool, sizes: list[list[int]], dp: int
) -> None:
    sizes = sizes[: len(sizes) // 4 * 4]
    lengths = [length for rollout in sizes for length in rollout]
    ids = [number for number, rollout in enumerate(sizes) for _ in rollout]
    settings = replace(DYNAMIC, balanced=balanced, whole_rollouts=True)
    partitions, batches, counts, _ = build_dp_schedule(
        settings, ParallelLayout(dp), lengths, global_batch_size=4, rollout_indices=ids
    )
    assert sorted(i for rank in partitions for i in rank) == list(range(len(lengths)))
    assert [len(rank) for rank in batches] == [sum(counts)] * dp
    for partition, of_rank in zip(partitions, batches, strict=True):
        assert [i for batch in of_rank for i in batch] == list(range(len(partition)))
        for batch in of_rank:
            held = [partition[i] for i in batch]
            assert held == sorted(held, key=lambda i: [ids[k] for k in held].index(ids[i]))
            assert all(
                held.count(i) == 1 for i, one in enumerate(ids) if one in {ids[k] for k in held}
            )


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
