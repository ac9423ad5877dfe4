"""Groups that rollout workers generate: equal to those of one process, also when workers are
killed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from needs import of_all

sys.path.insert(0, str(Path(__file__).parents[2] / "rollout"))

from rollout_parts import SmallEngine, arguments, make_tokenizer, source_of

from slime.cluster.rollout_state import Rollout, RolloutState
from slime.config.rollout import DEFAULT_ROLLOUT_FUNCTION
from slime.data.sample import Sample, flatten
from slime.data.staleness import sample_staleness
from slime.engines.background import run
from slime.plugins.tools.summary import read_ledger
from slime.plugins.workers.workers import (
    RolloutWorkers,
    WorkersLost,
    parts_of_workers,
)
from slime.plugins.workers.workers import start as start_workers
from slime.rollout.fully_async_rollout import StandingPool
from slime.rollout.loop import RolloutLoop
from slime.rollout.sglang_rollout import eval_rollout
from slime.rollout.state import GenerateState

pytestmark = [pytest.mark.real, pytest.mark.timeout(280)]

ACCOUNTED = {
    "rollout_function_path": DEFAULT_ROLLOUT_FUNCTION, "save": None, "replay_schedule": None,
    "load_debug_rollout_data": None,
}  # fmt: skip
"""What a run needs besides for its ledger and its schedule."""
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
    from slime.plugins.actors.ray_cluster import connect, disconnect

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


def fleet_in(folder: Path) -> Any:
    """A fleet that is not divided, as the workers see it."""
    return SimpleNamespace(
        shares=0, engines=[], log_dir=folder, addresses_of=lambda worker: {},
        monitor=SimpleNamespace(wake=lambda: None),
    )  # fmt: skip


@pytest.fixture
def begin(
    ray_cluster: None, tmp_path: Path, tokenizer_dir: Path, engine: SmallEngine
) -> Iterator[Callable[..., Any]]:
    """Start a run with so many workers; 0: groups are generated in this process."""
    started: list[RolloutWorkers] = []

    def start(count: int, **more: Any) -> Any:
        args = engine.serve(arguments(tokenizer_dir, **more))
        if count:
            args = args.with_values(rollout_workers=count, start_timeout=120.0)
            started.append(start_workers(args, fleet_in(tmp_path)))
            GenerateState(args).generator = started[-1]
        return args

    yield start
    for workers in started:
        workers.stop()


def values(samples: list[Sample]) -> list[tuple[object, ...]]:
    return [
        (
            s.index,
            s.tokens,
            s.rollout_log_probs,
            s.response,
            s.reward,
            s.status,
            s.session_id,
            s.version_spans,
        )
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


@pytest.mark.more
def test_any_number_of_workers_gives_the_same(
    begin, hook, tmp_path: Path, engine: SmallEngine
) -> None:
    """Samples, ledger and schedule with 2 workers, in the long circle with 4, are those of a single
    process, and staleness is as bounded.

    The same workers serve synchronous rollouts and standing pools, because their start is what
    takes time.
    """
    engine.version = "0.0"
    made = []
    for count in (0, of_all(4, 2)):
        own = {**ACCOUNTED, "phase_timeout": 200.0}
        own |= {"custom_generate_function_path": hook("generate"), "custom_rm_path": hook("reward")}
        args = begin(count, deterministic=True, rollout_batch_size=8, **own)
        samples, account = accounted_rollouts(args, tmp_path / f"ledger-{count}")
        processes = set(pids(args) if count else [os.getpid()])
        # of a class of the file
        assert {sample.metadata["note"].pid for sample in samples} == processes

        def with_pool(args: Any = args, own: dict[str, Any] = own, **more: Any) -> Any:
            pool = engine.serve(arguments(args.hf_checkpoint, **own, **more))
            GenerateState(pool).generator = GenerateState(args).generator
            return pool

        taken, lines = standing_pool(with_pool(async_buffer_size=2), tmp_path / f"pool-{count}")
        made.append((values(samples), account, [values(some) for some in taken], lines))
        bounded = with_pool(async_buffer_size=2, max_weight_staleness=1)
        taken, _ = standing_pool(bounded, tmp_path / f"bounded-{count}", engine)
        ages = [
            sample_staleness(sample, step)
            for step, samples in enumerate(taken)
            for sample in samples
        ]
        assert None not in ages and max(ages) == 1
        engine.version = "0.0"
        files = list(tmp_path.glob("pid-*"))
        assert {int(file.name.removeprefix("pid-")) for file in files} == processes
        for file in files:
            file.unlink()
    assert all(each == made[0] for each in made[1:])
    assert len(made[0][1]) >= 16 and len(made[0][3]) >= 3 * 8


def accounted_rollouts(args: Any, folder: Path) -> tuple[list[Sample], list[str]]:
    """The samples of two rollouts and the rows of their ledger, which is consistent."""
    folder.mkdir()
    source = source_of(args)
    state = RolloutState(args, folder, source)
    GenerateState(args).observer = state.observe
    samples = []
    for number in range(2):
        output = rollout(args, source, number)
        samples += flatten(output.samples)
        state.complete(number, Rollout(output.samples, {}, 0.0))
        state.trained(number)
    state.close_account(1)
    state.close()
    report = read_ledger(folder / "ledger.jsonl")
    assert report.closes and report.counts["trained"] == 16
    return samples, sorted((folder / "ledger.jsonl").read_text().splitlines())


def standing_pool(
    args: Any, folder: Path, trained: SmallEngine | None = None
) -> tuple[list[list[Sample]], list[str]]:
    """The samples of three steps of a fully asynchronous run, and the lines of its requests in the
    schedule.

    Args:
        trained: An engine that gets new weights after each step.
    """
    folder.mkdir()
    source = source_of(args)
    state = RolloutState(args, folder, source)
    GenerateState(args).observer = state.observe
    GenerateState(args).schedule = state.open_schedule(folder / "schedule.jsonl", 0, 0, 3)

    async def train() -> list[list[Sample]]:
        pool, taken = StandingPool(args, source, 0, 3), []
        for step in range(3):
            await pool.advance(step, trained=step > 0)
            taken.append(flatten((await pool.take(step)).samples))
            await pool.advance(step, taken=True)
            if trained is not None:
                trained.version = f"0.{step + 1}"
        await pool.close()
        return taken

    taken = run(train())
    state.close()
    lines = (folder / "schedule.jsonl").read_text().splitlines()
    return taken, sorted(line for line in lines if "request" in line)


@pytest.mark.parametrize("engine", [{"slow": lambda prompt: "prompt 1:" in prompt}], indirect=True)
def test_an_abort_reaches_the_workers_and_the_next_rollout_continues(
    begin, engine: SmallEngine
) -> None:
    args = begin(2, rollout_batch_size=2, over_sampling_batch_size=5, partial_rollout=True)
    source = source_of(args)
    first = rollout(args, source)
    assert engine.aborts and len(first.samples) == 2
    waiting = {sample.index: sample.tokens for sample in flatten(source.buffer)}
    assert any(sample.status is Sample.Status.ABORTED for sample in flatten(source.buffer))
    engine.slow = lambda prompt: False
    again = [
        sample for number in (1, 2) for sample in flatten(rollout(args, source, number).samples)
    ]
    continued = [sample for sample in again if sample.index in waiting]
    assert continued
    for sample in continued:
        assert sample.tokens[: len(waiting[sample.index])] == waiting[sample.index]


def test_an_evaluation_goes_through_the_workers(begin, hook, tmp_path: Path) -> None:
    rows = tmp_path / "eval.jsonl"
    rows.write_text(
        "".join(
            f'{{"prompt": "question {i}", "label": "{i}", "metadata": {{"number": 1}}}}\n'
            for i in range(6)
        )
    )
    made = []
    for count in (0, 2):
        args = begin(
            count,
            eval_prompt_data=["set", str(rows)],
            n_samples_per_eval_prompt=2,
            custom_rm_path=hook("reward"),
        )
        made.append(run(eval_rollout(args, 0)).data["set"])
    assert (
        values(made[0]["samples"]) == values(made[1]["samples"])
        and made[0]["rewards"] == made[1]["rewards"]
    )


@pytest.mark.parametrize(
    "count, lost, number",
    [
        (1, 1, "SIGKILL"),
        pytest.param(2, 2, "SIGSTOP", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("engine", [{"slow": lambda prompt: "prompt 1:" in prompt}], indirect=True)
def test_the_groups_of_lost_workers_are_generated_again(
    begin,
    engine: SmallEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    lost: int,
    number: str,
) -> None:
    monkeypatch.setattr("slime.plugins.workers.workers.SILENT_SECONDS", 12.0)
    args = begin(count, deterministic=True, rollout_batch_size=8, phase_timeout=200.0, **ACCOUNTED)
    source = source_of(args)
    state = RolloutState(args, tmp_path, source)
    GenerateState(args).observer = state.observe
    before = pids(args)
    struck = before[:lost]  # the second worker has the group that never ends

    def strike() -> None:
        while engine.running < 2:  # the group that never ends is in one of them
            time.sleep(0.01)
        for pid in struck:
            os.kill(pid, signal.Signals[number])
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
    while len(pids(args)) < count:  # those that live may have generated everything meanwhile
        time.sleep(0.05)
    assert set(pids(args)) & set(before) == set(before[lost:])
    assert not [pid for pid in struck if psutil.pid_exists(pid)]
    assert GenerateState(args).generator.restarts() == lost
    undisturbed = begin(0, deterministic=True, rollout_batch_size=8)
    assert values(flatten(output.samples)) == values(
        flatten(rollout(undisturbed, source_of(undisturbed)).samples)
    )


def test_a_group_that_ends_every_worker_ends_the_run(
    begin, hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.plugins.workers.workers.MOST_TRIES", 2)
    args = begin(2, custom_generate_function_path=hook("deadly"), phase_timeout=200.0)
    with pytest.raises(WorkersLost, match="rollout worker"):
        rollout(args, source_of(args))


def test_an_error_of_a_users_function_arrives_with_its_type(begin, hook) -> None:
    broken = hook("broken")
    args = begin(2, custom_generate_function_path=broken, reward_max_error_share=0.0)
    with pytest.raises(KeyError, match="nothing for sample"):
        rollout(args, source_of(args))


def test_cancelled_groups_have_ended_in_their_workers(begin, hook, tmp_path: Path) -> None:
    args = begin(2, custom_generate_function_path=hook("endless"), phase_timeout=5.0)
    with pytest.raises(TimeoutError, match="phase-timeout"):
        rollout(args, source_of(args))
    began = {path.name.removeprefix("began-") for path in tmp_path.glob("began-*")}
    assert began and began == {
        path.name.removeprefix("ended-") for path in tmp_path.glob("ended-*")
    }
