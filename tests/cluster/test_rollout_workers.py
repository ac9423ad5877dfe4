"""Groups that rollout workers generate: equal to those of one process, also when workers are killed."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))

from rollout_parts import SmallEngine, arguments, make_tokenizer, source_of

from slime.checkpoint.ledger_report import read_ledger
from slime.cluster.placement import thread_environment
from slime.cluster.rollout_state import Rollout, RolloutState
from slime.cluster.rollout_workers import RolloutWorkers, WorkersLost, parts_of_workers, worker_launcher
from slime.config.rollout import DEFAULT_ROLLOUT_FUNCTION
from slime.data.sample import Sample, flatten
from slime.engines.background import run
from slime.rollout.fully_async_rollout import StandingPool
from slime.rollout.loop import RolloutLoop
from slime.rollout.sglang_rollout import eval_rollout
from slime.rollout.state import GenerateState

pytestmark = [pytest.mark.real, pytest.mark.timeout(280)]

HOOKS = """
import asyncio, os, time
from dataclasses import dataclass
from pathlib import Path
from slime.data.sample import Sample, flatten
from slime.rollout.generate import generate as one

HERE = Path(__file__).parent

@dataclass
class Note:
    pid: int

async def generate(args, sample, sampling_params):
    sample.metadata["note"] = Note(os.getpid())
    (HERE / f"pid-{os.getpid()}").touch()
    return await one(args, sample, sampling_params)

def reward(args, sample, **kwargs):
    return len(sample.response) + sample.metadata["number"] / 10

async def deadly(args, sample, sampling_params):
    if sample.group_index == 2:
        os._exit(1)
    return await one(args, sample, sampling_params)

async def broken(args, sample, sampling_params):
    raise KeyError(f"nothing for sample {sample.index}")

async def endless(args, sample, sampling_params):
    (HERE / f"began-{sample.index}").touch()
    try:
        await asyncio.sleep(600)
    finally:
        (HERE / f"ended-{sample.index}").touch()
"""


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    from slime.cluster.session import connect, disconnect

    connect()
    yield
    disconnect()


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[SmallEngine]:
    server = SmallEngine(**getattr(request, "param", {}))
    run(server.__aenter__())
    yield server
    run(server.__aexit__())


@pytest.fixture
def hook(tmp_path: Path) -> Callable[[str], str]:
    file = tmp_path / "own.py"
    file.write_text(HOOKS)
    return lambda name: f"{file}:{name}"


@pytest.fixture
def begin(ray_cluster: None, tmp_path: Path, tokenizer_dir: Path, engine: SmallEngine) -> Iterator[Callable[..., Any]]:
    """Start a run with so many workers; 0: groups are generated in this process."""
    started: list[RolloutWorkers] = []

    def start(count: int, **more: Any) -> Any:
        args = engine.serve(arguments(tokenizer_dir, **more))
        if count:
            parts = [1 / count] * count
            launch = worker_launcher([args] * count, parts, tmp_path, thread_environment(1))
            started.append(RolloutWorkers(launch, parts, 120.0, lambda: None))
            started[-1].start()
            GenerateState(args).generator = started[-1]
        return args

    yield start
    for workers in started:
        workers.stop()


def values(samples: list[Sample]) -> list[tuple[object, ...]]:
    return [
        (s.index, s.tokens, s.rollout_log_probs, s.response, s.reward, s.status, s.session_id, s.version_spans)
        for s in samples
    ]


def pids(args: Any) -> list[int]:
    return GenerateState(args).generator.pids()


def rollout(args: Any, source: Any, rollout_id: int = 0) -> Any:
    return run(RolloutLoop(args, rollout_id, source).run())


def test_groups_are_divided_as_the_engines_are() -> None:
    assert parts_of_workers(2, 0, 4) == [0.5, 0.5]
    assert parts_of_workers(2, 2, 3) == [2 / 3, 1 / 3]
    assert parts_of_workers(3, 2, 2) == [0.25, 0.5, 0.25]


def test_any_number_of_workers_gives_the_same_samples(begin, hook, tmp_path: Path) -> None:
    made = []
    for count in (0, 2, 4):
        more = {"custom_generate_function_path": hook("generate"), "custom_rm_path": hook("reward")}
        args = begin(count, deterministic=True, rollout_batch_size=8, **more)
        source = source_of(args)
        rollouts = [flatten(rollout(args, source, number).samples) for number in range(2)]
        made.append([values(samples) for samples in rollouts])
        noted = {sample.metadata["note"].pid for samples in rollouts for sample in samples}  # of a class of the file
        assert noted == set(pids(args) if count else [os.getpid()])
        files = list(tmp_path.glob("pid-*"))
        assert {int(file.name.removeprefix("pid-")) for file in files} == set(pids(args) if count else [os.getpid()])
        for file in files:
            file.unlink()
    assert made[0] == made[1] == made[2]


def test_a_standing_pool_records_what_its_workers_generate(begin, tmp_path: Path, engine: SmallEngine) -> None:
    made, lines = [], []
    engine.version = "0.0"
    for count in (0, 2):
        folder = tmp_path / str(count)
        folder.mkdir()
        args = begin(count, async_buffer_size=2, replay_schedule=None, save=None, load_debug_rollout_data=None)
        source = source_of(args)
        state = RolloutState(args, folder, source)
        GenerateState(args).observer = state.observe
        GenerateState(args).schedule = state.open_schedule(folder / "schedule.jsonl", 0, 0, 3)

        async def train(args: Any = args, source: Any = source) -> list[Any]:
            pool, taken = StandingPool(args, source, 0, 3), []
            for step in range(3):
                await pool.advance(step, trained=step > 0)
                taken.append(values(flatten((await pool.take(step)).samples)))
                await pool.advance(step, taken=True)
            await pool.close()
            return taken

        made.append(run(train()))
        state.close()
        lines.append(sorted(line for line in (folder / "schedule.jsonl").read_text().splitlines() if "request" in line))
    assert made[0] == made[1] and lines[0] == lines[1] and len(lines[0]) >= 3 * 8


@pytest.mark.parametrize("engine", [{"slow": lambda prompt: "prompt 1:" in prompt}], indirect=True)
def test_an_abort_reaches_the_workers_and_the_next_rollout_continues(begin, engine: SmallEngine) -> None:
    args = begin(2, rollout_batch_size=2, over_sampling_batch_size=5, partial_rollout=True)
    source = source_of(args)
    first = rollout(args, source)
    assert engine.aborts and len(first.samples) == 2
    waiting = {sample.index: sample.tokens for sample in flatten(source.buffer)}
    assert any(sample.status is Sample.Status.ABORTED for sample in flatten(source.buffer))
    engine.slow = lambda prompt: False
    again = [sample for number in (1, 2) for sample in flatten(rollout(args, source, number).samples)]
    continued = [sample for sample in again if sample.index in waiting]
    assert continued
    for sample in continued:
        assert sample.tokens[: len(waiting[sample.index])] == waiting[sample.index]


def test_an_evaluation_goes_through_the_workers(begin, hook, tmp_path: Path) -> None:
    rows = tmp_path / "eval.jsonl"
    rows.write_text(
        "".join(f'{{"prompt": "question {i}", "label": "{i}", "metadata": {{"number": 1}}}}\n' for i in range(6))
    )
    made = []
    for count in (0, 2):
        args = begin(
            count, eval_prompt_data=["set", str(rows)], n_samples_per_eval_prompt=2, custom_rm_path=hook("reward")
        )
        made.append(run(eval_rollout(args, 0)).data["set"])
    assert values(made[0]["samples"]) == values(made[1]["samples"]) and made[0]["rewards"] == made[1]["rewards"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("engine", [{"slow": lambda prompt: "prompt 1:" in prompt}], indirect=True)
def test_the_groups_of_a_lost_worker_are_generated_again(
    begin, engine: SmallEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr("slime.cluster.rollout_workers.SILENT_SECONDS", 12.0)
    more = {"save": None, "rollout_function_path": DEFAULT_ROLLOUT_FUNCTION, "load_debug_rollout_data": None}
    args = begin(2, deterministic=True, rollout_batch_size=8, phase_timeout=200.0, **more)
    source = source_of(args)
    state = RolloutState(args, tmp_path, source)
    GenerateState(args).observer = state.observe
    before = pids(args)

    def strike() -> None:
        while engine.running < 2:  # the group that never ends is in one of them
            time.sleep(0.01)
        for pid in before:
            os.kill(pid, number)
        engine.slow = lambda prompt: False

    striker = threading.Thread(target=strike)
    striker.start()
    output = rollout(args, source)
    striker.join()
    state.complete(0, Rollout(output.samples, {}, 0.0))
    state.trained(0)
    state.close_account(0)
    state.close()
    report = read_ledger(tmp_path / "ledger.jsonl")
    assert report.closes and report.counts["trained"] == 8
    after = pids(args)
    assert len(after) == 2 and not set(after) & set(before)
    assert not [pid for pid in before if psutil.pid_exists(pid)]
    assert GenerateState(args).generator.restarts() == 2.0
    undisturbed = begin(0, deterministic=True, rollout_batch_size=8)
    assert values(flatten(output.samples)) == values(flatten(rollout(undisturbed, source_of(undisturbed)).samples))


def test_a_group_that_ends_every_worker_ends_the_run(begin, hook) -> None:
    args = begin(2, custom_generate_function_path=hook("deadly"), phase_timeout=200.0)
    with pytest.raises(WorkersLost, match="rollout worker"):
        rollout(args, source_of(args))


def test_an_error_of_a_users_function_arrives_with_its_type(begin, hook) -> None:
    args = begin(2, custom_generate_function_path=hook("broken"))
    with pytest.raises(KeyError, match="nothing for sample"):
        rollout(args, source_of(args))


def test_cancelled_groups_have_ended_in_their_workers(begin, hook, tmp_path: Path) -> None:
    args = begin(2, custom_generate_function_path=hook("endless"), phase_timeout=5.0)
    with pytest.raises(TimeoutError, match="phase-timeout"):
        rollout(args, source_of(args))
    began = {path.name.removeprefix("began-") for path in tmp_path.glob("began-*")}
    assert began and began == {path.name.removeprefix("ended-") for path in tmp_path.glob("ended-*")}
