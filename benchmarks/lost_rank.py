"""Kill a training rank of a run, and measure the seconds from there to the end of the next step.

    python benchmarks/lost_rank.py --kills 3 -- --hf-checkpoint MODEL --prompt-data DATA.jsonl ...   (flags of train.py)
    python benchmarks/lost_rank.py --kills 3 --restart -- ...

With ``--restart``, the loop of the run stands in ``open_run``, as in scripts of users, so that the
whole run is restarted. The flags must lead to enough rollouts: four for each kill. The run needs
``--save`` and ``--save-interval 1``, and ends at the end of the measurement.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT))
APART = 3
"""Steps between two kills."""
DEADLINE_SECONDS = 600.0


def loop_that_restarts() -> None:
    """The driver of ``--restart``."""
    import train
    from slime.cluster.checks import parse_and_check
    from slime.cluster.run import open_run

    args = parse_and_check()
    with open_run(args) as run:
        train.loop(args, run)


def finished_steps(metrics: Path, after: float) -> int:
    """The number of steps that ended after a wall time."""
    from slime.observability.metrics import read_metrics

    rows = read_metrics(metrics) if metrics.exists() else []
    return sum("rollout/step" in row and row["time"] > after for row in rows)


def wait_for_steps(
    driver: subprocess.Popen[bytes], metrics: Path, count: int, after: float
) -> None:
    until = time.monotonic() + DEADLINE_SECONDS
    while finished_steps(metrics, after) < count:
        if driver.poll() is not None or time.monotonic() > until:
            raise SystemExit(
                f"the run ended or made no step for {DEADLINE_SECONDS:.0f} s (exit code "
                f"{driver.poll()})"
            )
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--restart", action="store_true")
    parser.add_argument("--output-dir", default="outputs")
    given, flags = parser.parse_known_args()
    name = "lost_rank_restart" if given.restart else "lost_rank"
    script = [str(Path(__file__).resolve())] if given.restart else [str(CHECKOUT / "train.py")]
    command = [
        sys.executable,
        *script,
        *(flag for flag in flags if flag != "--"),
        "--use-fault-tolerance",
    ]
    command += [
        "--max-restarts",
        str(given.kills),
        "--run-name",
        name,
        "--output-dir",
        given.output_dir,
    ]
    driver = subprocess.Popen(
        command, env={**os.environ, "SLIME_LOST_RANK": "1"}, stdout=subprocess.DEVNULL
    )
    metrics = Path(given.output_dir) / name / "metrics.jsonl"
    killed, seconds = 0.0, []
    try:
        for _ in range(given.kills):
            wait_for_steps(driver, metrics, APART, killed)
            ranks = [
                p
                for p in psutil.Process(driver.pid).children(recursive=True)
                if "ray::TrainActor" in p.name()
            ]
            killed = time.time()
            ranks[0].send_signal(signal.SIGKILL)
            wait_for_steps(driver, metrics, 1, killed)
            seconds.append(time.time() - killed)
            print(
                f"{name}: {seconds[-1]:.1f} s from the kill to the end of the next step", flush=True
            )
    finally:
        driver.send_signal(signal.SIGTERM)
        driver.wait()


if __name__ == "__main__":
    if "SLIME_LOST_RANK" in os.environ:
        loop_that_restarts()
    else:
        main()
