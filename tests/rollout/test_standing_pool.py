"""The fully asynchronous rollout's pool: order, bounds, updates under way, and the account of its
groups.
"""

import asyncio
from collections import Counter

import pytest
from rollout_parts import SmallEngine, arguments, source_of, until

from slime.data.sample import Sample, flatten
from slime.data.staleness import sample_staleness, token_staleness
from slime.observability.files import take_warnings
from slime.rollout.fully_async_rollout import StandingPool, generate_rollout_fully_async
from slime.rollout.sglang_rollout import GenerateState

FIRST_HALF_DROPPED = """
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
def keep(args, samples, **kwargs):
    return DynamicFilterOutput(keep=samples[0].group_index % 2 == 1, reason="even")
"""


async def update(engine, version):
    """In abort mode: what is under way ends with what it has, of the old weights."""
    engine.aborting.set()
    engine.aborting = asyncio.Event()
    await asyncio.sleep(0.02)
    engine.version = version


async def step(pool, rollout_id, engine=None, train_seconds=0.0):
    """What the driver does in one step; with an engine, new weights every step."""
    output = await asyncio.wait_for(pool.take(rollout_id), 60)
    await pool.advance(pool.admission.version, taken=True)
    await asyncio.sleep(train_seconds)
    if engine is not None:
        await update(engine, f"0.{rollout_id + 1}")
    await pool.advance(rollout_id + 1, trained=True)
    return output.samples


async def test_the_pool_trains_in_the_order_of_admission_and_is_bounded(tokenizer_dir):
    args = arguments(tokenizer_dir, async_buffer_size=2)
    source = source_of(args)
    async with SmallEngine(jitter=0.05) as engine:
        pool = StandingPool(engine.serve(args), source)
        taken = []
        for rollout_id in range(4):
            taken += [
                group[0].group_index for group in await step(pool, rollout_id, train_seconds=0.1)
            ]
            assert source.sample_group_index == len(taken) + 3 * 4, (
                "one rollout to train next, two beside it"
            )
        assert taken == list(range(16))
        await pool.close()
    assert [group[0].group_index for group in source.buffer] == list(range(16, 28))


async def test_a_resumed_pool_trains_finished_groups_in_their_turn(tokenizer_dir):
    """A group that finished before its turn came was trained earlier after a resume than in the
    replay of that run.
    """
    args = arguments(tokenizer_dir)
    source = source_of(args)
    async with SmallEngine(jitter=0.02) as engine:
        pool = StandingPool(engine.serve(args), source)
        finished = await step(pool, 0)
        await pool.close()
        unfinished = source.get_samples(2)
        saved = [unfinished[0], finished[0], finished[1], unfinished[1]]
        order = [group[0].group_index for group in saved]
        source.buffer[:0] = saved
        pool = StandingPool(args, source)
        assert [group[0].group_index for group in await step(pool, 0)] == order
        await pool.close()


@pytest.mark.parametrize("saves", [None, 2])
async def test_a_source_that_would_skip_the_groups_in_progress_is_named(
    tokenizer_dir, saves: int | None
):
    class Mine:
        def __len__(self) -> int:
            return 10

    take_warnings()
    StandingPool(arguments(tokenizer_dir, save_interval=saves), Mine())
    told = take_warnings()
    assert len(told) == bool(saves) and all("Mine does not" in one for one in told)


async def test_groups_that_a_source_gave_without_being_asked_wait_for_their_turn(tokenizer_dir):
    class Generous(type(source_of(arguments(tokenizer_dir)))):
        def get_samples(self, num_samples):
            return super().get_samples(num_samples + 3)

    args = arguments(tokenizer_dir)
    async with SmallEngine(jitter=0.0) as engine:
        pool = StandingPool(engine.serve(args), source := Generous(args, source_of(args).dataset))
        taken = [
            group[0].group_index
            for rollout_id in range(3)
            for group in await step(pool, rollout_id)
        ]
        assert taken == list(range(12)) and len(pool.in_flight) == 8
        assert len(pool.under_way()) == source.sample_group_index - 12
        await pool.close()


async def test_nothing_is_asked_for_beyond_the_last_step(tokenizer_dir):
    args = arguments(tokenizer_dir, async_buffer_size=3)
    source = source_of(args)
    async with SmallEngine(jitter=0.0) as engine:
        pool = StandingPool(engine.serve(args), source, first_step=5, last_step=7)
        for rollout_id in (5, 6):
            await step(pool, rollout_id)
    assert source.sample_group_index == 8 and not pool.in_flight


@pytest.mark.parametrize("bound", [1, 2])
async def test_no_trained_token_is_older_than_the_bound_though_answers_live_through_updates(
    tokenizer_dir, bound
):
    """Requests take so long that most meet an update; each goes on from its tokens under the new
    weights.
    """
    more = {"async_buffer_size": 4, "max_weight_staleness": bound, "rollout_max_response_len": 60}
    args = arguments(tokenizer_dir, rollout_batch_size=3, **more)
    async with SmallEngine(
        jitter=0.4, length=lambda prompt, seed: 20 + seed % 40, version="0.0"
    ) as engine:
        pool = StandingPool(engine.serve(args), source_of(args))
        ages, divided = [], 0
        for rollout_id in range(6):
            for sample in flatten(await step(pool, rollout_id, engine, train_seconds=0.05)):
                assert (
                    sample.version_spans[0][1] == 0
                    and sample.version_spans[-1][2] == sample.response_length
                )
                steps = [int(version.split(".")[1]) for version, _, _ in sample.version_spans]
                assert steps == sorted(steps)
                assert (
                    sample_staleness(sample, rollout_id)
                    == token_staleness(sample, rollout_id).max()
                )
                ages.append(sample_staleness(sample, rollout_id))
                divided += len(steps) > 1
        await pool.close()
    assert max(ages) == bound and divided


async def test_after_an_update_every_group_goes_on_at_once_not_when_its_turn_comes(tokenizer_dir):
    args = arguments(tokenizer_dir, async_buffer_size=1)
    async with SmallEngine(slow=lambda prompt: True, jitter=0.0, length=lambda p, s: 12) as engine:
        pool = StandingPool(engine.serve(args), source_of(args))
        taking = asyncio.create_task(pool.take(0))
        await until(lambda: len(engine.requests) == 16)
        assert not taking.done()
        # the head of the line stays slow
        engine.slow = lambda prompt: prompt.startswith("prompt 0:")
        engine.aborting.set()
        engine.aborting = asyncio.Event()
        await until(lambda: [item.done for item in pool.in_flight.values()] == [False] + [True] * 7)
        await until(lambda: len(engine.requests) == 32)
        assert not taking.done()
        engine.slow = lambda prompt: False
        engine.aborting.set()
        output = await asyncio.wait_for(taking, 60)
        assert [group[0].group_index for group in output.samples] == [0, 1, 2, 3], (
            "waited for, not starved"
        )
        await pool.close()


async def test_with_the_mask_only_tokens_of_a_samples_newest_weights_are_trained(tokenizer_dir):
    args = arguments(tokenizer_dir, rollout_batch_size=1, mask_offpolicy_in_partial_rollout=True)
    async with SmallEngine(
        slow=lambda p: True, jitter=0.0, length=lambda p, s: 12, version="0.0"
    ) as engine:
        pool = StandingPool(engine.serve(args), source_of(args))
        taking = asyncio.create_task(pool.take(0))
        await until(lambda: engine.running == 4)
        await update(engine, "0.1")
        engine.slow = lambda prompt: False
        await update(engine, "0.1")
        (group,) = (await asyncio.wait_for(taking, 60)).samples
        await pool.close()
    for sample in group:
        ((old, _, cut), (new, start, end)) = sample.version_spans
        assert (old, new, cut) == ("0.0", "0.1", start) and 0 < cut < end == sample.response_length
        assert sample.loss_mask == [0] * cut + [1] * (end - cut)
        assert sample_staleness(sample, 1) == 0


async def test_what_the_filter_drops_is_replaced_at_the_end_of_the_line(tokenizer_dir, hooks):
    path = hooks(FIRST_HALF_DROPPED)("keep")
    args = arguments(tokenizer_dir, async_buffer_size=1, dynamic_sampling_filter_path=path)
    source = source_of(args)
    async with SmallEngine(jitter=0.0) as engine:
        pool = StandingPool(engine.serve(args), source)
        trained = [
            group[0].group_index
            for rollout_id in range(3)
            for group in await step(pool, rollout_id)
        ]
        assert trained == [1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23]
        assert len(pool.in_flight) == 2 * 4, "the room of dropped groups is filled"
        await pool.close()


ONE_BY_ONE = """
import asyncio
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
async def reward(args, sample, **kwargs):
    while args.judged < sample.group_index:
        await asyncio.sleep(0.001)
    return 0.0
async def at_once(args, sample, **kwargs): return 0.0
def fallback(args, samples):
    args.judged = samples[0].group_index + 1
    assert args.judged <= 40, "the rollout never ends"
    return DynamicFilterOutput(False, "dropped", keep_when_insufficient=True)
"""


@pytest.mark.parametrize("reward", ["reward", "at_once"])
async def test_a_filter_with_a_fallback_drops_as_many_groups_as_the_buffer_holds(
    tokenizer_dir, hooks, reward
):
    """What is dropped is replaced, so a rollout whose groups are all dropped went on forever; it
    depended on time.
    """
    path = hooks(ONE_BY_ONE)
    more = {"dynamic_sampling_filter_path": path("fallback"), "custom_rm_path": path(reward)}
    args = arguments(tokenizer_dir, {"judged": 0}, async_buffer_size=2, **more)
    async with SmallEngine(jitter=0.0) as engine:
        pool = StandingPool(engine.serve(args), source_of(args))
        trained = [
            [group[0].group_index for group in await step(pool, rollout_id)]
            for rollout_id in range(2)
        ]
        await pool.close()
    assert trained == [[8, 9, 10, 11], [20, 21, 22, 23]]


async def test_the_observer_is_told_each_station_of_each_group(tokenizer_dir, hooks):
    path = hooks(FIRST_HALF_DROPPED)("keep")
    args = arguments(tokenizer_dir, async_buffer_size=1, dynamic_sampling_filter_path=path)
    told: dict[int, list[str]] = {}
    facts_of: dict[int, dict] = {}

    def observer(event, group, facts):
        index = flatten(group)[0].group_index
        told.setdefault(index, []).append(event)
        facts_of.setdefault(index, {}).update(facts)

    source = source_of(args)
    async with SmallEngine(jitter=0.0) as engine:
        GenerateState(engine.serve(args)).observer = observer
        pool = StandingPool(args, source)
        for rollout_id in range(2):
            await step(pool, rollout_id)
        await pool.close()
    ends = Counter(events[-1] for events in told.values())
    assert ends["accepted"] == 8 and ends["filtered"] == 8
    assert ends["given_back"] == len(source.buffer) == sum(ends.values()) - 16
    for index, events in told.items():
        assert events[:2] == ["asked", "started"]
        if events[-1] != "given_back":
            assert events[2:] == ["generated", "accepted" if index % 2 else "filtered"]
    assert facts_of[0]["reason"] == "even" and facts_of[9]["rollout_id"] == 1


async def test_the_pool_closes_on_an_error(tokenizer_dir):
    args = arguments(tokenizer_dir, phase_timeout=2.0)
    source = source_of(args)
    async with SmallEngine(slow=lambda prompt: True) as engine:
        pool = StandingPool(engine.serve(args), source)
        with pytest.raises(TimeoutError, match="0 of 4 groups"):
            await pool.take(0)
        assert not pool.in_flight
        assert [s.status for s in flatten(source.buffer)] == [Sample.Status.PENDING] * 16


def test_the_entry_point_refuses_to_evaluate_and_keeps_its_pool(tokenizer_dir):
    from slime.engines.background import run
    from slime.engines.http import close_session

    args = arguments(tokenizer_dir)
    source = source_of(args)
    with pytest.raises(ValueError, match="--eval-function-path"):
        generate_rollout_fully_async(args, 0, source, evaluation=True)
    engine = SmallEngine()
    run(engine.__aenter__())
    try:
        engine.serve(args)
        indices = [
            group[0].group_index
            for rollout_id in range(2)
            for group in generate_rollout_fully_async(args, rollout_id, source).samples
        ]
        assert indices == list(range(8))
        run(GenerateState(args).pool.close())
    finally:
        run(engine.__aexit__())
        run(close_session())
