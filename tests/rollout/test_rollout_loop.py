"""The default loop against a real HTTP engine whose answers arrive in any order."""

import asyncio
import copy
import json
import re
from collections import Counter
from types import SimpleNamespace

import pytest
from make_args import make_args
from rollout_parts import Prompts, SmallEngine, arguments, source_of, until

from slime.data.sample import Sample, flatten
from slime.data.source import RolloutDataSource
from slime.data.token_fields import Packed
from slime.engines.handle import worker_urls
from slime.observability import progress
from slime.rollout.generate import append_output
from slime.rollout.group import mask_earlier_rollouts
from slime.rollout.loop import RolloutLoop
from slime.rollout.metrics import sample_metrics
from slime.rollout.sglang_rollout import (
    GenerateState,
    generate_rollout,
    generate_rollout_async,
    get_model_url,
)
from slime.rollout.state import seeded


def contents(groups):
    return [
        (s.index, s.group_index, s.response, s.reward, tuple(s.tokens), s.status)
        for s in flatten(groups)
    ]


async def roll(args, source, rollout_id=0):
    return await asyncio.wait_for(generate_rollout_async(args, rollout_id, source), 30)


# --- what a rollout gives --------------------------------------------------------------------


async def test_samples_hold_what_the_engine_sampled(tokenizer_dir):
    args = arguments(tokenizer_dir)
    async with SmallEngine(version="7") as engine:
        output = await roll(engine.serve(args), source_of(args))
    assert len(output.samples) == 4 and all(len(group) == 2 for group in output.samples)
    for sample in flatten(output.samples):
        prompt = GenerateState(args).tokenizer.encode(sample.prompt, add_special_tokens=False)
        assert sample.tokens[: len(prompt)] == prompt
        assert GenerateState(args).tokenizer.decode(sample.tokens[len(prompt) :]) == sample.response
        assert (
            sample.response_length
            == len(sample.tokens) - len(prompt)
            == len(sample.rollout_log_probs)
        )
        assert sample.status is Sample.Status.COMPLETED
        assert sample.weight_versions == ["7"]
        assert sample.reward in (0, 1)
    body = engine.requests[0]
    assert body["return_logprob"] is True
    assert body["sampling_params"]["max_new_tokens"] == 12
    assert body["sampling_params"]["no_stop_trim"] is True
    assert len({request["sampling_params"]["sampling_seed"] for request in engine.requests}) == 8
    assert "X-SMG-Routing-Key" not in engine.headers[0]
    assert output.metrics["rollout/reward_timeout_count"] == 0
    assert progress.latest()["phase"] == "generate" and progress.latest()["done"] == 4
    assert progress.latest()["numbers"]["tokens"] == sum(
        s.response_length for s in flatten(output.samples)
    )


async def test_what_a_rollout_gives_and_keeps_is_packed(tokenizer_dir, hooks):
    """A list of Python integers and floats takes nine times the memory of arrays."""
    code = (
        "sample.tokens, sample.response_length, sample.reward = [1, 2, 3], 2, 1.0\n"
        "    return sample"
    )
    path = hooks(f"async def mine(args, sample, sampling_params):\n    {code}")
    for generate_path in (None, path("mine")):
        args = arguments(
            tokenizer_dir, over_sampling_batch_size=6, custom_generate_function_path=generate_path
        )
        source = source_of(args)
        async with SmallEngine(jitter=0.0) as engine:
            output = await roll(engine.serve(args), source)
        kept = [
            vars(sample)["tokens"]
            for sample in flatten([output.samples, source.buffer])
            if sample.response_length
        ]
        assert len(kept) >= 8 and all(isinstance(tokens, Packed) for tokens in kept)


async def test_groups_that_are_dropped_are_kept_for_a_hook_that_asks_for_them_only(
    tokenizer_dir, hooks
):
    path = hooks(
        "def odd(args, samples): return samples[0].group_index % 2 == 1\n"
        "def everything(args, groups, source): args.seen += [g[0].group_index for g in groups]")  # fmt: skip
    for hook, expected in ((None, []), (path("everything"), [*range(8)])):
        args = arguments(tokenizer_dir, {"seen": []}, dynamic_sampling_filter_path=path("odd"))
        args.rollout_all_samples_process_path = hook
        args.deterministic = True
        async with SmallEngine() as engine:
            loop = RolloutLoop(engine.serve(args), 0, source_of(args))
            await asyncio.wait_for(loop.run(), 30)
        assert loop.counts.dropped and len(loop.judged) == len(expected) and args.seen == expected


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("cut", range(1, 12))
def test_a_character_that_is_cut_between_two_answers_is_put_together(tokenizer_dir, cut, together):
    """SGLang decodes the ids of an answer together with the last five ids before it, and takes what
    this text has more than theirs."""
    args, text = arguments(tokenizer_dir), "aé€😀b é"
    tokenizer = GenerateState(args).tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False)
    sample = Sample(tokens=[1, 2])
    parts = [ids[:cut], ids[cut : cut + 1], ids[cut + 1 :]]
    for part, ending in zip(parts, ("abort", "abort", "stop"), strict=True):
        scored = [[-1.0, token, None] for token in part]
        meta = {"output_token_logprobs": scored, "finish_reason": {"type": ending}}
        before = sample.tokens[2:][-5:] if together else []
        said = tokenizer.decode([*before, *part])[len(tokenizer.decode(before)) :]
        append_output(GenerateState(args), sample, {"text": said, "meta_info": meta})
    assert sample.response == text and sample.tokens[2:] == ids
    garbage = {"output_token_logprobs": [[-1.0, ids[2], None]]}
    append_output(
        GenerateState(args), sample, {"text": tokenizer.decode([ids[2]]), "meta_info": garbage}
    )
    assert sample.response == text + "\ufffd", "what is no character stays as it is"


async def test_the_result_does_not_depend_on_the_order_of_arrival(tokenizer_dir):
    results = []
    for jitter in (0.0, 0.03, 0.06):
        args = arguments(tokenizer_dir, rollout_batch_size=8)
        async with SmallEngine(jitter=jitter) as engine:
            output = await roll(engine.serve(args), source_of(args))
        results.append(contents(output.samples))
    assert results[0] == results[1] == results[2]
    assert [index for index, *_ in results[0]] == list(range(16))


async def test_groups_are_in_the_order_of_their_numbers_if_samples_have_none(tokenizer_dir):
    class Unnumbered(RolloutDataSource):
        def get_samples(self, num_samples):
            groups = super().get_samples(num_samples)
            for sample in flatten(groups):
                sample.index = None
            return groups

    args = arguments(tokenizer_dir)
    async with SmallEngine(
        jitter=0.0, slow=lambda prompt: prompt.startswith("prompt 0:")
    ) as engine:
        loop = RolloutLoop(engine.serve(args), 0, Unnumbered(args, Prompts()))
        running = asyncio.create_task(loop.run())
        await until(lambda: len(loop.accepted) == 3)
        engine.slow = lambda prompt: False
        engine.aborting.set()
        output = await asyncio.wait_for(running, 30)
    assert [group[0].group_index for group in output.samples] == [0, 1, 2, 3]


def test_the_documented_entry_point_blocks_and_works_on_the_shared_loop(tokenizer_dir):
    from slime.engines.http import close_session
    from slime.utils.async_utils import run

    args = arguments(tokenizer_dir)
    engine = SmallEngine()
    run(engine.__aenter__())
    try:
        output = generate_rollout(engine.serve(args), 0, source_of(args))
        assert len(output.samples) == 4
    finally:
        run(engine.__aexit__())
        run(close_session())


async def test_truncation_session_headers_and_context_limit(tokenizer_dir):
    args = arguments(
        tokenizer_dir, router={"policy": "consistent_hashing"}, rollout_max_context_len=14
    )
    async with SmallEngine(length=lambda prompt, seed: 50) as engine:
        output = await roll(engine.serve(args), source_of(args))
    for sample in flatten(output.samples):
        assert sample.status is Sample.Status.TRUNCATED and sample.truncated
        assert len(sample.tokens) == 14
    keys = Counter(headers["X-SMG-Routing-Key"] for headers in engine.headers)
    assert sorted(keys) == sorted(sample.session_id for sample in flatten(output.samples))
    assert len(keys) == 8


async def test_requests_in_flight_are_limited(tokenizer_dir):
    args = arguments(tokenizer_dir, rollout_batch_size=16, sglang_server_concurrency=3)
    async with SmallEngine() as engine:
        await roll(engine.serve(args), source_of(args))
    assert engine.most_running == 3


@pytest.mark.parametrize(("queue", "most"), [(0, 4), (1, 2)], ids=["no queue", "a queue"])
async def test_more_requests_are_sent_while_no_engine_has_a_queue(
    tokenizer_dir, monkeypatch, queue, most
):
    monkeypatch.setattr("slime.rollout.state.FIRST_CONCURRENCY", 2)
    monkeypatch.setattr("slime.rollout.state.connection_limit", lambda router: 5)
    monkeypatch.setattr("slime.rollout.state._GROWTH_SECONDS", 0.01)
    monkeypatch.setattr("slime.rollout.state._MORE_SLOTS", 2)
    args = arguments(tokenizer_dir, rollout_batch_size=16, sglang_server_concurrency=None)
    async with SmallEngine(jitter=0.05, queue=queue) as engine:
        await roll(engine.serve(args), source_of(args))
    assert engine.most_running == most


# --- filter, over-sampling, surplus ----------------------------------------------------------

FILTERS = """
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
async def zero(args, sample, **kw): return float(sample.metadata["number"] % 3 == 0)
def third(args, samples, **kw): return all(sample.reward > 0.5 for sample in samples)
def third_reason(args, samples): return DynamicFilterOutput(third(args, samples), "not_third")
def third_fallback(args, samples):
    return DynamicFilterOutput(third(args, samples), "not_third", keep_when_insufficient=True)
def nothing(args, samples): return None
def never(args, samples): return False
"""
WITH_FALLBACK = (
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback"
)


async def test_a_bool_filter_drops_and_refills(tokenizer_dir, hooks):
    path = hooks(FILTERS)
    args = arguments(
        tokenizer_dir, custom_rm_path=path("zero"), dynamic_sampling_filter_path=path("third")
    )
    source = source_of(args)
    async with SmallEngine() as engine:
        output = await roll(engine.serve(args), source)
    kept = [group[0].metadata["number"] for group in output.samples]
    assert all(number % 3 == 0 for number in kept) and len(set(kept)) == 4
    assert output.metrics["rollout/dynamic_filter/drop_no_reason"] > 0


async def test_every_group_that_left_the_source_is_accounted_for(tokenizer_dir, hooks):
    path = hooks(FILTERS)
    args = arguments(
        tokenizer_dir,
        custom_rm_path=path("zero"),
        dynamic_sampling_filter_path=path("third_reason"),
        over_sampling_batch_size=9,
    )
    source = source_of(args)
    used = []
    async with SmallEngine(jitter=0.01) as engine:
        for rollout_id in range(6):
            output = await roll(engine.serve(args), source, rollout_id)
            assert len(output.samples) == 4
            used += [group[0].group_index for group in output.samples]
            # absent where none was
            dropped = int(output.metrics.get("rollout/dynamic_filter/drop_not_third", 0))
            back = (
                output.metrics["rollout/surplus_group_count"]
                + output.metrics["rollout/aborted_group_count"]
            )
            assert len(source.buffer) >= back
            used += [None] * dropped
    given = source.sample_group_index
    waiting = [group[0].group_index for group in source.buffer]
    trained = [index for index in used if index is not None]
    assert len(set(trained + waiting)) == len(trained + waiting), "a group was used twice"
    assert len(used) + len(waiting) == given, "a group was lost"


async def test_keep_when_insufficient_fills_up_rather_than_ask_for_more(tokenizer_dir, hooks):
    path = hooks(FILTERS)
    args = arguments(
        tokenizer_dir,
        custom_rm_path=path("zero"),
        dynamic_sampling_filter_path=path("third_fallback"),
    )
    source = source_of(args)
    async with SmallEngine() as engine:
        output = await roll(engine.serve(args), source)
    assert [group[0].group_index for group in output.samples] == [0, 1, 2, 3]
    assert source.sample_group_index == 4


async def test_a_filter_that_answers_nothing_is_an_error(tokenizer_dir, hooks):
    path = hooks(FILTERS)
    args = arguments(tokenizer_dir, dynamic_sampling_filter_path=path("nothing"))
    async with SmallEngine() as engine:
        with pytest.raises(TypeError, match=r"nothing.*None.*bool"):
            await roll(engine.serve(args), source_of(args))


async def test_finished_surplus_is_used_first_and_costs_no_request(tokenizer_dir):
    args = arguments(tokenizer_dir, over_sampling_batch_size=9, deterministic=True)
    source = source_of(args)
    async with SmallEngine() as engine:
        first = await roll(engine.serve(args), source, 0)
        surplus = copy.deepcopy(contents(source.buffer))
        assert len(surplus) == 5 * 2 and all(
            status is Sample.Status.COMPLETED for *_, status in surplus
        )
        assert all(s.metadata["start_rollout_id"] == 0 for s in flatten(source.buffer))
        asked = len(engine.requests)
        second = await roll(engine.serve(args), source, 1)
        assert len(engine.requests) == asked
        third = await roll(engine.serve(args), source, 2)
    assert contents(second.samples) == surplus[:8]
    assert first.metrics["rollout/surplus_group_count"] == 5
    indices = [s.index for output in (first, second, third) for s in flatten(output.samples)]
    assert indices == list(range(24))


async def test_default_over_sampling_tops_up_by_what_is_missing(tokenizer_dir, hooks):
    path = hooks(FILTERS + "\ndef first(args, samples): return samples[0].group_index != 0\n")
    args = arguments(tokenizer_dir, dynamic_sampling_filter_path=path("first"))
    source = source_of(args)
    async with SmallEngine() as engine:
        await roll(engine.serve(args), source)
    assert source.sample_group_index == 5 and not source.buffer


# --- abort and partial rollout ---------------------------------------------------------------


def stuck(prompt):
    return prompt.startswith(("prompt 0:", "prompt 2:"))


async def test_groups_that_are_not_done_are_aborted_and_their_prompts_kept(tokenizer_dir):
    args = arguments(tokenizer_dir, over_sampling_batch_size=6)
    source = source_of(args)
    async with SmallEngine(slow=stuck, jitter=0.0) as engine:
        output = await roll(engine.serve(args), source)
        assert [g[0].group_index for g in output.samples] == [1, 3, 4, 5]
        assert engine.aborts >= 1 and engine.running == 0
        assert [g[0].group_index for g in source.buffer] == [0, 2]
        for sample in flatten(source.buffer):
            assert (
                sample.status is Sample.Status.PENDING and not sample.tokens and not sample.response
            )
            assert (
                sample.reward is None
                and sample.prompt
                and "start_rollout_id" not in sample.metadata
            )
        engine.slow = lambda prompt: False
        again = await roll(engine.serve(args), source, 1)
    assert {g[0].group_index for g in again.samples} >= {0, 2}
    assert output.metrics["rollout/aborted_group_count"] == 2


@pytest.mark.parametrize("mask", [False, True])
async def test_partial_rollout_goes_on_from_the_tokens_so_far(tokenizer_dir, mask):
    args = arguments(
        tokenizer_dir,
        over_sampling_batch_size=6,
        partial_rollout=True,
        mask_offpolicy_in_partial_rollout=mask,
    )
    source = source_of(args)
    async with SmallEngine(slow=stuck, jitter=0.0, length=lambda p, s: 8) as engine:
        await roll(engine.serve(args), source)
        partial = {s.index: copy.deepcopy(s) for s in flatten(source.buffer)}
        assert all(
            s.response_length == 4 and s.status is Sample.Status.ABORTED for s in partial.values()
        )
        assert all(
            s.metadata["start_rollout_id"] == 0 and s.reward is None for s in partial.values()
        )
        engine.slow, engine.version = (lambda prompt: False), "2"
        asked = len(engine.requests)
        output = await roll(engine.serve(args), source, 1)
    continued = {s.index: s for s in flatten(output.samples) if s.index in partial}
    assert len(continued) == 4
    first_ids = {tuple(s.tokens) for s in partial.values()}
    sent = [tuple(r["input_ids"]) for r in engine.requests[asked:]]
    assert first_ids <= set(sent)
    for index, sample in continued.items():
        before = partial[index]
        assert sample.tokens[: len(before.tokens)] == before.tokens and sample.response.startswith(
            before.response
        )
        assert sample.rollout_log_probs[:4] == before.rollout_log_probs
        assert (
            sample.response_length == 12 == len(sample.rollout_log_probs) == len(sample.loss_mask)
        )
        assert sample.weight_versions == ["1", "2"]
        assert sample.loss_mask == ([0] * 4 if mask else [1] * 4) + [1] * 8
        assert sample.reward is not None
    seeds = [r["sampling_params"] for r in engine.requests if tuple(r["input_ids"]) in first_ids]
    assert {p["max_new_tokens"] for p in seeds} == {8}
    old = {r["sampling_params"]["sampling_seed"] for r in engine.requests[:asked]}
    assert not old & {p["sampling_seed"] for p in seeds}, "the rest is drawn with a seed of its own"


async def test_workers_behind_a_router_are_all_aborted(tokenizer_dir):
    args = arguments(tokenizer_dir, over_sampling_batch_size=6)
    other, front = SmallEngine(), SmallEngine(slow=stuck)
    front.workers = []
    async with other, front:
        front.workers = [front.url, other.url]
        front.serve(args)
        assert await worker_urls(get_model_url(args, path="")) == [front.url, other.url]
        await roll(args, source_of(args))
        assert front.aborts >= 1 and other.aborts >= 1
        assert await worker_urls(get_model_url(other.serve(args), path="")) == [other.url]


async def test_a_group_that_its_engine_aborts_unasked_goes_on(tokenizer_dir):
    args = arguments(tokenizer_dir)
    source = source_of(args)
    async with SmallEngine(slow=stuck, jitter=0.0, length=lambda p, s: 8) as engine:
        engine.serve(args)
        rollout = asyncio.create_task(roll(args, source))
        await until(lambda: engine.running >= 4 and len(engine.requests) >= 8)
        await asyncio.sleep(0.05)
        engine.slow = lambda prompt: False
        engine.aborting.set()  # as a restart or a weight update in abort mode does
        output = await rollout
    assert [g[0].group_index for g in output.samples] == [0, 1, 2, 3]
    assert [s.response_length for s in flatten(output.samples)] == [12, 12, 8, 8, 12, 12, 8, 8]


async def test_only_tokens_of_earlier_rollouts_are_masked(tokenizer_dir):
    """Not those of this rollout that an engine's end cut in two; and whole samples when their group
    came back.
    """
    args = arguments(
        tokenizer_dir,
        partial_rollout=True,
        mask_offpolicy_in_partial_rollout=True,
        over_sampling_batch_size=6,
    )
    source = source_of(args)
    once = Counter()

    # one sample of group 0 is cut in rollout 0; all of group 9 by an engine in rollout 1
    def slow(prompt):
        once[prompt] += 1
        return prompt.startswith("prompt 0:") and once[prompt] == 2 and len(prompt) < 12

    async with SmallEngine(slow=slow, jitter=0.0, length=lambda p, s: 8) as engine:
        await roll(engine.serve(args), source)
        back = {
            s.index: (s.status, s.response_length)
            for s in flatten(source.buffer)
            if s.group_index == 0
        }
        assert sorted(back.values(), key=str) == [
            (Sample.Status.ABORTED, 4),
            (Sample.Status.COMPLETED, 8),
        ]
        assert all(
            s.status is Sample.Status.PENDING for s in flatten(source.buffer) if s.group_index != 0
        )
        engine.slow = lambda prompt: False
        output = await roll(args, source, 1)
    masks = {s.index: s.loss_mask for s in flatten(output.samples) if s.group_index == 0}
    assert masks[0] in ([0] * 8, [0] * 4 + [1] * 8) and masks[1] in ([0] * 8, [0] * 4 + [1] * 8)
    assert masks[0] != masks[1]
    assert all(set(s.loss_mask) == {1} for s in flatten(output.samples) if s.group_index != 0)


async def test_tokens_of_this_rollout_are_trained_though_an_engine_cut_them(tokenizer_dir):
    args = arguments(tokenizer_dir, partial_rollout=True, mask_offpolicy_in_partial_rollout=True)
    async with SmallEngine(slow=stuck, jitter=0.0, length=lambda p, s: 8) as engine:
        rollout = asyncio.create_task(roll(engine.serve(args), source_of(args)))
        await until(lambda: engine.running >= 4 and len(engine.requests) >= 8)
        await asyncio.sleep(0.05)
        engine.slow = lambda prompt: False
        engine.aborting.set()
        output = await rollout
    assert all(
        sample.loss_mask == [1] * sample.response_length for sample in flatten(output.samples)
    )


def test_a_sample_that_came_back_and_is_cut_again_keeps_this_rollouts_tokens():
    state = SimpleNamespace(args=make_args(mask_offpolicy_in_partial_rollout=True), rollout_id=1)
    sample = Sample(
        tokens=[7, 8, 9], response_length=2, loss_mask=[1, 1], metadata={"start_rollout_id": 0}
    )
    mask_earlier_rollouts(state, sample)
    # this rollout's, then the engine is lost
    sample.response_length, sample.loss_mask = 4, [*sample.loss_mask, 1, 1]
    mask_earlier_rollouts(state, sample)
    assert sample.loss_mask == [0, 0, 1, 1]
    state.rollout_id = 2
    mask_earlier_rollouts(state, sample)
    assert sample.loss_mask == [0] * 4


async def test_a_rollout_that_is_over_does_not_wait_for_requests_that_reach_no_engine(
    tokenizer_dir, monkeypatch
):
    """All answers but two are there when the only engine goes: what is still sent again ends with
    the rollout.
    """
    from slime.engines import http

    monkeypatch.setattr(http, "LONGEST_DELAY_SECONDS", 0.2)
    args = arguments(tokenizer_dir, over_sampling_batch_size=6)
    source = source_of(args)
    async with SmallEngine(slow=stuck, jitter=0.0) as engine:
        engine.refuse = stuck  # 503, as a router without engines answers
        output = await roll(engine.serve(args), source)
    assert [g[0].group_index for g in output.samples] == [1, 3, 4, 5]
    assert [g[0].group_index for g in source.buffer] == [0, 2]
    assert http.take_retries() > 0


async def test_a_failed_sample_stays_as_it_is_while_its_group_continues(tokenizer_dir, hooks):
    path = hooks("""
from slime.rollout.generate import generate
from slime.rollout.rm_hub.outcome import mark_unscored
failed = []
async def one_fails(args, sample, sampling_params):
    await generate(args, sample, sampling_params)
    if sample.group_index == 0 and sample.status.value == "completed" and not failed:
        failed.append(sample.index)
        mark_unscored(sample, "error", "the server of a tool was lost")
        sample.status = "failed"
    return sample
""")
    args = arguments(
        tokenizer_dir,
        over_sampling_batch_size=6,
        partial_rollout=True,
        n_samples_per_prompt=3,
        custom_generate_function_path=path("one_fails"),
    )
    source = source_of(args)
    asked = Counter()

    def last(prompt):  # of the requests for group 0, only the last one is cut
        asked[prompt] += 1
        return prompt == "prompt 0: " and asked[prompt] == 3

    async with SmallEngine(slow=last, jitter=0.0, length=lambda p, s: 8) as engine:
        await roll(engine.serve(args), source)
        assert sorted(s.status.value for s in source.buffer[0]) == [
            "aborted",
            "completed",
            "failed",
        ]
        before = {s.status.value: (s.index, list(s.tokens)) for s in source.buffer[0]}
        output = await roll(args, source, 1)
    after = {s.index: s for s in output.samples[0]}
    index, tokens = before["failed"]
    assert after[index].status is Sample.Status.FAILED and after[index].tokens == tokens
    assert after[index].reward is None and after[index].reward_timed_out
    assert (
        after[before["aborted"][0]].response_length == 12
        and after[before["aborted"][0]].reward is not None
    )


async def test_a_group_that_is_cut_again_and_again_goes_on_as_long_as_it_grows(tokenizer_dir):
    """Weight updates that abort cut long answers many times; only standing still is an error."""
    args = arguments(
        tokenizer_dir, rollout_batch_size=1, n_samples_per_prompt=1, rollout_max_response_len=40
    )
    async with SmallEngine(jitter=0.0, length=lambda p, s: 2) as engine:
        engine.slow = lambda prompt: len(engine.requests) <= 15

        async def cut():
            while True:
                await asyncio.sleep(0.01)
                engine.aborting.set()
                engine.aborting = asyncio.Event()

        cutting = asyncio.create_task(cut())
        try:
            output = await roll(engine.serve(args), source_of(args))
        finally:
            cutting.cancel()
    (sample,) = flatten(output.samples)
    assert sample.response_length == 15 + 2 and len(engine.requests) == 16
    assert sample.status is Sample.Status.COMPLETED


# --- deterministic mode ----------------------------------------------------------------------


async def test_deterministic_rollouts_are_the_same_whatever_arrives_first(tokenizer_dir, hooks):
    path = hooks(FILTERS)
    histories = []
    for jitter in (0.0, 0.03, 0.05):
        args = arguments(
            tokenizer_dir, deterministic=True, over_sampling_batch_size=7, rm_type="random",
            dynamic_sampling_filter_path="slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
        )  # fmt: skip
        source = source_of(args)
        history = []
        async with SmallEngine(jitter=jitter) as engine:
            for rollout_id in range(5):
                output = await roll(engine.serve(args), source, rollout_id)
                history.append((contents(output.samples), output.metrics, contents(source.buffer)))
            assert engine.aborts == 0
        histories.append(history)
    assert histories[0] == histories[1] == histories[2]
    assert path


async def test_deterministic_rollouts_keep_the_same_groups_whatever_has_finished_when_one_is_judged(
    tokenizer_dir, hooks
):
    """Group 1 has no rewards, so the rollout asks for more groups before it judges group 2, which
    it can spare then.
    """
    path = hooks(TIMEOUTS +
        "async def second(args, sample, **kw):\n"
        "    return mark_unscored(sample, 'timeout', '') if sample.group_index == 1 else 0.0\n")  # fmt: skip
    kept = []
    for slow in (0, 2):
        args = arguments(
            tokenizer_dir, deterministic=True, rollout_batch_size=2, over_sampling_batch_size=3,
            custom_rm_path=path("second"), dynamic_sampling_filter_path=WITH_FALLBACK,
        )  # fmt: skip
        async with SmallEngine(jitter=0.0) as engine:
            engine.slow = lambda prompt, slow=slow: prompt.startswith(f"prompt {slow}:")
            loop = RolloutLoop(engine.serve(args), 0, source_of(args))
            running = asyncio.create_task(loop.run())
            await until(
                lambda of=loop: (
                    sum(item.done for item in of.in_flight.values()) == 2 or of.counts.replaced
                )
            )
            engine.slow = lambda prompt: False
            engine.aborting.set()
            output = await asyncio.wait_for(running, 30)
        kept.append([group[0].group_index for group in output.samples])
    assert kept == [[4, 5], [4, 5]]


async def test_a_resumed_source_gives_the_same_rollouts(tokenizer_dir):
    args = arguments(tokenizer_dir, deterministic=True, over_sampling_batch_size=7)
    straight, resumed = source_of(args), source_of(args)
    async with SmallEngine() as engine:
        engine.serve(args)
        await roll(args, straight, 0)
        await roll(args, resumed, 0)
        state = json.loads(json.dumps(resumed.state_dict(), default=str)) and resumed.state_dict()
        fresh = source_of(args)
        fresh.load_state_dict(state)
        a, b = await roll(args, straight, 1), await roll(args, fresh, 1)
    assert contents(a.samples) == contents(b.samples)


# --- rewards that do not come ----------------------------------------------------------------

TIMEOUTS = """
from slime.rollout.rm_hub.outcome import mark_unscored
async def reward(args, sample, **kw):
    late = {0: (0, 1), 2: (0,)}.get(sample.metadata["number"], ())
    if sample.index % args.n_samples_per_prompt in late:
        mark_unscored(sample, "timeout", "no answer in 1 s")
        return None
    return float(sample.index % 2)
async def broken(args, sample, **kw): mark_unscored(sample, "error", "ZeroDivisionError: 1/0")
def seen(args, samples):
    args.seen.append([s.index for s in samples]); return True
async def none(args, sample, **kw): return None
"""


async def test_groups_with_fewer_than_two_scored_samples_are_replaced(tokenizer_dir, hooks):
    path = hooks(TIMEOUTS)
    args = arguments(
        tokenizer_dir,
        {"seen": []},
        n_samples_per_prompt=3,
        custom_rm_path=path("reward"),
        dynamic_sampling_filter_path=path("seen"),
    )
    source = source_of(args)
    async with SmallEngine() as engine:
        output = await roll(engine.serve(args), source)
    assert [g[0].group_index for g in output.samples] == [1, 2, 3, 4]
    assert output.metrics["rollout/replaced_group_count"] == 1
    assert output.metrics["rollout/reward_timeout_count"] == 3
    late = output.samples[1][0]
    assert late.reward is None and late.reward_timed_out and late.remove_sample
    assert sorted(args.seen)[1] == [7, 8], "the filter sees the scored samples only"
    from slime.data.rewards import post_process_rewards

    _, trained = post_process_rewards(args, flatten(output.samples[1:2]), ["g"] * 3)
    assert trained[0] == 0 and sum(trained) == pytest.approx(0) and trained[2] != 0


async def test_a_verifier_that_never_answers_ends_the_run_with_its_words(tokenizer_dir, hooks):
    args = arguments(tokenizer_dir, custom_rm_path=hooks(TIMEOUTS)("broken"))
    async with SmallEngine(jitter=0.0) as engine:
        with pytest.raises(RuntimeError, match=r"17 groups; 0 of 4 have.*ZeroDivision"):
            await roll(engine.serve(args), source_of(args))


async def test_a_single_sample_without_reward_is_replaced_too(tokenizer_dir, hooks):
    path = hooks(TIMEOUTS)
    args = arguments(tokenizer_dir, n_samples_per_prompt=1, custom_rm_path=path("reward"))
    async with SmallEngine() as engine:
        output = await roll(engine.serve(args), source_of(args))
    assert [g[0].group_index for g in output.samples] == [1, 3, 4, 5]


async def test_a_function_that_always_returns_none_is_an_error_that_names_it(tokenizer_dir, hooks):
    args = arguments(tokenizer_dir, custom_rm_path=hooks(TIMEOUTS)("none"))
    async with SmallEngine() as engine:
        with pytest.raises(
            RuntimeError, match=r"no result for .* groups; .*abstained: .*none returned None"
        ):
            await roll(engine.serve(args), source_of(args))


ERRORS = """
import json, sys
def exits(args, sample, **kw):
    if sample.index == 3: sys.exit("no such option")
    return float(sample.index % 2)
def interrupts(args, sample, **kw):
    if sample.index == 3: raise KeyboardInterrupt("stop")
    return float(sample.index % 2)
def parses(args, sample, **kw):
    return json.loads("{") if sample.index == 3 else float(sample.index % 2)
async def once(args, sample, **kw):
    if sample.index == 3: raise KeyError("sample 3")
    return float(sample.index % 2)
def both(args, samples, **kw): raise OSError("no judge")
"""


async def test_an_exception_of_a_reward_costs_its_sample(tokenizer_dir, hooks):
    args = arguments(
        tokenizer_dir,
        n_samples_per_prompt=3,
        custom_rm_path=hooks(ERRORS)("once"),
        reward_max_error_share=0.1,
    )
    async with SmallEngine() as engine:
        output = await roll(engine.serve(args), source_of(args))
    bad = output.samples[1][0]
    assert bad.index == 3 and bad.remove_sample and bad.reward is None
    assert "KeyError" in bad.metadata["reward_failure"]
    assert output.metrics["rollout/reward_error_count"] == 1
    assert [s.reward for s in flatten(output.samples) if s is not bad] == [
        float(s.index % 2) for s in flatten(output.samples) if s is not bad
    ]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("exits", "SystemExit: no such option"),
        ("interrupts", "KeyboardInterrupt: stop"),
        ("parses", "JSONDecodeError"),
    ],
)
async def test_an_exit_costs_its_sample_and_the_line_is_that_of_the_function(
    tokenizer_dir, hooks, name, told
):
    args = arguments(
        tokenizer_dir,
        n_samples_per_prompt=3,
        custom_rm_path=hooks(ERRORS)(name),
        reward_max_error_share=0.1,
    )
    async with SmallEngine() as engine:
        output = await roll(engine.serve(args), source_of(args))
    why = output.samples[1][0].metadata["reward_failure"]
    assert told in why and re.search(r"hooks_\w+\.py:\d+\)$", why)


@pytest.mark.parametrize(("share", "group_rm", "name"), [(0.0, False, "once"), (0.2, True, "both")])
async def test_a_run_ends_above_the_share_of_exceptions(
    tokenizer_dir, hooks, share, group_rm, name
):
    args = arguments(
        tokenizer_dir,
        custom_rm_path=hooks(ERRORS)(name),
        group_rm=group_rm,
        reward_max_error_share=share,
    )
    async with SmallEngine(jitter=0.0) as engine:
        with pytest.raises(RuntimeError, match=r"of 8 samples.*--reward-max-error-share.*hooks_"):
            await roll(engine.serve(args), source_of(args))
        assert len(engine.requests) <= 16, "the run ends early, not after many replaced groups"


SEVERAL = """
async def score(args, sample, **kw):
    last = {0: None, 1: 0.5}.get(sample.index % 2)
    return {"right": float(sample.index < 4), "short": last, "note": 2.0}
async def nothing(args, sample, **kw):
    return {"right": None} if sample.index == 0 else {"right": 1.0}
"""


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        (None, [3.0, 3.5, 3.0, 3.5, 2.0, 2.5, 2.0, 2.5]),
        ({"right": 2.0, "short": 4.0}, [2.0, 4.0, 2.0, 4.0, 0.0, 2.0, 0.0, 2.0]),
    ],
)
async def test_several_rewards_are_summed_by_weights_and_measured(
    tokenizer_dir, hooks, weights, wanted
):
    args = arguments(tokenizer_dir, custom_rm_path=hooks(SEVERAL)("score"), reward_weights=weights)
    async with SmallEngine() as engine:
        output = await roll(engine.serve(args), source_of(args))
    samples = flatten(output.samples)
    assert [sample.reward for sample in samples] == wanted
    assert samples[0].metadata["reward_parts"] == {"right": 1.0, "note": 2.0}
    found = sample_metrics(samples)
    assert found["reward/right"] == 0.5 and found["reward/short"] == 0.5


async def test_a_dict_of_which_every_entry_abstains_has_no_reward(tokenizer_dir, hooks):
    args = arguments(
        tokenizer_dir, n_samples_per_prompt=3, custom_rm_path=hooks(SEVERAL)("nothing")
    )
    async with SmallEngine() as engine:
        output = await roll(engine.serve(args), source_of(args))
    assert output.samples[0][0].reward is None and output.samples[0][1].reward == 1.0
    assert output.metrics["rollout/reward_abstained_count"] == 1


async def test_a_weight_without_its_reward_ends_the_run_with_both_names(tokenizer_dir, hooks):
    args = arguments(
        tokenizer_dir, custom_rm_path=hooks(SEVERAL)("score"), reward_weights={"tone": 1.0}
    )
    async with SmallEngine(jitter=0.0) as engine:
        with pytest.raises(RuntimeError, match=r"tone.*right, short, note"):
            await roll(engine.serve(args), source_of(args))


# --- deadlines and errors --------------------------------------------------------------------


async def test_the_phase_has_a_deadline_that_says_what_it_waits_for(tokenizer_dir):
    args = arguments(tokenizer_dir, phase_timeout=3.0)
    async with SmallEngine(slow=lambda prompt: prompt.startswith("prompt 1:")) as engine:
        with pytest.raises(TimeoutError, match=r"3 of 4 groups.*1 groups.*\[2\]"):
            await roll(engine.serve(args), source_of(args))
    assert not GenerateState(args).aborted


async def test_a_request_has_a_deadline_too(tokenizer_dir):
    args = arguments(tokenizer_dir, sglang_router_request_timeout_secs=0.2)
    async with SmallEngine(slow=lambda prompt: True) as engine:
        with pytest.raises(TimeoutError, match=r"0.2 s"):
            await roll(engine.serve(args), source_of(args))


async def test_a_filter_that_keeps_nothing_ends_at_the_deadline_with_its_reasons(
    tokenizer_dir, hooks
):
    args = arguments(
        tokenizer_dir, dynamic_sampling_filter_path=hooks(FILTERS)("never"), phase_timeout=0.5
    )
    async with SmallEngine(jitter=0.0) as engine:
        with pytest.raises(TimeoutError, match=r"0 of 4 groups.*no_reason"):
            await roll(engine.serve(args), source_of(args))


async def test_a_source_that_runs_dry_is_an_error(tokenizer_dir):
    args = arguments(tokenizer_dir)

    class Dry:
        def get_samples(self, n):
            return []

    async with SmallEngine() as engine:
        with pytest.raises(RuntimeError, match=r"rollout 0.*0 of 4"):
            await roll(engine.serve(args), Dry())


async def test_no_task_survives_an_error(tokenizer_dir, hooks):
    args = arguments(
        tokenizer_dir,
        custom_rm_path=hooks("async def bad(args, sample, **kw): 1 / 0\n")("bad"),
        reward_max_error_share=0.0,
    )
    before = asyncio.all_tasks()
    async with SmallEngine(jitter=0.2) as engine:
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            await roll(engine.serve(args), source_of(args))
        left = {task for task in asyncio.all_tasks() - before if "generate_and_rm" in repr(task)}
        assert not left


async def test_what_a_source_without_a_buffer_loses_is_counted(tokenizer_dir, caplog):
    args = arguments(tokenizer_dir, over_sampling_batch_size=6, deterministic=True)
    async with SmallEngine() as engine:
        output = await roll(engine.serve(args), RolloutDataSource(args, Prompts()))
    assert output.metrics["rollout/lost_group_count"] == 2
    assert "buffer" in caplog.text


# --- hooks around the loop -------------------------------------------------------------------

AROUND = """
def remove_first(args, groups):
    assert isinstance(groups[0], list)
    groups[0][0].remove_sample = True
def everything(args, groups, source):
    args.given = ([g[0].group_index for g in groups], source)
async def hook(args, sample, rollout_id=None, evaluation=False):
    sample.metadata["hook"] = (rollout_id, evaluation, sample.reward)
def replace(args, sample):
    sample.response += "!"
    return sample
def wrong(args, sample): return "text"
def drop_odd(args, samples): return samples[0].group_index % 2 == 0
"""


async def test_hooks_of_samples_filters_and_all_samples(tokenizer_dir, hooks):
    path = hooks(AROUND)
    args = arguments(
        tokenizer_dir,
        {"given": None},
        rollout_sample_filter_path=path("remove_first"),
        rollout_all_samples_process_path=path("everything"),
        rollout_sample_hook_path=[path("hook"), path("replace")],
        dynamic_sampling_filter_path=path("drop_odd"),
    )
    source = source_of(args)
    async with SmallEngine() as engine:
        output = await roll(engine.serve(args), source, 5)
    assert output.samples[0][0].remove_sample and not output.samples[0][1].remove_sample
    indices, given = args.given
    assert given is source, "the hook gets the data source itself"
    assert indices == sorted(indices) and set(indices) > {g[0].group_index for g in output.samples}
    for sample in flatten(output.samples):
        assert sample.metadata["hook"] == (5, False, None) and sample.response.endswith("!")


async def test_a_sample_hook_gets_a_response_once_when_it_is_complete(tokenizer_dir, hooks):
    path = hooks("""
def count(args, sample, rollout_id):
    assert sample.status.value == "completed"
    sample.metadata.setdefault("hooked", []).append((rollout_id, sample.response_length))
""")
    args = arguments(
        tokenizer_dir,
        over_sampling_batch_size=6,
        partial_rollout=True,
        rollout_sample_hook_path=[path("count")],
    )
    source = source_of(args)
    async with SmallEngine(slow=stuck, jitter=0.0, length=lambda p, s: 8) as engine:
        await roll(engine.serve(args), source)
        engine.slow = lambda prompt: False
        output = await roll(args, source, 1)
    continued = [s for s in flatten(output.samples) if s.group_index in (0, 2)]
    assert [s.metadata["hooked"] for s in continued] == [[(1, 12)]] * 4


async def test_a_sample_hook_must_give_a_sample_or_nothing(tokenizer_dir, hooks):
    args = arguments(tokenizer_dir, rollout_sample_hook_path=[hooks(AROUND)("wrong")])
    async with SmallEngine() as engine:
        with pytest.raises(TypeError, match="None or a Sample"):
            await roll(engine.serve(args), source_of(args))


def test_seeds_are_the_samples_own():
    def seed(**fields):
        return seeded(42, {"top_p": 1.0}, Sample(**fields), 1).get("sampling_seed")

    assert seed(group_index=3) == seed(group_index=3, index=9)
    assert (
        len({seed(group_index=3), seed(group_index=4), seed(group_index=3, weight_versions=["1"])})
        == 3
    )
    assert seed(index=3) == seed(group_index=3)
    assert seed() is None, "samples without numbers would all get the same seed"
    assert seeded(42, {}, Sample(group_index=3), 1) != seeded(42, {}, Sample(group_index=3), 2)
    assert seeded(42, {}, Sample(group_index=3), 1) != seeded(
        42, {}, Sample(group_index=3), 1, "eval a"
    )


def test_state_belongs_to_its_arguments(tokenizer_dir):
    one, two = arguments(tokenizer_dir), arguments(tokenizer_dir)
    assert GenerateState(one) is GenerateState(one) is not GenerateState(two)
    GenerateState(one).aborted = True
    assert not GenerateState(two).aborted
    from slime.rollout import state

    keys = {id(one), id(two)}
    assert keys <= set(state.states_by_args)
    del one, two
    assert not keys & set(state.states_by_args), "a run's state goes with its arguments"


def test_the_loop_reads_the_filter_before_it_starts(tokenizer_dir):
    args = arguments(tokenizer_dir, dynamic_sampling_filter_path="no.such.module.fn")
    with pytest.raises(ValueError, match="no module"):
        RolloutLoop(args, 0, source_of(args))


def test_a_resume_makes_the_groups_of_the_pool_again_and_skips_none(tokenizer_dir):
    from slime.rollout.fully_async_rollout import StandingPool

    args = arguments(tokenizer_dir)
    source = source_of(args)
    pool = StandingPool(args, source)
    source.add_samples(source.get_samples(1))  # somebody gave it back
    pool.unstarted.extend(source.get_samples(3))
    group = source.get_samples(1)[0]
    for sample in group:
        sample.status = Sample.Status.COMPLETED
    pool.enqueue([group])
    resumed = source_of(args)
    resumed.load_state_dict(source.state_dict())
    assert sorted(g[0].group_index for g in resumed.get_samples(6)) == list(range(6))
    assert resumed.buffer == source.buffer == []
