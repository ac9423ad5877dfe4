"""A rollout function written for an older release: it keeps the groups in flight in the state, and
gets what the abort leaves.
"""

import asyncio

import pytest
from rollout_parts import Prompts, SmallEngine, arguments, source_of

from slime.data.sample import Sample, flatten
from slime.rollout import state as core
from slime.rollout.sglang_rollout import GenerateState, abort


async def older_rollout(args, rollout_id, source):
    """In the form of many public rollout functions: submit, wait, drop, abort, put back."""
    state = GenerateState(args)
    wanted = args.rollout_batch_size
    data = []
    while len(data) < wanted:
        while state.remaining_batch_size < wanted:
            state.submit_generate_tasks(source.get_samples(args.over_sampling_batch_size))
        done, state.pendings = await asyncio.wait(
            state.pendings, return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            group = task.result()
            if group[0].index % 4 == 2:
                state.remaining_batch_size -= 1
            elif len(data) < wanted:
                data.append(group)
    aborted = await abort(args, rollout_id)
    state.reset()
    return data, aborted


@pytest.mark.parametrize("partial", [True, False])
async def test_a_loop_over_the_tasks_of_the_state(tokenizer_dir, partial):
    args = arguments(
        tokenizer_dir, over_sampling_batch_size=6, partial_rollout=partial, rollout_batch_size=3
    )
    # the run has made its own state before a user's function asks for it
    own = core.GenerateState(args)
    slow = Prompts(prompt=lambda i: f"prompt {i}{' slow' if i == 5 else ''}: ")
    async with SmallEngine(slow=lambda prompt: "slow" in prompt) as engine:
        work = older_rollout(engine.serve(args), 4, source_of(args, slow))
        data, aborted = await asyncio.wait_for(work, 60)
    assert len(data) == 3 and all(
        sample.status is Sample.Status.COMPLETED and sample.reward is not None
        for sample in flatten(data)
    )
    assert engine.aborts >= 1
    assert own is GenerateState(args)
    assert own.pendings == set() and own.remaining_batch_size == 0 and own.aborted is False
    if not partial:
        assert aborted == []
        return
    cut = [group for group in aborted if " slow" in group[0].prompt]
    assert len(cut) == 1
    for sample in flatten(cut):
        assert sample.status is Sample.Status.ABORTED
        if sample.response_length:
            assert sample.metadata["start_rollout_id"] == 4


async def test_an_error_in_a_group_reaches_the_function(tokenizer_dir, hooks):
    fails = hooks("async def fails(args, sample, params):\n    return 3\n")
    args = arguments(tokenizer_dir, custom_generate_function_path=fails("fails"))
    async with SmallEngine() as engine:
        engine.serve(args)
        state = GenerateState(args)
        state.submit_generate_tasks(source_of(args).get_samples(1))
        await asyncio.wait(state.pendings)
        with pytest.raises(TypeError, match="returned int"):
            await abort(args, 0)
