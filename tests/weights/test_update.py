"""The stream of an update: casts and buckets, what all ranks iterate alike, and buckets between
threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.engines.payload import Bucket
from slime.weights.settings import AdapterSource
from slime.weights.update import (
    Handoff,
    Version,
    WeightSource,
    cast_floating,
    frozen_by_flags,
    iter_buckets,
    leave_out,
    parse_version,
    repeat_embedding,
)


def test_cast_leaves_integers_and_wide_names_alone() -> None:
    step = cast_floating(torch.bfloat16)
    pairs = [
        ("w", torch.ones(2)),
        ("position", torch.ones(2, dtype=torch.int64)),
        ("layers.0.mlp.gate.e_score_correction_bias", torch.ones(2)),
        ("layers.0.feed_forward.expert_bias", torch.ones(2)),
        ("layers.0.linear_attn.A_log", torch.ones(2)),
        ("layers.0.linear_attn.dt_bias", torch.ones(2)),
    ]
    out = [tensor.dtype for pair in pairs for _, tensor in step(*pair)]
    assert out == [torch.bfloat16, torch.int64, *[torch.float32] * 3, torch.bfloat16]
    same = torch.ones(2, dtype=torch.bfloat16)
    assert next(iter(step("w", same)))[1] is same  # nothing to do, nothing copied


def test_frozen_names_follow_the_flags() -> None:
    assert frozen_by_flags(None, None) is None
    by_list = frozen_by_flags(None, ["embed", r"layers\.0\."])
    assert by_list is not None and by_list("model.layers.0.w") and not by_list("model.layers.10.w")
    only = frozen_by_flags(["lora"], None)
    assert only is not None and only("model.w") and not only("model.lora_a")
    assert list(leave_out(only)("model.w", torch.ones(1))) == []


def test_the_embedding_is_sent_as_the_output_layer_too() -> None:
    tensor = torch.ones(2)
    sent = list(repeat_embedding("model.embed_tokens.weight", tensor))
    assert [name for name, _ in sent] == ["model.embed_tokens.weight", "lm_head.weight"]
    assert all(same is tensor for _, same in sent)
    assert [name for name, _ in repeat_embedding("model.norm.weight", tensor)] == [
        "model.norm.weight"
    ]


@given(
    sizes=st.lists(st.integers(0, 60), max_size=30),
    limit=st.integers(1, 200),
)
@settings(max_examples=100)
def test_buckets_keep_order_and_stay_small(sizes: list[int], limit: int) -> None:
    named = [(f"t{i}", torch.zeros(size, dtype=torch.uint8)) for i, size in enumerate(sizes)]
    buckets = list(iter_buckets(iter(named), limit))
    assert [name for bucket in buckets for name, _ in bucket.tensors] == [name for name, _ in named]
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    assert [bucket.last for bucket in buckets] == [False] * (len(buckets) - 1) + [True] * bool(
        buckets
    )
    assert all(bucket.nbytes <= limit or len(bucket.tensors) == 1 for bucket in buckets)


def test_versions_order_by_attempt_then_step() -> None:
    assert parse_version("0.12") == Version(0, 12) < parse_version("1.0")
    assert str(Version(3, 4)) == "3.4"
    for bad in ("default", "12", "0.3-torn", "1.2.3"):
        with pytest.raises(ValueError, match=r"attempt\.step"):
            parse_version(bad)


Named = tuple[str, torch.Tensor]


class Ranks:
    """Two ranks, which notice if one of them iterates something else."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=10)
        self.asked: dict[int, bool] = {}
        self.taken: dict[int, list[str]] = {0: [], 1: []}

    def source(self, rank: int) -> WeightSource:
        def stream(names: list[str]) -> Iterator[Named]:
            for name in names:
                # stands for a collective operation, which the other rank must join
                self.barrier.wait()
                self.taken[rank].append(name)
                yield name, torch.ones(1)

        def any_rank(value: bool) -> bool:
            self.asked[rank] = value
            self.barrier.wait()
            return any(self.asked.values())

        return WeightSource(stream(["base", "factor"]), AdapterSource(stream(["factor"]), any_rank))


@pytest.mark.parametrize("needs", [(False, False), (False, True), (True, True)])
def test_all_ranks_iterate_the_same(needs: tuple[bool, bool]) -> None:
    ranks = Ranks()

    def work(rank: int) -> None:
        source = ranks.source(rank)
        next(source.start(needs[rank]))
        source.finish()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    assert ranks.taken[0] == ranks.taken[1] == (["base", "factor"] if any(needs) else ["factor"])


def test_a_rank_that_fails_before_it_starts_still_takes_part() -> None:
    """A sender that reaches no engine raises an error, and the other ranks must not wait for it."""
    ranks = Ranks()
    with ThreadPoolExecutor(2) as pool:
        failed = pool.submit(ranks.source(0).finish)
        well = pool.submit(lambda source: list(source.start(True)), ranks.source(1))
        failed.result()
        assert len(well.result()) == 2
    assert ranks.taken[0] == ["base", "factor"]


def test_ranks_that_could_not_meet_do_not_try_again() -> None:
    asked: list[bool] = []

    def lost(value: bool) -> bool:
        asked.append(value)
        raise RuntimeError("a rank was lost")

    source = WeightSource(iter([("weight", torch.ones(1))]), AdapterSource((), lost))
    with pytest.raises(RuntimeError, match="a rank was lost"):
        source.start(base=True)
    source.finish()
    assert asked == [True]


def test_there_is_one_stream_without_an_adapter() -> None:
    source = WeightSource(iter([("weight", torch.ones(1)), ("bias", torch.ones(1))]), None)
    assert next(source.start(base=False))[0] == "weight"
    source.finish()


def in_background(work: object) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)  # type: ignore[arg-type]
    thread.start()
    return thread


def test_buckets_arrive_in_order_and_only_one_waits() -> None:
    handoff, taken, offered = Handoff(60.0), [], []

    def gather() -> None:
        for index in range(5):
            offered.append(index)
            assert handoff.put(Bucket(index, []))
        handoff.close()

    thread = in_background(gather)
    for bucket in handoff:
        assert len(offered) <= len(taken) + 2  # the one in hand and the next
        taken.append(bucket.index)
        time.sleep(0.002)
    thread.join(60)
    assert taken == list(range(5))


def test_an_error_of_the_gathering_side_reaches_the_sender() -> None:
    handoff = Handoff(60.0)
    handoff.close(ValueError("no such tensor"))
    with pytest.raises(ValueError, match="no such tensor"):
        list(handoff)


def test_a_sender_that_gives_up_lets_the_gathering_side_go_on() -> None:
    handoff = Handoff(60.0)
    results: list[bool] = []
    thread = in_background(lambda: results.extend(handoff.put(Bucket(i, [])) for i in range(3)))
    time.sleep(0.02)
    handoff.abandon()
    thread.join(60)
    assert results == [False, False, False]


@pytest.mark.parametrize("side", ["put", "take"])
def test_waits_have_a_deadline_and_a_name(side: str) -> None:
    handoff = Handoff(0.05)
    with pytest.raises(
        TimeoutError, match="bucket 3 to be taken" if side == "put" else "gather the next bucket"
    ):
        handoff.put(Bucket(3, [])) if side == "put" else next(iter(handoff))
