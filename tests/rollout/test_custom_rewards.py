"""Users' reward functions are bounded by --reward-timeout however they hang, and what hangs is
counted, never 0.
"""

import asyncio
import json
import re
import threading

import pytest
from make_args import make_args
from rollout_parts import SmallEngine, arguments, source_of

from slime.data.convert import samples_to_train_data
from slime.data.sample import Sample, flatten
from slime.rollout.metrics import known_reward
from slime.rollout.rm_hub import async_rm, batched_async_rm, outcome
from slime.rollout.sglang_rollout import generate_and_rm, generate_rollout_async

pytestmark = pytest.mark.timeout(60)

HOOKS = """
import asyncio, threading, time
import numpy as np
import torch
stop = threading.Event()

async def waits(args, sample, **kw):
    if sample.index == 1:
        await asyncio.sleep(1000)
    return 1.0

async def blocks(args, sample, **kw):
    if sample.index == 1:
        stop.wait(1000)
    return 1.0

def plain(args, sample):
    if sample.index == 1:
        stop.wait(1000)
    return 1.0

async def swallows(args, sample, **kw):
    while True:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            return 0.0  # what must not become a reward

async def listed(args, samples, **kw):
    await asyncio.sleep(1000)

async def busy(args, sample, **kw):
    await asyncio.sleep(0)
    until = time.thread_time() + 0.03
    while time.thread_time() < until:
        pass
    return 1.0

def slow(args, sample):
    time.sleep(0.03)
    return 1.0

async def patient(args, sample, **kw):
    await asyncio.sleep(0.6)
    return 1.0
patient.deadline = "phase_timeout"

async def of_numpy(args, samples, **kw):
    one = isinstance(samples, list)
    return np.ones(len(samples), np.float32) if one else {"score": np.float32(1), "passed": np.bool_(True)}

async def of_torch(args, samples, **kw):
    return torch.ones(len(samples)) if isinstance(samples, list) else torch.tensor(1.0)

async def of_logits(args, samples, **kw):
    return torch.ones(len(samples), 1) if isinstance(samples, list) else torch.tensor([1.0])

async def of_an_array(args, samples, **kw):
    return np.ones((len(samples), 1)) if isinstance(samples, list) else np.ones(1)

async def thread_of(args, sample, **kw):
    return {"thread": threading.current_thread().name}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text(HOOKS)
    yield str(path)
    from slime.config.hooks import load_function

    load_function(f"{path}:stop").set()  # threads left behind end with the test


def settings(file, name, timeout=3.0, **more):
    return make_args().with_values(
        rm_type=None,
        custom_rm_path=f"{file}:{name}",
        reward_timeout=timeout,
        reward_workers=2,
        **more,
    )


async def score_all(args, count=4):
    samples = [Sample(index=i) for i in range(count)]
    rewards = await asyncio.gather(*(async_rm(args, sample) for sample in samples))
    return samples, rewards


@pytest.mark.parametrize("name", ["waits", "blocks", "plain"])
async def test_one_that_hangs_is_marked_and_the_others_are_scored(file, name):
    beats = 0

    async def heart():
        nonlocal beats
        while True:
            await asyncio.sleep(0.01)
            beats += 1

    beating = asyncio.create_task(heart())
    samples, rewards = await score_all(settings(file, name))
    beating.cancel()
    assert rewards == [1.0, None, 1.0, 1.0]
    assert [s.reward_timed_out for s in samples] == [False, True, False, False]
    assert samples[1].remove_sample and samples[1].metadata["reward_failure"].startswith(
        f"timeout: {file}:{name}"
    )
    assert beats > 3, "the rollout's own event loop goes on"


async def test_a_blocked_loop_is_replaced_and_serves_further_calls(file):
    await score_all(settings(file, "blocks", timeout=0.3))
    _, rewards = await score_all(settings(file, "waits", timeout=30.0), count=1)
    assert rewards == [1.0]


async def test_an_answer_given_on_being_cancelled_is_no_reward(file):
    sample = Sample(index=0)
    assert (
        await async_rm(settings(file, "swallows", timeout=0.3), sample) is None
        and sample.reward_timed_out
    )


async def test_a_batch_that_hangs_marks_all_its_samples(file):
    samples = [Sample(index=i) for i in range(3)]
    assert await batched_async_rm(settings(file, "listed", timeout=0.3), samples) == [None] * 3
    assert all(sample.reward_timed_out for sample in samples)


@pytest.mark.parametrize("name", ["busy", "slow"])
async def test_waiting_for_others_does_not_count(file, name):
    """All together take longer than the limit of one, on one loop or on two threads; each takes a
    fraction of it, so that a busy machine does not matter."""
    _, rewards = await score_all(settings(file, name, timeout=1.2), count=50)
    assert rewards == [1.0] * 50


async def test_a_function_may_bring_its_own_deadline(file):
    _, rewards = await score_all(settings(file, "patient", timeout=0.3), count=1)
    assert rewards == [1.0]


async def test_reward_functions_have_a_thread_of_their_own(file):
    _, rewards = await score_all(settings(file, "thread_of", timeout=30.0), count=1)
    assert rewards == [{"thread": "custom-rewards"}]


ABSTAINS = """
async def one(args, sample, **kwargs):
    return None if sample.index % 4 == 1 else float(sample.index)
async def listed(args, samples, **kwargs):
    return [await one(args, sample) for sample in samples]
"""


@pytest.mark.parametrize(("name", "group"), [("one", False), ("listed", True)])
async def test_a_reward_of_none_leaves_its_sample_out_of_statistics_and_loss(
    tokenizer_dir, tmp_path, name, group
):
    (tmp_path / "abstains.py").write_text(ABSTAINS)
    path = f"{tmp_path / 'abstains.py'}:{name}"
    args = arguments(
        tokenizer_dir,
        custom_rm_path=path,
        group_rm=group,
        n_samples_per_prompt=4,
        rollout_batch_size=2,
    )
    async with SmallEngine() as engine:
        output = await asyncio.wait_for(
            generate_rollout_async(engine.serve(args), 0, source_of(args)), 30
        )
    samples = flatten(output.samples)
    without = [sample for sample in samples if sample.reward is None]
    assert [sample.index % 4 for sample in without] == [1, 1]
    assert output.metrics["rollout/reward_abstained_count"] == 2
    assert (
        output.metrics["rollout/reward_error_count"]
        == output.metrics["rollout/reward_timeout_count"]
        == 0
    )
    data = samples_to_train_data(args, output.samples)
    trained = dict(zip(data["sample_indices"], data["rewards"], strict=True))
    assert all(trained[sample.index] == 0 for sample in without)
    rest = [trained[i] for i in (0, 2, 3)]
    # the baseline is that of three
    assert sum(rest) == pytest.approx(0, abs=1e-5) and rest[2] > rest[1] > 0 > rest[0]
    masks = dict(zip(data["sample_indices"], data["loss_masks"], strict=True))
    assert all(not any(masks[sample.index]) for sample in without) and any(masks[0])


async def test_the_rollout_counts_them_and_replaces_the_group(tokenizer_dir, file):
    args = arguments(tokenizer_dir, custom_rm_path=f"{file}:blocks", reward_timeout=3.0)
    async with SmallEngine() as engine:
        output = await asyncio.wait_for(
            generate_rollout_async(engine.serve(args), 0, source_of(args)), 30
        )
    assert output.metrics["rollout/reward_timeout_count"] == 1
    assert output.metrics["rollout/replaced_group_count"] == 1
    assert {sample.reward for sample in flatten(output.samples)} == {1.0}


@pytest.mark.parametrize(
    ("name", "single"),
    [
        ("of_numpy", {"score": 1.0, "passed": True}),
        ("of_torch", 1.0),
        ("of_logits", 1.0),
        ("of_an_array", 1.0),
    ],
)  # fmt: skip
async def test_numbers_of_numpy_and_torch_become_plain_ones(file, name, single):
    """Otherwise rollout/raw_reward lacks them without a word, and the file of samples has texts."""
    reward = await async_rm(settings(file, name), Sample(index=0))
    assert reward == single and known_reward(Sample(reward=reward), None) == 1.0
    assert json.loads(json.dumps(reward)) == single
    rewards = await batched_async_rm(settings(file, name), [Sample(index=0), Sample(index=1)])
    assert rewards == [1.0, 1.0] and [type(value) for value in rewards] == [float, float]


async def test_a_reward_of_a_generate_function_becomes_a_plain_one(tokenizer_dir, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "import numpy as np\nasync def own(args, sample, sampling_params):\n"
        "    sample.response, sample.reward = 'x', np.float32(1)\n    return sample\n"
    )
    args = arguments(tokenizer_dir, custom_generate_function_path=f"{path}:own")
    sample = await generate_and_rm(args, Sample(prompt="p", index=0), {})
    assert type(sample.reward) is float and sample.reward == 1.0


@pytest.mark.real
async def test_a_model_that_hangs_is_killed_and_made_anew(tmp_path):
    (tmp_path / "model.py").write_text(
        "import os, time\n"
        "class CustomRewardModel:\n"
        "    def compute_reward(self, prompts, responses):\n"
        "        if responses[0] == 'hang': time.sleep(1000)\n"
        "        if responses[0] == 'raise': 1 / 0\n"
        "        return [os.getpid()] * len(prompts)\n"
    )
    args = make_args().with_values(
        custom_rm_path=str(tmp_path / "model.py"), rm_model_path=None, reward_timeout=3.0
    )
    first = await async_rm(args, Sample(response="x"))
    stuck = Sample(response="hang")
    assert await async_rm(args, stuck) is None and stuck.reward_timed_out
    assert await async_rm(args, Sample(response="x")) not in (None, first)
    raised = Sample(response="raise")
    assert await async_rm(args, raised) is None and outcome.failure(raised) == outcome.RAISED
    assert re.search(r"ZeroDivisionError.*model.py:5", raised.metadata["reward_failure"])
    assert len(await batched_async_rm(args, [Sample(response="x"), Sample(response="y")])) == 2


async def test_threads_of_functions_that_hang_are_bounded(monkeypatch):
    from slime.rollout.rm_hub import custom

    release, begun = threading.Event(), []

    def hang(number):
        begun.append(number)
        release.wait(60)

    monkeypatch.setattr(custom, "MOST_LEFT", 3)
    monkeypatch.setattr(custom, "left_threads", [])
    try:
        for number in range(5):
            with pytest.raises(custom.RewardTimeout):
                await custom.call_bounded(1.0, 8, hang, number)
        assert begun == [0, 1, 2]
    finally:
        release.set()
