"""Buckets between threads: in order, one at a time, and nobody waits for ever."""

from __future__ import annotations

import threading
import time

import pytest

from slime.engines.flat import Bucket
from slime.weights.stream import Handoff


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
    with pytest.raises(TimeoutError, match="bucket 3 to be taken" if side == "put" else "gather the next bucket"):
        handoff.put(Bucket(3, [])) if side == "put" else next(iter(handoff))
