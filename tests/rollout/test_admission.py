"""What may start ahead of training, and how old it is when it trains."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.config.rollout import staleness_bound
from slime.rollout.admission import Admission


def held_after(step: int, interval: int, admission: Admission) -> int:
    """The version that the engines hold once ``step`` is over and every update that is due was
    made.
    """
    due = (step + 1) // interval * interval
    return max(due, admission.version)


def test_one_step_admits_the_next_rollout_while_one_trains() -> None:
    admission = Admission(batch=1, buffer_size=1)
    assert admission.bound == 1
    assert admission.room() == 2
    admission.admit(2)
    assert (admission.room(), admission.held_by()) == (0, "buffer")
    admission.taken()
    assert admission.room() == 0  # one trains, one waits
    admission.version_changed(1)
    admission.trained()
    assert admission.room() == 1


def test_no_buffer_and_no_age_both_mean_taking_turns() -> None:
    for admission in (
        Admission(batch=4, buffer_size=0),
        Admission(batch=4, buffer_size=3, max_staleness=0),
    ):
        assert admission.bound == 0
        for step in range(3):
            assert admission.room() == 4
            admission.admit(4)
            admission.taken()
            assert admission.room() == 0  # while it trains
            admission.version_changed(step + 1)
            admission.trained()


def test_a_smaller_age_holds_back_what_the_buffer_has_room_for() -> None:
    admission = Admission(batch=2, buffer_size=4, max_staleness=1)
    assert admission.bound == 1
    assert admission.room() == 4  # steps 0 and 1, not the ten that the buffer would take
    admission.admit(4)
    assert admission.held_by() == "staleness"
    admission.taken()
    admission.trained()
    assert admission.room() == 0  # no new weights yet
    admission.version_changed(1)
    assert admission.room() == 2


def test_with_an_interval_a_version_serves_several_steps() -> None:
    admission = Admission(batch=1, buffer_size=4, update_interval=2, max_staleness=1)
    assert admission.room() == 2  # steps 0 and 1, in which version 0 is 0 and 1 steps old
    assert [staleness_bound(n, 2) for n in range(5)] == [1, 2, 3, 4, 5]


def test_nothing_starts_for_steps_that_never_come() -> None:
    admission = Admission(batch=4, buffer_size=3, first_step=2, last_step=4)
    assert admission.room() == 8
    admission.admit(8)
    admission.dropped()
    assert admission.room() == 1


@pytest.mark.parametrize(("buffer_size", "interval"), [(1, 1), (4, 2), (3, 2), (2, 5), (5, 3)])
def test_the_printed_bound_is_reached(buffer_size: int, interval: int) -> None:
    admission = Admission(3, buffer_size, interval)
    pool: list[int] = []
    ages: list[int] = []
    for step in range(30):
        for part in ("wait", "train"):
            pool.extend([admission.version] * admission.room())
            admission.admit(admission.room())
            if part == "wait":
                admission.taken()
                ages += [step - version for version in pool[:3]]
                del pool[:3]
        admission.version_changed(held_after(step, interval, admission))
        admission.trained()
    assert max(ages) == admission.bound == staleness_bound(buffer_size, interval)


def test_a_resumed_run_counts_on_from_its_first_step() -> None:
    admission = Admission(batch=2, buffer_size=2, update_interval=2, max_staleness=1, first_step=5)
    assert admission.version == 5  # a resume begins with an update
    assert admission.room() == 4  # steps 5 and 6
    admission.admit(2)
    admission.taken()
    admission.version_changed(6)
    admission.trained()
    assert admission.version == 6
    assert admission.room() == 4  # steps 6 and 7, of which nothing is open


def test_a_dropped_group_makes_room_for_another() -> None:
    admission = Admission(batch=2, buffer_size=1)
    admission.admit(4)
    admission.dropped()
    assert admission.room() == 1


def test_what_cannot_be_is_refused() -> None:
    admission = Admission(batch=2, buffer_size=1)
    with pytest.raises(ValueError, match="room for 4 "):
        admission.admit(5)
    with pytest.raises(ValueError, match="0 open"):
        admission.taken()
    admission.version_changed(3)
    with pytest.raises(ValueError, match=r"version 2.*version 3"):
        admission.version_changed(2)


@settings(max_examples=200, deadline=None)
@given(
    batch=st.integers(1, 7),
    buffer_size=st.integers(0, 6),
    interval=st.integers(1, 5),
    max_staleness=st.none() | st.integers(0, 6),
    first_step=st.integers(0, 9),
    drops=st.floats(0, 0.8),
    lateness=st.floats(0, 1),
    seed=st.integers(0, 2**32),
)
def test_no_group_trains_older_than_the_bound_and_the_run_ends(
    batch: int,
    buffer_size: int,
    interval: int,
    max_staleness: int | None,
    first_step: int,
    drops: float,
    lateness: float,
    seed: int,
) -> None:
    """Groups start whenever there is room, or later; a share is dropped; the oldest train first."""
    max_staleness = None if max_staleness is None else max_staleness + interval - 1
    draw = random.Random(seed)
    admission = Admission(batch, buffer_size, interval, max_staleness, first_step)
    pool: deque[int] = deque()  # the version under which each open group started
    largest = 0
    for step in range(first_step, first_step + 30):
        kept: list[int] = []
        while len(kept) < batch:  # the trainer waits
            room = admission.room()
            if not pool:
                assert room, f"nothing is under way in step {step} and nothing may start"
            starting = room if not pool or draw.random() >= lateness else draw.randint(0, room)
            admission.admit(starting)
            pool.extend([admission.version] * starting)
            assert len(pool) + len(kept) <= admission.capacity
            while pool and len(kept) < batch:
                version = pool.popleft()
                if draw.random() < drops:
                    admission.dropped()
                else:
                    kept.append(version)
                    admission.taken(1)
        room = admission.room()  # while it trains
        admission.admit(room)
        pool.extend([admission.version] * room)
        assert len(pool) <= batch * buffer_size
        largest = max(largest, *(step - version for version in kept))
        admission.version_changed(held_after(step, interval, admission))
        admission.trained()
    assert largest <= admission.bound
