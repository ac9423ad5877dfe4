"""Ledger and snapshot around the real loops: whatever they do with groups, and wherever a run is
cut, it closes.
"""

import asyncio
import random
from collections import Counter

import pytest
from rollout_parts import SmallEngine, arguments, source_of

from slime.cluster.rollout_state import OWN_FUNCTIONS, Rollout, RolloutState
from slime.data.sample import flatten
from slime.plugins.tools.summary import read_ledger
from slime.rollout.fully_async_rollout import StandingPool
from slime.rollout.loop import RolloutLoop
from slime.rollout.state import GenerateState

HOOKS = """
import copy
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.generate import generate as one

def keep(args, samples, **kwargs):
    return DynamicFilterOutput(keep=flatten(samples)[0].group_index % 5 != 2, reason="third of five")

async def generate(args, sample, sampling_params):
    sample = await one(args, sample, sampling_params)
    if sample.status is Sample.Status.ABORTED:
        return sample
    sample.reward_timed_out = sample.group_index % 7 == 3  # as when its verifier gives no answer
    sample.reward = None if sample.reward_timed_out else float(sample.index % 2)
    return [sample, copy.deepcopy(sample)] if sample.group_index % 3 == 0 else sample  # fans out
"""


class Attempt:
    """One process of a run: its arguments, source, account and, fully asynchronous, pool. Killed by
    being dropped.
    """

    def __init__(self, folder, args, first, number, pooled):
        self.args, self.source = args, source_of(args)
        self.state = RolloutState(args, folder, self.source)
        self.first, self.loop = first, None
        if first:
            self.state.load(first - 1, folder / f"iter{first - 1}", number)
        GenerateState(args).observer = self.state.observe
        self.state.open_schedule(folder / "schedule.jsonl", first, first, 10)
        if pooled:
            self.loop = StandingPool(args, self.source, first, None, len(self.state.restored))

    async def generate(self, rollout_id):
        rollout = self.state.restored.pop(rollout_id, None)
        if rollout is None:
            loop = self.loop
            output = await (
                loop.take(rollout_id)
                if loop
                else RolloutLoop(self.args, rollout_id, self.source).run()
            )
            rollout = Rollout(output.samples, {}, 0.0)
            self.state.complete(rollout_id, rollout)
        if self.loop:
            await self.loop.advance(self.loop.admission.version, taken=True)
        return rollout.groups

    async def trained(self, rollout_id):
        self.state.trained(rollout_id)
        if self.loop:
            await self.loop.advance(rollout_id + 1, trained=True)

    async def die(self):
        if self.loop:
            await self.loop.cancel_all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pooled", [False, True], ids=["synchronous", "standing pool"])
async def test_every_group_is_used_once_over_kills_and_resumes(
    tmp_path, tokenizer_dir, hooks, pooled, seed
):
    path, draw = hooks(HOOKS), random.Random(seed)
    more = {
        "partial_rollout": not pooled, "over_sampling_batch_size": 7, "async_buffer_size": 2,
        "dynamic_sampling_filter_path": path("keep"), "custom_generate_function_path": path("generate"),
        "save": str(tmp_path), "save_interval": 1, "replay_schedule": None,
        "load_debug_rollout_data": None, "debug_rollout_only": False, "rollout_function_path": OWN_FUNCTIONS[pooled],
    }  # fmt: skip
    trained, number, first, ahead = {}, 0, 0, {}
    async with SmallEngine(jitter=0.01, version="0.0") as engine:
        attempt = Attempt(tmp_path, engine.serve(arguments(tokenizer_dir, **more)), 0, 0, pooled)
        while first < 8:
            step, lead = first, draw.randint(0, 2)  # rollouts that are generated ahead of this step
            for rollout_id in range(step, step + 1 + lead):
                if rollout_id not in ahead:
                    ahead[rollout_id] = await asyncio.wait_for(attempt.generate(rollout_id), 20)
            trained[step] = [group_number(group) for group in ahead.pop(step)]
            await attempt.trained(step)
            (tmp_path / f"iter{step}").mkdir()
            attempt.state.save(step, tmp_path / f"iter{step}")
            first = step + 1
            if draw.random() < 0.5:
                await attempt.die()
                number, kept = (
                    number + 1,
                    {r: [group_number(g) for g in groups] for r, groups in ahead.items()},
                )
                attempt = Attempt(
                    tmp_path, engine.serve(arguments(tokenizer_dir, **more)), first, number, pooled
                )
                ahead = {r: one.groups for r, one in attempt.state.restored.items()}
                assert {r: [group_number(g) for g in groups] for r, groups in ahead.items()} == kept
                attempt.state.restored.clear()
                if pooled:
                    for _ in ahead:
                        await attempt.loop.advance(attempt.loop.admission.version, taken=True)
        await attempt.die()
    report = read_ledger(tmp_path / "ledger.jsonl")
    assert report.closes, report.problems
    used = Counter(number for groups in trained.values() for number in groups)
    assert set(used.values()) == {1} and report.counts["trained"] == len(used) == 32
    assert not [number for number in used if number % 5 == 2 or number % 7 == 3]
    assert (
        report.counts["filtered"]
        and report.counts["replaced"]
        and len(report.rolled_back) == number
    )
    open_now = {row["group"] for row in report.cut["open"]}
    assert open_now == {
        group_number(group) for group in attempt.state.after[attempt.state.newest][0]["buffer"]
    }


def group_number(group):
    first = group[0]
    while isinstance(first, list):
        first = first[0]
    return first["group_index"] if isinstance(first, dict) else flatten(group)[0].group_index
