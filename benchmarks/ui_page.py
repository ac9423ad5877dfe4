"""How long ``slime ui`` takes to show a long run in headless Chromium.

    python benchmarks/ui_page.py                                   # 10,000 steps with 100,000 samples of 2 kB
    python benchmarks/ui_page.py --steps 1000 --each 100

The run is generated in a temporary folder; its time does not count. The command is then started
twice, as a user would:
with an empty index, and again with the index of the first time. Figures are wall seconds:
``serves`` until the command prints its address, ``overview`` from then until the first view is
drawn, and those of other views from the click on. Needs Debian's Chromium (``apt-get install
chromium``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
from tests.plugins.tools.ui.browser import Browser, chromium  # noqa: E402

METRICS = 40
PROMPTS = 500
GROUP = 5
READY_SECONDS = 300.0


def main() -> None:
    options = parse()
    if chromium() is None:
        sys.exit("Chromium is not installed: apt-get install chromium")
    with tempfile.TemporaryDirectory(prefix="slime-ui-page-") as name:
        folder = Path(name) / "long"
        size = write_run(folder, options.steps, options.each, options.characters)
        cache, samples = Path(name) / "cache", options.steps * options.each
        result: dict[str, object] = {
            "steps": options.steps, "samples": samples, "sample_bytes": options.characters,
            "megabytes": round(size / 1e6), "cores": os.cpu_count(),
        }  # fmt: skip
        result["empty_index"] = asyncio.run(
            measure(folder, samples, cache, Path(name) / "profile-1")
        )
        result["with_index"] = asyncio.run(
            measure(folder, samples, cache, Path(name) / "profile-2")
        )
        result["index_megabytes"] = round(
            sum(file.stat().st_size for file in cache.rglob("*.sqlite")) / 1e6
        )
    print(json.dumps(result))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=10_000, help="training steps of the generated run"
    )
    parser.add_argument("--each", type=int, default=10, help="samples of each step")
    parser.add_argument("--characters", type=int, default=2000, help="characters of each response")
    return parser.parse_args()


def write_run(folder: Path, steps: int, each: int, characters: int) -> int:
    """Write a run with texts and metrics, as a run does; returns the bytes of its files."""
    from slime.observability.run_state import StateFile

    rng = random.Random(0)
    (folder / "samples").mkdir(parents=True)
    (folder / "config.yaml").write_text(
        f"rollout_batch_size: {each // GROUP}\nn_samples_per_prompt: {GROUP}\n"
    )
    text = "".join(rng.choices("abcdefghij ", k=characters))
    names = [f"train/metric_{number}" for number in range(METRICS)]
    with (folder / "metrics.jsonl").open("w") as metrics:
        for step in range(steps):
            row = {"rollout/step": step, "time": 1e9 + step, "rollout/raw_reward": step / steps}
            metrics.write(json.dumps(row | {name: rng.random() for name in names}) + "\n")
            lines = []
            for number in range(each):
                prompt = f"What is {rng.randrange(PROMPTS)} times 7?"
                lines.append(json.dumps({
                    "index": step * each + number, "group_index": (step * each + number) // GROUP, "prompt": prompt,
                    "response": text[number:], "label": "7", "reward": rng.random(), "status": "completed",
                    "response_length": rng.randrange(9, 900), "version_spans": [[f"0.{step}", 0, 9]],
                }))  # fmt: skip
            (folder / "samples" / f"rollout_{step:06d}.jsonl").write_text("\n".join(lines) + "\n")
    StateFile(folder).end("completed")
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


async def measure(folder: Path, samples: int, cache: Path, profile: Path) -> dict[str, float]:
    """Start the command, open its views one after the other, and return seconds by name."""
    seconds: dict[str, float] = {}

    async def timed(name: str, action: Awaitable[object]) -> None:
        start = time.monotonic()
        await action
        seconds[name] = round(time.monotonic() - start, 2)

    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "slime.cli.main", "ui", str(folder)]
    async with Browser(profile) as browser:
        await browser.size(1280, 800)
        start = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[-1]
            seconds["serves"] = round(time.monotonic() - start, 2)

            async def opened(view: str, wanted: str) -> None:
                await browser.run(f"location.hash = '#/{view}'")
                await browser.view(view)
                await browser.until(wanted)

            async def first() -> None:
                await browser.open(address)
                await browser.view("overview/long")
                await browser.until("document.querySelectorAll('.chart canvas').length > 0")

            middle = int(len(list((folder / "samples").iterdir())) / 2)
            await timed("overview", first())
            await timed(
                "step",
                opened(
                    f"step/long/{middle}", "document.querySelector('#groups tbody tr') !== null"
                ),
            )
            await timed(
                "sample",
                opened(
                    f"sample/long/rollout/{middle}/3",
                    "document.querySelector('.turn.made') !== null",
                ),
            )
            await timed(
                "curves",
                opened("curves/long", "document.querySelectorAll('.chart canvas').length > 5"),
            )
            known = (
                "fetch('/api/run/long/overview').then((a) => a.json()).then((run) => run.samples)"
            )
            await browser.until(f"{known}.then((n) => n === {samples})", READY_SECONDS)
            seconds["index_complete"] = round(time.monotonic() - start, 2)
            await timed(
                "prompts",
                opened("prompts/long", "document.querySelector('#prompts tbody tr') !== null"),
            )
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)
    return seconds


if __name__ == "__main__":
    main()
