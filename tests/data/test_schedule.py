"""The data-parallel schedule: the documented example, and what must hold for any batch."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.data.flops import forward_flops
from slime.data.partition import first_fit, karmarkar_karp, split_in_two
from slime.utils.dp_schedule import build_dp_schedule


def make_args(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"use_dynamic_batch_size": True, "max_tokens_per_gpu": 10, "micro_batch_size": 1, **more})


def schedule(
    args: SimpleNamespace, lengths: list[int], gbs: int, dp: int, ids: list[int] | None = None, **cfg: int
) -> Any:
    rollouts = list(range(len(lengths))) if ids is None else ids
    return build_dp_schedule(args, {"dp_size": dp, **cfg}, lengths, global_batch_size=gbs, rollout_indices=rollouts)


def test_the_documented_example() -> None:
    partitions, micro_batches, counts, sizes = schedule(make_args(), [3, 7, 5, 5, 9, 2, 12, 1], gbs=4, dp=2)
    assert partitions == [[0, 1, 4, 6], [2, 3, 5, 7]]
    assert micro_batches == [[[0, 1], [2], [3]], [[0, 1], [2], [3]]]
    assert counts == [1, 2] and sizes == [4, 4]


def check_schedule(args: SimpleNamespace, ids: list[int], lengths: list[int], gbs: int, dp: int) -> None:
    """What holds for every schedule of samples whose rollouts are numbered 0, 1, 2, ... in order."""
    partitions, micro_batches, counts, sizes = schedule(args, lengths, gbs, dp, ids)
    steps = (ids[-1] + 1) // gbs
    assert sorted(p for part in partitions for p in part) == [i for i, r in enumerate(ids) if r < steps * gbs]
    assert sizes == [gbs] * steps and len(counts) == steps
    for part, batches in zip(partitions, micro_batches, strict=True):
        assert [i for batch in batches for i in batch] == list(range(len(part))), "trained in the partition's order"
        assert len(batches) == sum(counts) and all(batches), "equally many micro-batches, none empty"
        for step, count in enumerate(counts):
            begin = sum(counts[:step])
            in_step = {ids[part[i]] // gbs for batch in batches[begin : begin + count] for i in batch}
            assert in_step == {step}, "siblings and steps stay together"


@given(
    siblings=st.lists(st.integers(1, 3), min_size=8, max_size=24),
    lengths=st.lists(st.integers(1, 14), min_size=72, max_size=72),
    dp=st.sampled_from([1, 2, 3, 4]),
    steps=st.integers(1, 2),
    balance=st.booleans(),
    by_flops=st.booleans(),
)
def test_every_sample_exactly_once(
    siblings: list[int], lengths: list[int], dp: int, steps: int, balance: bool, by_flops: bool
) -> None:
    ids = [rollout for rollout, n in enumerate(siblings) for _ in range(n)]
    args = make_args(balance_data=balance, balance_by_flops=by_flops)
    check_schedule(args, ids, lengths[: len(ids)], len(siblings) // steps, dp)


@given(st.integers(1, 4), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_static_schedules(size: int, dp: int, per_rank: int, steps: int, balance: bool) -> None:
    gbs = size * dp * per_rank
    args = make_args(use_dynamic_batch_size=False, micro_batch_size=size, balance_data=balance)
    check_schedule(args, list(range(gbs * steps)), [1 + i % 5 for i in range(gbs * steps)], gbs, dp)


@given(st.lists(st.integers(1, 10), min_size=4, max_size=40), st.sampled_from([1, 2, 4]))
def test_token_cap_holds(lengths: list[int], dp: int) -> None:
    lengths = lengths[: len(lengths) // dp * dp]
    partitions, micro_batches, _, _ = schedule(make_args(), lengths, len(lengths), dp)
    for part, batches in zip(partitions, micro_batches, strict=True):
        for batch in batches:
            assert sum(lengths[part[i]] for i in batch) <= 10


def test_context_parallel_multiplies_the_cap() -> None:
    assert schedule(make_args(), [10, 10], 2, 1)[2] == [2]
    assert schedule(make_args(), [10, 10], 2, 1, cp_size=2)[2] == [1]


def test_interleaved_pipeline_groups() -> None:
    counts = schedule(make_args(), [2] * 12, 12, 2, vpp_size=2, microbatch_group_size_per_vp_stage=2)[2]
    assert counts == [2]


def test_odd_long_samples_are_joined_not_refused(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        partitions, micro_batches, counts, _ = schedule(make_args(), [9, 8, 9, 7, 9], 5, 2)
    assert counts == [2] and sorted(partitions[0] + partitions[1]) == [0, 1, 2, 3, 4]
    assert "joined the shortest" in caplog.text and "15 tokens" in caplog.text
    assert {len(b) for rank in micro_batches for b in rank} == {1, 2}


def test_static_batches() -> None:
    args = make_args(use_dynamic_batch_size=False, micro_batch_size=2)
    partitions, micro_batches, counts, _ = schedule(args, [1] * 8, 8, 2)
    assert partitions == [[0, 1, 4, 5], [2, 3, 6, 7]] and counts == [2]
    assert micro_batches[0] == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="6 samples / micro-batch-size 2 = 3 micro-batches, not a multiple of 2"):
        schedule(args, [1] * 6, 6, 2)


@pytest.mark.parametrize("dynamic", [True, False])
def test_micro_batches_are_dealt_out_in_order_without_balancing(dynamic: bool) -> None:
    """Which rank trains a sample then follows from the order of the samples, and not from their lengths."""
    lengths = [9, 6, 9, 6, 9, 6, 9, 6]  # no two fit together; dealt out by cost, each rank would get both lengths
    args = make_args(use_dynamic_batch_size=dynamic)
    assert schedule(args, lengths, gbs=8, dp=2)[0] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    args.balance_data = True
    assert [sum(lengths[i] for i in part) for part in schedule(args, lengths, gbs=8, dp=2)[0]] == [30, 30]


def test_balancing_evens_out_flops() -> None:
    lengths = [100, 90, 10, 10, 95, 12, 8, 99]
    work = []
    for balance in (False, True):
        args = make_args(max_tokens_per_gpu=100, balance_data=balance)
        partitions = schedule(args, lengths, 8, 2)[0]
        sums = [sum(forward_flops(args, lengths[i]) for i in part) for part in partitions]
        work.append(max(sums) / sum(sums))
    assert work[1] <= work[0] and work[1] < 0.52


def test_impossible_and_leftover_batches(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="3 rollouts are less than one optimizer step of --global-batch-size 4"):
        schedule(make_args(), [1] * 3, 4, 1)
    with pytest.raises(ValueError, match="step 0 has 2 samples for 4"):
        schedule(make_args(), [1] * 2, 2, 4)
    with caplog.at_level(logging.WARNING):
        assert schedule(make_args(), [1] * 7, 3, 1)[3] == [3, 3]
    assert "the last 1 are not trained on" in caplog.text


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 6))
def test_karmarkar_karp_parts(weights: list[int], parts: int) -> None:
    split = karmarkar_karp(weights, parts)
    assert len(split) == parts and sorted(i for part in split for i in part) == list(range(len(weights)))
    sums = [sum(weights[i] for i in part) for part in split]
    assert max(sums) - min(sums) <= max(weights, default=0), "differencing never does worse than one item"
    whole = weights[: len(weights) // parts * parts]
    equal = karmarkar_karp(whole, parts, equal_counts=True)
    assert {len(part) for part in equal} == {len(whole) // parts}


def test_small_partition_helpers() -> None:
    assert karmarkar_karp([8, 7, 6, 5, 4], 2) == [[0, 2], [1, 3, 4]], "the textbook's 14 : 16"
    assert first_fit([3, 7, 12, 5, 5], 10) == [[0, 1], [2], [3, 4]]
    assert split_in_two([4, 7, 9], lambda i: {4: 5, 7: 3, 9: 3}[i]) == ([4], [7, 9])
    with pytest.raises(ValueError, match="3 items into 2 parts of equal count"):
        karmarkar_karp([1, 1, 1], 2, equal_counts=True)


def test_flops_follow_the_shape() -> None:
    dense = SimpleNamespace(
        hidden_size=64, num_layers=2, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=128, vocab_size=100
    )
    per_layer = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64) * 10 + 2 * 64 * 10 * 10 + 2 * 3 * 64 * 128 * 10
    assert forward_flops(dense, 10) == 2 * per_layer + 2 * 64 * 100 * 10
    moe = SimpleNamespace(
        **vars(dense), num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=32, moe_layer_freq=[0, 1]
    )
    saved = 2 * 10 * (3 * 64 * 128 - (3 * 64 * 64 + 64 * 8))
    assert forward_flops(dense, 10) - forward_flops(moe, 10) == saved
    mla = SimpleNamespace(
        **vars(dense),
        multi_latent_attention=True,
        qk_head_dim=16,
        qk_pos_emb_head_dim=8,
        v_head_dim=16,
        kv_lora_rank=32,
    )
    assert forward_flops(mla, 10) > 0
    assert forward_flops(SimpleNamespace(), 20) > 2 * forward_flops(SimpleNamespace(), 10), "attention is quadratic"
