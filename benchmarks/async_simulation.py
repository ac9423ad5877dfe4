"""What asynchronous training gains, and what scheduling it costs with many engines: hours of runs on a simulated clock.

    python benchmarks/async_simulation.py                                    # all parts, minutes
    python benchmarks/async_simulation.py --parts gain --engines 16 --sigma 1.2

The scheduling is slime's own: rollout loop, standing pool, admission, data source, rewards. Engines decode under the
speed curve of an H200 (``simulated_engines.py``); the trainer needs a time per token such that a synchronous run spends
``--ratio`` times as long on generation as on training. Lengths are log-normal with ``--sigma``, cut at 16 medians.

Parts: ``gain`` (wall time of each mode over that of the synchronous loop), ``tails`` (the same for light and heavy
tails), ``scale`` (CPU seconds of the scheduling code per group by the number of engines). The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for hooks by name

from simulated_engines import H200_CURVE, Engines, SimulatedLoop, SpeedCurve

from slime.cluster.garbage import GarbageCollection
from slime.config.args import Args
from slime.data.sample import Sample, flatten
from slime.data.source import RolloutDataSourceWithBuffer
from slime.data.staleness import sample_staleness
from slime.rollout.admission import Admission
from slime.rollout.fully_async_rollout import StandingPool, open_pool
from slime.rollout.loop import RolloutLoop

LONGEST = 16.0  # medians
TAILS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)  # sigmas
SCALES = (8, 64, 512, 4096)


@dataclass(frozen=True)
class Setting:
    """What all modes have in common."""

    engines: int = 4
    slots: int = 64  # requests that may run on an engine at once
    batch: int = 64  # groups per step
    samples: int = 8  # per group
    steps: int = 16
    median: int = 1024  # tokens
    sigma: float = 1.0
    update_seconds: float = 0.1
    drop_share: float = 0.0  # of the groups, by a dynamic filter
    seed: int = 1
    curve: tuple[tuple[int, float], ...] = H200_CURVE  # (requests that run, output tokens/s) of an engine


@dataclass(frozen=True)
class Mode:
    """How generation and training overlap: not at all, rollout by rollout, or as a standing pool of groups."""

    name: str
    ahead: str = "groups"  # or "rollouts", "nothing"
    buffer: int = 4  # --async-buffer-size
    interval: int = 2  # --update-weights-interval
    staleness: int | None = None  # --max-weight-staleness
    drains: bool = False  # --update-weight-pause-mode drain


SYNCHRONOUS = Mode("synchronous", "nothing", 0, 1)
MODES = (
    Mode("one-step", "rollouts", 1, 1),
    Mode("rollouts ahead", "rollouts"),
    Mode("buffered", drains=True),
    Mode("fully asynchronous"),
    Mode("fully asynchronous, S = 1", interval=1, staleness=1),
    Mode("fully asynchronous, S = 2", interval=1, staleness=2),
)
COMPARED = tuple(mode for mode in MODES if mode.name != "rollouts ahead")


class Prompts:
    """A data set without end."""

    def __len__(self) -> int:
        return 1 << 40

    def shuffle(self, epoch_id: int) -> None:
        """They are all the same."""

    def __getitem__(self, place: int) -> Sample:
        return Sample(prompt="", label="")


class Run:
    """One mode in one setting, on a :class:`SimulatedLoop`.

    Args:
        train_seconds: per token.

    Attributes:
        asked, trained: indices of samples, in their order.
        staleness: of each step, the largest.
        generating: seconds of the synchronous loop's rollouts.
    """

    def __init__(self, setting: Setting, mode: Mode, train_seconds: float = 0.0) -> None:
        self.setting, self.mode, self.train_seconds = setting, mode, train_seconds
        settings: dict[str, Any] = dict(
            rollout_batch_size=setting.batch,
            n_samples_per_prompt=setting.samples,
            rollout_num_gpus=setting.engines,
            rollout_num_gpus_per_engine=1,
            sglang_server_concurrency=setting.slots,
            rollout_max_response_len=int(LONGEST * setting.median),
            async_buffer_size=mode.buffer,
            update_weights_interval=mode.interval,
            max_weight_staleness=mode.staleness,
            custom_generate_function_path="simulated_engines.generate",
            dynamic_sampling_filter_path="simulated_engines.drop_some" if setting.drop_share else None,
            rm_type="random",
            phase_timeout=1e7,  # simulated
        )
        self.engines, self.lengths = Engines(setting.engines, SpeedCurve(setting.curve)), draw_lengths(setting, mode)
        self.args: Any = Args(**settings)
        own = dict(engines=self.engines, lengths=self.lengths, drop_share=setting.drop_share, held_step=0, divided=0)
        for name, value in own.items():  # what the functions of simulated_engines read
            self.args.declare(name, value)
        self.source = RolloutDataSourceWithBuffer(self.args, Prompts())
        self.now = asyncio.get_running_loop().time
        self.trained: list[int] = []
        self.staleness: list[int] = []
        self.garbage = GarbageCollection()
        self.generating = 0.0

    @property
    def asked(self) -> list[int]:
        return list(range(self.source.sample_index))

    async def go(self) -> None:
        if self.mode.ahead == "nothing":
            await self._in_turn()
        elif self.mode.ahead == "rollouts":
            await self._ahead(self._rollout)
        else:
            pool = open_pool(self.args, self.source, 0, self.setting.steps)
            await pool.advance(0)
            await self._ahead(pool.take, pool)
            await pool.close()

    async def _rollout(self, step: int) -> Any:
        return await RolloutLoop(self.args, step, self.source).run()

    async def _in_turn(self) -> None:
        for step in range(self.setting.steps):
            started = self.now()
            output = await self._rollout(step)
            self.generating += self.now() - started
            await self._train(step, output.samples)
            await self._update(step)

    async def _train(self, step: int, groups: list[Any]) -> None:
        samples: list[Any] = flatten(groups)
        ages: list[Any] = [sample_staleness(sample, step) for sample in samples]
        self.trained += [sample.index for sample in samples]
        self.staleness.append(max(ages))
        await asyncio.sleep(self.train_seconds * sum(sample.response_length for sample in samples))

    async def _update(self, step: int) -> None:
        await self.engines.pause(self.setting.update_seconds)
        self.args.held_step = step + 1

    async def _ahead(self, generate: Callable[[int], Awaitable[Any]], pool: StandingPool | None = None) -> None:
        """What ``train_async.py`` and :class:`slime.cluster.prefetch.Prefetcher` do with a thread and Ray."""
        admission = Admission(1, self.mode.buffer, self.mode.interval, self.mode.staleness)
        changed = asyncio.Condition()
        finished: deque[Any] = deque()
        generating = holding = False

        async def work() -> None:
            nonlocal generating
            for step in range(self.setting.steps):
                async with changed:
                    await changed.wait_for(lambda: admission.room() > 0 and not holding)
                    admission.admit()
                    generating = True
                output = await generate(step)
                self.garbage.collect()  # as the rollout manager does
                async with changed:
                    generating = False
                    finished.append(output)
                    changed.notify_all()

        worker = asyncio.create_task(work())
        for step in range(self.setting.steps):
            async with changed:
                await changed.wait_for(lambda: finished)
                output = finished.popleft()
                admission.taken()
            if pool is not None:
                await pool.advance(self.args.held_step, taken=True)
            await self._train(step, output.samples)
            async with changed:
                if (step + 1) % self.mode.interval == 0:
                    if pool is None:
                        holding = True
                        await changed.wait_for(lambda: not generating)
                    elif self.mode.drains:
                        await pool.drain()
                    await self._update(step)
                holding = False
                admission.version_changed(self.args.held_step)
                admission.trained()
                changed.notify_all()
            if pool is not None:
                await pool.advance(self.args.held_step, trained=True)
        await worker


def draw_lengths(setting: Setting, mode: Mode) -> list[int]:
    """Tokens of each sample that a run can ask for: the same for all modes."""
    groups = int((setting.steps + mode.buffer + 2) * setting.batch / (1 - setting.drop_share) * 1.5)
    draw = np.random.default_rng(setting.seed)
    sizes = np.exp(setting.sigma * draw.standard_normal(groups * setting.samples))
    return list(np.maximum(np.round(setting.median * np.minimum(sizes, LONGEST)), 1).astype(int).tolist())


@dataclass(frozen=True)
class Result:
    run: Run
    seconds: float  # simulated
    cpu: float  # real seconds of the scheduling code: of the process, without the model of the engines

    @property
    def tokens(self) -> int:
        return sum(self.run.lengths[index] for index in self.run.trained)


def simulate(setting: Setting, mode: Mode, train_seconds: float = 0.0) -> Result:
    """Run it to its end."""
    loop = SimulatedLoop()

    async def go() -> Result:
        run = Run(setting, mode, train_seconds)
        started = time.process_time()
        await run.go()
        cpu = time.process_time() - started - run.engines.model_seconds
        return Result(run, loop.time(), cpu)

    thresholds = gc.get_threshold()
    try:
        return loop.run_until_complete(go())
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        loop.close()


def gains(setting: Setting, modes: tuple[Mode, ...] = MODES, ratio: float = 2.0) -> dict[str, dict[str, float]]:
    """By mode: ``over_synchronous`` (wall time), ``trainer_busy`` (share of it), ``staleness_max`` (steps), and
    ``several_versions`` (share of the answers that an update went through)."""
    alone = simulate(setting, SYNCHRONOUS)  # training takes no time in it
    per_token = alone.run.generating / ratio / alone.tokens
    synchronous = alone.seconds + per_token * alone.tokens
    rows = {}
    for mode in modes:
        result = simulate(setting, mode, per_token)
        rows[mode.name] = {
            "over_synchronous": result.seconds / synchronous,
            "trainer_busy": per_token * result.tokens / result.seconds,
            "staleness_max": float(max(result.run.staleness)),
            "several_versions": result.run.args.divided / len(result.run.asked),
        }
    return rows


def mean_gains(setting: Setting, seeds: int, modes: tuple[Mode, ...], ratio: float) -> dict[str, dict[str, float]]:
    """Means over seeds, with the smallest and the largest ``over_synchronous``."""
    runs = [gains(replace(setting, seed=seed), modes, ratio) for seed in range(1, seeds + 1)]
    rows = {}
    for mode in modes:
        of_mode = [run[mode.name] for run in runs]
        row = {key: statistics.fmean(one[key] for one in of_mode) for key in of_mode[0]}
        over = [one["over_synchronous"] for one in of_mode]
        rows[mode.name] = row | {"smallest": min(over), "largest": max(over)}
    return rows


def scheduling_cost(engines: int, least_groups: int = 4096) -> dict[str, float]:
    """CPU microseconds per group of 2 samples: fully asynchronous, 4 slots and two groups a step for each engine."""
    batch = 2 * engines
    steps = max(8, least_groups // batch)
    setting = Setting(engines, slots=4, batch=batch, samples=2, steps=steps)
    gc.collect()
    cost = 1e6 * simulate(setting, Mode("scale", buffer=1, interval=1), 1e-7).cpu / (steps * batch)
    return {"engines": engines, "groups": steps * batch, "under_way": 2 * batch, "microseconds_per_group": cost}


def scheduling_costs(scales: list[int], repeats: int) -> list[dict[str, float]]:
    """By size the least of several runs; the sizes take turns, as a machine's speed changes from minute to minute."""
    rounds = [[scheduling_cost(engines) for engines in scales] for _ in range(repeats)]
    return [min(of_size, key=lambda row: row["microseconds_per_group"]) for of_size in zip(*rounds, strict=True)]


def read_curve(text: str) -> tuple[tuple[int, float], ...]:
    return tuple((int(running), float(rate)) for running, rate in (point.split(":") for point in text.split(",")))


def parse(words: list[str] | None = None) -> argparse.Namespace:
    given = Setting()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="gain,tails,scale")
    parser.add_argument("--engines", type=int, default=given.engines)
    parser.add_argument("--slots", type=int, default=given.slots, help="requests that run on an engine at once")
    parser.add_argument("--batch", type=int, default=given.batch, help="groups per step")
    parser.add_argument("--samples", type=int, default=given.samples, help="per group")
    parser.add_argument("--steps", type=int, default=given.steps)
    parser.add_argument("--median", type=int, default=given.median, help="tokens of a response")
    parser.add_argument("--sigma", type=float, default=given.sigma, help="of the logarithm of the length")
    parser.add_argument("--update-seconds", type=float, default=given.update_seconds, help="pause of a weight update")
    parser.add_argument(
        "--curve", type=read_curve, default=given.curve, help="speed of an engine: 1:271,64:9690 (requests:tokens/s)"
    )
    parser.add_argument("--ratio", type=float, default=2.0, help="generation over training in a synchronous run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3, help="of each number of engines; the quickest counts")
    parser.add_argument("--tails", default=",".join(map(str, TAILS)), help="sigmas")
    parser.add_argument("--scales", default=",".join(map(str, SCALES)), help="numbers of engines")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    options = parse(words)
    names = ("engines", "slots", "batch", "samples", "steps", "median", "sigma", "update_seconds", "curve")
    setting = Setting(**{name: getattr(options, name) for name in names})
    parts = options.parts.split(",")
    result: dict[str, Any] = {"setting": {**asdict(setting), "ratio": options.ratio, "seeds": options.seeds}}
    if "gain" in parts:
        result["gain"] = rows = mean_gains(setting, options.seeds, MODES, options.ratio)
        print(
            "wall time over the synchronous loop's (over seeds), share in which the trainer is busy, largest staleness,"
        )
        print("share of answers that an update went through")
        for name, row in rows.items():
            print(
                f"  {name:28} {row['over_synchronous']:.3f} ({row['smallest']:.3f} to {row['largest']:.3f})"
                f"  {row['trainer_busy']:.2f}  {row['staleness_max']:.0f}  {row['several_versions']:.2f}",
                flush=True,
            )
    if "tails" in parts:
        print("the same by sigma: " + ", ".join(mode.name for mode in COMPARED))
        result["tails"] = {}
        for sigma in map(float, options.tails.split(",")):
            rows = mean_gains(replace(setting, sigma=sigma), options.seeds, COMPARED, options.ratio)
            result["tails"][str(sigma)] = {name: row["over_synchronous"] for name, row in rows.items()}
            print(f"  {sigma:.2f}  " + "  ".join(f"{row['over_synchronous']:.3f}" for row in rows.values()), flush=True)
    if "scale" in parts:
        print(
            f"CPU of the scheduling code per group of 2 samples, least of {options.repeats}: a minute each", flush=True
        )
        result["scale"] = scheduling_costs([int(engines) for engines in options.scales.split(",")], options.repeats)
        for row in result["scale"]:
            print(
                f"  {row['engines']:5} engines, {row['under_way']:6.0f} groups under way: "
                f"{row['microseconds_per_group']:.0f} microseconds"
            )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
