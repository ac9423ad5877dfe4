"""Take the pictures of docs/en/ui.md from three real runs, in headless Chromium.

    python tools/ui_pictures.py --runs outputs --record quickstart --model SMOLLM2_FOLDER     # some minutes each
    python tools/ui_pictures.py --runs outputs --record fully_async blackbox_agent --model SMOLLM2_FOLDER
    python tools/ui_pictures.py --runs outputs                                               # the pictures, seconds

The runs are those of scripts/quickstart.sh, examples/fully_async and examples/blackbox_agent with
the flags that the page asks for (dumps, two engines) and fewer samples. The pictures are written to
docs/images with a palette. Look at each of them before it is committed.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from slime.plugins.tools.commands.make_data import make_products  # noqa: E402
from slime.plugins.tools.ui.runs import Runs  # noqa: E402
from tests.plugins.tools.ui.browser import Browser  # noqa: E402
from tests.plugins.tools.ui.test_server import served  # noqa: E402

IMAGES = ROOT / "docs" / "images"
COLOURS = 128
COMMON = (
    "--rollout-shuffle", "--train-backend", "fsdp", "--rollout-backend", "embedded",
    "--use-dynamic-batch-size", "--max-tokens-per-gpu", 2048, "--n-samples-per-prompt", 8,
)  # fmt: skip
PRODUCTS = ("--apply-chat-template", "--rm-type", "last_number")
RECORDINGS: dict[str, tuple[str, tuple[object, ...]]] = {
    "quickstart": ("train.py", (
        *COMMON, *PRODUCTS, "--rollout-batch-size", 8, "--rollout-max-response-len", 20, "--num-rollout", 8,
        "--eval-interval", 4, "--n-samples-per-eval-prompt", 8, "--eval-temperature", 1,
        "--lr", 1e-5, "--train-dtype", "float32",
        "--save-debug-rollout-data", "{runs}/quickstart-dumps/{{rollout_id}}.pt",
        "--save", "{runs}/quickstart-snapshots", "--save-interval", 3,
    )),
    "fully_async": ("train_async.py", (
        *COMMON, *PRODUCTS, "--rollout-batch-size", 4, "--rollout-max-response-len", 24, "--num-rollout", 8,
        "--rollout-function-path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
        "--async-buffer-size", 2, "--update-weights-interval", 1, "--max-weight-staleness", 2, "--lr", 1e-5,
        "--rollout-num-gpus", 2, "--num-steps-per-rollout", 2, "--dump-details", "{runs}/fully_async-dumps",
    )),
    "blackbox_agent": ("train.py", (
        *COMMON, "--rollout-batch-size", 4, "--rollout-max-response-len", 160, "--num-rollout", 8, "--lr", 2e-5,
        "--agent-function-path", f"{ROOT}/examples/blackbox_agent/agent.py:run", "--log-multi-turn",
    )),
}  # fmt: skip
"""The script and the flags of each run."""


def record(name: str, runs: Path, model: Path) -> int:
    """Make one of the runs, and return the exit code of its command."""
    train, held_out = make_products(runs / "data", seed=1)
    script, flags = RECORDINGS[name]
    evaluated = ("--eval-prompt-data", "products", held_out) if "--eval-interval" in flags else ()
    words = [str(flag).format(runs=runs) for flag in flags]
    command = [
        sys.executable, str(ROOT / script), "--hf-checkpoint", model, "--prompt-data", train, *words, *evaluated,
        "--output-dir", runs, "--run-name", name,
    ]  # fmt: skip
    return subprocess.run([str(word) for word in command], check=False).returncode


async def take(runs: Runs, step: int, agent_step: int, profile: Path) -> None:
    """Walk through the views and take their pictures."""
    async with served(runs) as (address, _), Browser(profile) as browser:

        async def view(name: str, *parts: object, width: int = 1165, height: int = 700) -> None:
            await browser.size(width, height)
            # From an empty page, so that nothing of the last view (a filter, an order) is left.
            await browser.open("about:blank")
            await browser.open(f"{address}/#/" + "/".join(map(str, (name, *parts))))
            await browser.view("/".join(map(str, (name, *parts))))

        await view("overview", "fully_async", width=1150, height=1100)
        await browser.until("document.querySelector('#findings') !== null")
        await drawn(browser, 6)
        await save(browser, "overview", until=".grid")

        await view("curves", "fully_async", width=1150, height=1500)
        await browser.enter("#find", "train/")
        await browser.click("input[name=compare][value=quickstart]")
        await browser.until(
            "document.querySelector('.u-legend')?.textContent.includes('quickstart')"
        )
        await drawn(browser, 6)
        await save(browser, "curves", until=".grid > :nth-child(9)")

        await view("step", "fully_async", step)
        await browser.until("document.querySelectorAll('#timeline svg rect').length > 8")
        await save(browser, "step")

        await browser.click("#groups tbody tr:nth-child(2) a.chip:nth-child(4)")
        await browser.view(f"sample/fully_async/rollout/{step}/")
        await browser.until("document.querySelector('#tokens') !== null")
        await browser.click("#tokens .tok:not(.prompt):nth-last-child(6)")
        await save(browser, "sample")

        await view("engines", "fully_async")
        await drawn(browser, 3)
        await save(browser, "engines", until=".grid")

        await view("step", "blackbox_agent", agent_step)
        await browser.until("document.querySelectorAll('#timeline svg rect').length > 8")
        await save(browser, "agent")

        await view("evaluations", "quickstart")
        await browser.until("document.querySelectorAll('#compared tbody tr').length > 2")
        await drawn(browser, 1)
        await save(browser, "evaluations")
        assert not browser.errors, browser.errors


async def drawn(browser: Browser, charts: int) -> None:
    await browser.until(f"document.querySelectorAll('.chart canvas').length >= {charts}")
    await asyncio.sleep(0.5)  # the canvases are drawn in the next frames


async def save(browser: Browser, name: str, until: str | None = None) -> None:
    """Write the page as a picture with a palette.

    Args:
        until: The last element that the picture shows; by default all of the page's content.
    """
    # In a window as high as the page there is no scroll bar, without which the columns may be
    # others.
    size = await browser.run("[innerWidth, document.documentElement.scrollHeight]")
    assert isinstance(size, list)
    await browser.size(*size)
    await asyncio.sleep(0.5)  # charts are drawn again in their new width
    last = until or "main > :last-child"
    bottom = await browser.run(
        f"document.querySelector({last!r}).getBoundingClientRect().bottom + scrollY + 12"
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "whole.png"
        await browser.picture(file, whole=True)
        picture = Image.open(io.BytesIO(file.read_bytes())).convert("RGB")
    picture = picture.crop((0, 0, picture.width, min(picture.height, round(float(str(bottom))))))
    path = IMAGES / f"ui_{name}.png"
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(
        f"{path.relative_to(ROOT)}: {picture.width} x {picture.height}, "
        f"{path.stat().st_size / 1000:.0f} kB"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument(
        "--record", nargs="+", choices=list(RECORDINGS), default=[], help="make these runs instead"
    )
    parser.add_argument("--model", type=Path, help="a folder of SmolLM2-135M-Instruct")
    parser.add_argument(
        "--step", type=int, default=5, help="the step of the asynchronous run to show"
    )
    parser.add_argument(
        "--agent-step", type=int, default=5, help="the step of the agent's run to show"
    )
    options = parser.parse_args()
    options.runs = options.runs.resolve()
    if options.record and options.model is None:
        parser.error("--record needs --model")
    if options.record:
        return max(record(name, options.runs, options.model.resolve()) for name in options.record)
    with tempfile.TemporaryDirectory(prefix="slime-ui-pictures-") as folder:
        runs = Runs([options.runs / name for name in RECORDINGS], None)
        runs.refresh()
        asyncio.run(take(runs, options.step, options.agent_step, Path(folder) / "profile"))
        runs.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
