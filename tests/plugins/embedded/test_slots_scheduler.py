"""The scheduler against a pretended KV cache: whatever happens, every forward finds its prefix in
its slot.
"""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from needs import of_all

from slime.plugins.embedded.kv_cache import Copy
from slime.plugins.embedded.protocol import GenerateRequest, SamplingParams
from slime.plugins.embedded.scheduler import Plan, SampledToken, Scheduler
from slime.plugins.embedded.sequence import Sequence, VersionEvent, version_spans
from slime.plugins.http.server import BadRequest


def sequence(rid: str, ids: list[int], **params: object) -> Sequence:
    options = {"max_new_tokens": 4, "ignore_eos": True, **params}
    return Sequence(GenerateRequest(rid, ids, SamplingParams(**options)), 0, 0)  # type: ignore[arg-type]


class PretendedCache:
    """Slots as lists of (token, weights epoch); carries plans out the way the real cache does."""

    def __init__(self) -> None:
        self.slots: dict[int, list[tuple[int, int]]] = {}
        self.epoch = 0

    def carry_out(self, plan: Plan, check_epoch: bool) -> None:
        for move in plan.moves:
            if isinstance(move, Copy):
                target = self.slots.get(move.target, [])
                source = self.slots.get(move.source, [])
                assert len(source) >= move.length
                self.slots[move.target] = source[: move.length] + target[move.length :]
            else:
                a, b = self.slots.get(move.a, []), self.slots.get(move.b, [])
                assert len(a) >= move.length_a and len(b) >= move.length_b
                self.slots[move.a], self.slots[move.b] = b[: move.length_b], a[: move.length_a]
        for work in plan.works:
            slot = self.slots.setdefault(work.sequence.slot, [])
            seq = work.sequence
            assert [token for token, _ in slot[: work.start]] == seq.tokens[: work.start]
            if check_epoch:
                assert all(epoch == self.epoch for _, epoch in slot[: work.start])
            slot[work.start :] = [
                (token, self.epoch) for token in seq.tokens[work.start : work.end]
            ]
            assert len(slot) <= plan.capacity
            for follower in work.followers:
                self.slots[follower.slot] = slot[: work.end]


def step(
    scheduler: Scheduler, cache: PretendedCache, check_epoch: bool = True
) -> list[Sequence] | None:
    plan = scheduler.plan()
    if plan is None:
        return None
    assert plan.works
    assert [seq.slot for seq in scheduler.running] == list(range(len(scheduler.running)))
    cache.carry_out(plan, check_epoch)
    drawn = [
        SampledToken((sum(seq.tokens) * 7 + len(seq.tokens)) % 5, -0.5) for seq in plan.sampled
    ]
    return scheduler.commit(plan, drawn)


def run_all(scheduler: Scheduler, limit: int = 500) -> list[Sequence]:
    cache, done = PretendedCache(), []
    for _ in range(limit):
        finished = step(scheduler, cache)
        if finished is None:
            return done
        done += finished
    raise AssertionError("the scheduler does not come to an end")


def test_identical_prompts_are_computed_once() -> None:
    scheduler = Scheduler(8, 1024, 64)
    for i in range(8):
        scheduler.add(sequence(str(i), [1, 2, 3, 4, 5]))
    plan = scheduler.plan()
    assert plan is not None and not plan.decode
    assert [(work.start, work.end, len(work.followers)) for work in plan.works] == [(0, 5, 7)]
    assert len(plan.sampled) == 8
    scheduler.commit(plan, [SampledToken(i, 0.0) for i in range(8)])
    assert [seq.cached_tokens for seq in scheduler.running] == [0] + [5] * 7


def test_a_late_twin_copies_the_prompt_and_computes_one_token() -> None:
    scheduler, cache = Scheduler(4, 1024, 64), PretendedCache()
    scheduler.add(sequence("a", [1, 2, 3, 4, 5]))
    step(scheduler, cache)
    scheduler.add(sequence("b", [1, 2, 3, 4, 5]))
    plan = scheduler.plan()
    assert plan is not None
    assert plan.moves == [Copy(0, 1, 4)]
    assert [(work.start, work.end) for work in plan.works] == [(4, 5)]


def test_a_twin_that_comes_after_an_update_in_place_gets_no_kv_from_before_it() -> None:
    """The first one is between two chunks of its prompt."""
    scheduler, cache = Scheduler(4, 1024, 64, prefill_tokens=4), PretendedCache()
    scheduler.add(sequence("a", [1, 2, 3, 4, 5, 6]))
    step(scheduler, cache)
    scheduler.pause("in_place")
    scheduler.weights_changed("0.2")
    scheduler.resume()
    cache.epoch += 1
    for rid in ("b", "c"):
        scheduler.add(sequence(rid, [1, 2, 3, 4, 5, 6]))
    while any(len(seq.output_ids) < 2 for seq in scheduler.running):
        step(scheduler, cache, check_epoch=False)
    first, *late = scheduler.running
    assert {epoch for _, epoch in cache.slots[first.slot]} == {0, 1}
    assert [{epoch for _, epoch in cache.slots[seq.slot]} for seq in late] == [{1}, {1}]
    assert late[1].cached_tokens == 6, "the late ones share among themselves"


def test_finished_sequences_leave_their_tokens_for_the_next_turn() -> None:
    scheduler, cache = Scheduler(4, 1024, 64), PretendedCache()
    first = sequence("a", [1, 2, 3], max_new_tokens=3)
    scheduler.add(first)
    while not scheduler.idle:
        step(scheduler, cache)
    scheduler.add(sequence("b", [*first.tokens, 9, 9]))
    step(scheduler, cache)
    # the last token of turn one was drawn but never computed
    assert scheduler.running[0].cached_tokens == 5


def test_long_prompts_come_in_chunks_and_decoding_takes_turns_with_them() -> None:
    scheduler, cache = Scheduler(4, 4096, 1024, prefill_tokens=10), PretendedCache()
    scheduler.add(sequence("short", [1, 2], max_new_tokens=20))
    step(scheduler, cache)
    scheduler.add(sequence("long", list(range(100))))
    kinds = []
    for _ in range(6):
        plan = scheduler.plan()
        assert plan is not None
        kinds.append(plan.decode)
        cache.carry_out(plan, True)
        scheduler.commit(plan, [SampledToken(1, 0.0) for _ in plan.sampled])
    assert kinds == [True, False, True, False, True, False]


def test_admission_waits_for_room_in_order() -> None:
    scheduler = Scheduler(4, max_total_tokens=256, context_len=512)
    for rid, prompt in (("a", 100), ("b", 100), ("c", 10)):
        scheduler.add(sequence(rid, [1 + ord(rid)] * prompt))
    scheduler.plan()
    assert [seq.request.rid for seq in scheduler.running] == [
        "a",
        "b",
    ]  # two slots of 128; c waits behind nobody's back
    assert len(run_all(scheduler)) == 3


def test_what_can_never_fit_is_refused() -> None:
    with pytest.raises(BadRequest, match="has 64"):
        Scheduler(4, 1024, 64).add(sequence("a", [1] * 64))


def test_context_length_ends_a_sequence() -> None:
    scheduler = Scheduler(4, 1024, 16)
    seq = sequence("a", [1] * 10, max_new_tokens=100)
    scheduler.add(seq)
    run_all(scheduler)
    assert seq.finish_reason == {"type": "length", "length": 6}


def test_stop_string_beats_stop_token_beats_length() -> None:
    scheduler = Scheduler(
        4, 1024, 64, frozenset({3}), match_stop=lambda seq: "x" if seq.request.rid == "s" else None
    )
    string = sequence("s", [1], stop=("x",), ignore_eos=False, max_new_tokens=1)
    token = sequence("t", [2], ignore_eos=False, max_new_tokens=1)
    length = sequence("l", [4], max_new_tokens=1)
    for seq in (string, token, length):
        scheduler.add(seq)
    plan = scheduler.plan()
    assert plan is not None
    scheduler.commit(plan, [SampledToken(3, 0.0)] * 3)
    assert string.finish_reason == {"type": "stop", "matched": "x"}
    assert token.finish_reason == {"type": "stop", "matched": 3}
    assert length.finish_reason == {"type": "length", "length": 1}


def test_pause_modes() -> None:
    scheduler, cache = Scheduler(4, 1024, 64), PretendedCache()
    for rid in "ab":
        scheduler.add(sequence(rid, [ord(rid)], max_new_tokens=10))
    step(scheduler, cache)
    assert scheduler.pause("in_place") == [] and len(scheduler.running) == 2
    assert scheduler.plan() is None and not scheduler.flush()
    assert scheduler.pause("retract") == [] and not scheduler.running
    assert [seq.request.rid for seq in scheduler.waiting] == ["a", "b"]
    assert scheduler.flush()
    scheduler.resume()
    step(scheduler, cache)
    assert [seq.num_output for seq in scheduler.running] == [2, 2]
    ended = scheduler.pause("abort")
    assert {seq.finish_reason["type"] for seq in ended if seq.finish_reason} == {
        "abort"
    } and scheduler.idle


def test_abort_by_prefix_of_the_id() -> None:
    scheduler = Scheduler(4, 1024, 64)
    for rid in ("r1", "r1_1", "r2"):
        scheduler.add(sequence(rid, [1, 2]))
    scheduler.plan()
    assert {seq.request.rid for seq in scheduler.abort("r1")} == {"r1", "r1_1"}
    assert {seq.request.rid for seq in scheduler.abort("r", exact=True)} == set()
    assert [seq.request.rid for seq in scheduler.running] == ["r2"]


def test_new_weights_are_seen_in_spans_and_never_share_old_kv() -> None:
    scheduler, cache = Scheduler(4, 1024, 64, weight_version="0.1"), PretendedCache()
    seq = sequence("a", [1, 2, 3], max_new_tokens=5)
    scheduler.add(seq)
    step(scheduler, cache)
    step(scheduler, cache)
    scheduler.weights_changed("0.2")
    cache.epoch += 1
    scheduler.add(sequence("b", [1, 2, 3]))
    while not scheduler.idle:
        step(scheduler, cache, check_epoch=False)
    assert version_spans(seq.version_events, scheduler.weight_version, seq.num_output) == [
        {"version": "0.1", "start": 0, "end": 2},
        {"version": "0.2", "start": 2, "end": 5},
    ]


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_planned_sequence_waits_at_a_token_for_its_weights(mode: str) -> None:
    """A replay: others go on meanwhile, and one that begins later does not block the queue."""
    scheduler, cache = Scheduler(4, 1024, 64, weight_version="0.1"), PretendedCache()
    planned = sequence("a", [1, 2, 3], max_new_tokens=5)
    planned.request.weight_version_plan = ((0, "0.1"), (2, "0.3"))
    later = sequence("b", [1, 2, 3, 4])
    later.request.weight_version_plan = ((0, "0.2"),)
    free = sequence("c", [4, 5, 6])
    for seq in (planned, later, free):
        scheduler.add(seq)
    for version, tokens in (("0.1", [2, 0, 4]), ("0.2", [2, 4, 4]), ("0.3", [5, 4, 4])):
        if scheduler.weight_version != version:
            scheduler.pause(mode)
            scheduler.weights_changed(version)
            scheduler.resume()
            cache.epoch += 1
        while step(scheduler, cache, check_epoch=False) is not None:
            pass
        assert [seq.num_output for seq in (planned, later, free)] == tokens
        assert scheduler.idle and scheduler.held == (version != "0.3")
    assert version_spans(planned.version_events, "0.3", 5) == [
        {"version": "0.1", "start": 0, "end": 2},
        {"version": "0.3", "start": 2, "end": 5},
    ]


def test_spans_merge_equal_versions_and_skip_empty_ones() -> None:
    events = [VersionEvent("1", 2), VersionEvent("2", 2), VersionEvent("3", 4)]
    assert version_spans(events, "3", 6) == [
        {"version": "1", "start": 0, "end": 2},
        {"version": "3", "start": 2, "end": 6},
    ]
    assert version_spans([], "1", 0) == [{"version": "1", "start": 0, "end": 0}]


events = st.one_of(
    st.tuples(
        st.just("add"), st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 12)
    ),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("retract")),
    st.tuples(st.just("weights")),
    st.tuples(st.just("flush")),
)


@settings(max_examples=of_all(200, 80), deadline=None)
@given(
    history=st.lists(events, max_size=60),
    slots=st.integers(1, 5),
    total=st.integers(64, 400),
    share=st.booleans(),
)
def test_any_history_keeps_every_prefix_right(
    history: list[tuple[object, ...]], slots: int, total: int, share: bool
) -> None:
    scheduler = Scheduler(slots, total, 64, prefill_tokens=16, share_prefixes=share)
    cache, added, done = PretendedCache(), 0, deque[Sequence]()
    for kind, *rest in history:
        if kind == "add":
            ids, new = rest
            scheduler.add(sequence(f"{added:03d}", list(ids), max_new_tokens=new))  # type: ignore[call-overload]
            added += 1
        elif kind == "step":
            for _ in range(int(rest[0])):  # type: ignore[call-overload]
                done.extend(step(scheduler, cache) or [])
        elif kind == "abort":
            done.extend(scheduler.abort(f"{rest[0]:03d}"))
        elif kind == "flush":
            scheduler.flush()
        else:  # both end with all KV recomputed
            scheduler.pause("retract")
            if kind == "weights":
                scheduler.weights_changed(f"v{len(done)}")
                cache.epoch += 1
            scheduler.resume()
    for _ in range(3000):
        finished = step(scheduler, cache)
        if finished is None:
            break
        done.extend(finished)
    assert scheduler.idle and len(done) == added
    for seq in done:
        aborted = seq.finish_reason is not None and seq.finish_reason["type"] == "abort"
        expected = min(seq.request.params.max_new_tokens, min(64, total) - seq.prompt_len)
        assert aborted or seq.num_output == expected
        assert len(seq.output_logprobs) == seq.num_output
