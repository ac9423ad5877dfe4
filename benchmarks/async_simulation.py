"""What asynchronous training gains, and what scheduling it costs with many engines: hours of runs
on a simulated clock.

    python benchmarks/async_simulation.py                                    # all parts, minutes
    python benchmarks/async_simulation.py --parts gain --engines 16 --sigma 1.2

The scheduling is slime's own (``slime/plugins/tools/plan/simulation.py``): rollout loop, standing
pool, admission, data source, rewards. Engines decode under the speed curve of an H200
(``slime/plugins/tools/plan/simulated_engines.py``); the trainer needs a time per token such that a
synchronous run spends ``--ratio`` times as long on generation as on training. Lengths are
log-normal with ``--sigma``, cut at 16 medians.

Parts: ``gain`` (wall time of each mode over that of the synchronous loop), ``tails`` (the same for
light and heavy tails), ``scale`` (CPU seconds of the scheduling code per group by the number of
engines). The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from slime.cluster.generation import GarbageCollection
from slime.config.run import RunConfig
from slime.config.seeds import derive_seed
from slime.data.sample import Sample
from slime.plugins.tools.plan.simulated_engines import Engines, SimulatedLoop, SpeedCurve
from slime.plugins.tools.plan.simulation import SYNCHRONOUS, Mode, Run, Setting, simulate

MODES = (
    Mode("one-step", "rollouts", 1, 1),
    Mode("rollouts ahead", "rollouts"),
    Mode("buffered", drains=True),
    Mode("fully asynchronous"),
    Mode("fully asynchronous, S = 1", interval=1, staleness=1),
    Mode("fully asynchronous, S = 2", interval=1, staleness=2),
)

TAILS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)  # sigmas
SCALES = (8, 64, 512, 4096)
COMPARED = tuple(mode for mode in MODES if mode.name != "rollouts ahead")


@dataclass(frozen=True)
class Tail(Setting):
    """Log-normal lengths of responses, cut at 16 medians."""

    median: int = 1024
    sigma: float = 1.0

    @property
    def longest(self) -> int:
        return 16 * self.median

    def draw(self, count: int) -> list[int]:
        sizes = np.exp(self.sigma * np.random.default_rng(self.seed).standard_normal(count))
        return list(
            np.maximum(np.round(self.median * np.minimum(sizes, 16.0)), 1).astype(int).tolist()
        )


class Filtered(Run):
    """A run of which a dynamic filter drops a share of the groups, whatever they hold."""

    drop_share = 0.4

    def __init__(self, setting: Setting, mode: Mode, train_seconds: float) -> None:
        super().__init__(setting, mode, train_seconds)
        self.args = self.args.with_values(
            dynamic_sampling_filter_path=f"{__name__}.{drop_some.__name__}"
        )
        more = int(len(self.lengths) / (1 - self.drop_share))
        self.lengths[:] = setting.draw(more)
        self.fleet.drop_share = self.drop_share  # type: ignore[attr-defined]  # for drop_some


def drop_some(args: RunConfig, group: list[Sample]) -> bool:
    """The filter of :class:`Filtered`, which finds the share where the engines are."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    share: float = vars(loop.fleet)["drop_share"]
    return derive_seed(args.seed, "dropped", group[0].group_index or 0) / 2**31 >= share


class TimedEngines(Engines):
    """Engines that count the CPU seconds of their own code, to be told from those of the scheduling
    code.
    """

    own_seconds = 0.0

    async def generate(self, tokens: int) -> None:
        started = time.process_time()
        done = self.begin(tokens)
        self.own_seconds += time.process_time() - started
        await done

    def _end(self) -> None:
        started = time.process_time()
        super()._end()
        self.own_seconds += time.process_time() - started


class TimedRun(Run):
    """A run with these engines, which collects garbage after each rollout as the rollout manager
    does.
    """

    def __init__(self, setting: Setting, mode: Mode, train_seconds: float) -> None:
        super().__init__(setting, mode, train_seconds)
        self.engines: TimedEngines = TimedEngines(setting.engines, SpeedCurve(setting.curve))
        self.fleet.engines = self.engines
        self.garbage = GarbageCollection()
        self.cpu = 0.0

    async def go(self) -> None:
        started = time.process_time()
        await super().go()
        self.cpu = time.process_time() - started - self.engines.own_seconds

    async def _train(self, step: int, groups: list[Any]) -> None:
        self.garbage.collect()
        await super()._train(step, groups)


def gains(
    setting: Setting, modes: tuple[Mode, ...] = MODES, ratio: float = 2.0
) -> dict[str, dict[str, float]]:
    """Return by mode: ``over_synchronous`` (wall time), ``trainer_busy`` (share of it),
    ``staleness_max`` (steps), and ``several_versions`` (share of the answers that an update went
    through).

    Args:
        ratio: Seconds of generation over those of training in the synchronous loop.
    """
    alone = simulate(setting, SYNCHRONOUS)  # training takes no time in it
    per_token = alone.generating / ratio / trained_tokens(alone)
    synchronous = alone.now() + per_token * trained_tokens(alone)
    rows = {}
    for mode in modes:
        run = simulate(setting, mode, per_token)
        rows[mode.name] = {
            "over_synchronous": run.now() / synchronous,
            "trainer_busy": per_token * trained_tokens(run) / run.now(),
            "staleness_max": float(max(run.staleness)),
            "several_versions": run.fleet.divided / len(run.asked),
        }
    return rows


def trained_tokens(run: Run) -> int:
    return sum(run.lengths[index] for index in run.trained)


def mean_gains(
    setting: Setting, seeds: int, modes: tuple[Mode, ...], ratio: float
) -> dict[str, dict[str, float]]:
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
    """CPU microseconds per group of 2 samples: fully asynchronous, 4 slots and two groups a step
    for each engine.
    """
    batch = 2 * engines
    steps = max(8, least_groups // batch)
    setting = Tail(engines, slots=4, batch=batch, samples=2, steps=steps)
    gc.collect()
    thresholds = gc.get_threshold()
    try:
        run = simulate(setting, Mode("scale", buffer=1, interval=1), 1e-7, TimedRun)
        assert isinstance(run, TimedRun)
        cpu = run.cpu
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
    cost = 1e6 * cpu / (steps * batch)
    return {
        "engines": engines,
        "groups": steps * batch,
        "under_way": 2 * batch,
        "microseconds_per_group": cost,
    }


def scheduling_costs(scales: list[int], repeats: int) -> list[dict[str, float]]:
    """By size the least of several runs; the sizes take turns, as a machine's speed changes from
    minute to minute.
    """
    rounds = [[scheduling_cost(engines) for engines in scales] for _ in range(repeats)]
    return [
        min(of_size, key=lambda row: row["microseconds_per_group"])
        for of_size in zip(*rounds, strict=True)
    ]


def read_curve(text: str) -> tuple[tuple[int, float], ...]:
    return tuple(
        (int(running), float(rate))
        for running, rate in (point.split(":") for point in text.split(","))
    )


def parse(words: list[str] | None = None) -> argparse.Namespace:
    given = Tail()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="gain,tails,scale")
    parser.add_argument("--engines", type=int, default=given.engines)
    parser.add_argument(
        "--slots", type=int, default=given.slots, help="requests that run on an engine at once"
    )
    parser.add_argument("--batch", type=int, default=given.batch, help="groups per step")
    parser.add_argument("--samples", type=int, default=given.samples, help="per group")
    parser.add_argument("--steps", type=int, default=given.steps)
    parser.add_argument("--median", type=int, default=given.median, help="tokens of a response")
    parser.add_argument(
        "--sigma", type=float, default=given.sigma, help="of the logarithm of the length"
    )
    parser.add_argument(
        "--update-seconds",
        type=float,
        default=given.update_seconds,
        help="pause of a weight update",
    )
    parser.add_argument(
        "--curve",
        type=read_curve,
        default=given.curve,
        help="speed of an engine: 1:271,64:9690 (requests:tokens/s)",
    )
    parser.add_argument(
        "--ratio", type=float, default=2.0, help="generation over training in a synchronous run"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--repeats", type=int, default=3, help="of each number of engines; the quickest counts"
    )
    parser.add_argument("--tails", default=",".join(map(str, TAILS)), help="sigmas")
    parser.add_argument("--scales", default=",".join(map(str, SCALES)), help="numbers of engines")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    options = parse(words)
    names = (
        "engines",
        "slots",
        "batch",
        "samples",
        "steps",
        "median",
        "sigma",
        "update_seconds",
        "curve",
    )
    setting = Tail(**{name: getattr(options, name) for name in names})
    parts = options.parts.split(",")
    result: dict[str, Any] = {
        "setting": {**asdict(setting), "ratio": options.ratio, "seeds": options.seeds}
    }
    if "gain" in parts:
        result["gain"] = rows = mean_gains(setting, options.seeds, MODES, options.ratio)
        print(
            "wall time over the synchronous loop's (over seeds), share in which the trainer is "
            "busy, largest staleness,"
        )
        print("share of answers that an update went through")
        for name, row in rows.items():
            print(
                f"  {name:28} {row['over_synchronous']:.3f} ({row['smallest']:.3f} to "
                f"{row['largest']:.3f})  {row['trainer_busy']:.2f}  {row['staleness_max']:.0f}  "
                f"{row['several_versions']:.2f}",
                flush=True,
            )
    if "tails" in parts:
        print("the same by sigma: " + ", ".join(mode.name for mode in COMPARED))
        result["tails"] = {}
        for sigma in map(float, options.tails.split(",")):
            rows = mean_gains(replace(setting, sigma=sigma), options.seeds, COMPARED, options.ratio)
            result["tails"][str(sigma)] = {
                name: row["over_synchronous"] for name, row in rows.items()
            }
            print(
                f"  {sigma:.2f}  "
                + "  ".join(f"{row['over_synchronous']:.3f}" for row in rows.values()),
                flush=True,
            )
    if "scale" in parts:
        print(
            f"CPU of the scheduling code per group of 2 samples, least of {options.repeats}: a "
            "minute each",
            flush=True,
        )
        result["scale"] = scheduling_costs(
            [int(engines) for engines in options.scales.split(",")], options.repeats
        )
        for row in result["scale"]:
            print(
                f"  {row['engines']:5} engines, {row['under_way']:6.0f} groups under way: "
                f"{row['microseconds_per_group']:.0f} microseconds"
            )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
