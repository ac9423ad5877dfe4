"""A click path through every view in headless Chromium, at the width of a desktop and of a
phone.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from slime.observability.files import replacing
from slime.observability.progress import Span
from slime.observability.trace_file import Load, load_events, phase_events, trace_of
from slime.plugins.tools.summary import read_trace
from slime.plugins.tools.ui import Limits, export
from slime.plugins.tools.ui.runs import Refresher, Runs
from tests.plugins.tools.ui.browser import Browser, chromium, film
from tests.plugins.tools.ui.test_server import served

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        chromium() is None, reason="Chromium is not installed (apt-get install chromium)"
    ),
]
PICTURES = Path(os.environ["SLIME_UI_PICTURES"]) if "SLIME_UI_PICTURES" in os.environ else None
HOSTILE = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">"


def make_hostile(folder: Path) -> None:
    """Plant HTML in every text of a sample, of the run's state and of its logs."""
    path = folder / "samples" / "rollout_000001.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[:4]:
        row.update(
            response=HOSTILE,
            prompt=HOSTILE,
            label=HOSTILE,
            status=HOSTILE,
            metadata={HOSTILE: HOSTILE},
        )
    with replacing(path) as temporary:  # as a run does
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "status": "failed", "error": HOSTILE}))
    (folder / "logs" / "engine-0.log").write_text(HOSTILE)


def plant_processes(folder: Path) -> None:
    """Add two training ranks and two engines, which the recorded run is too old to have, to its
    trace and its load.
    """
    path = trace_of(folder, 1)
    events = read_trace(path)
    start = min(event["ts"] for event in events if event["ph"] == "X") / 1e6
    ranks = [
        Span(
            name="actor_train", start=start + 8 + rank, end=start + 14, process=f"actor rank {rank}"
        )
        for rank in (0, 1)
    ]
    loads = [
        Load(time=start + second, engine=engine, state="serving", running=running, waiting=1, tokens=9)
        for engine in (0, 1) for second in range(24) for running in [max(8 - (2 - engine) * second, 0)]
    ]  # fmt: skip
    added = [*phase_events(ranks), *load_events(loads)]
    with replacing(path) as temporary:
        temporary.write_bytes(
            gzip.compress(json.dumps({"traceEvents": [*events, *added]}).encode())
        )
    rows = [
        {"time": one["time"], "engines": [[one["engine"], "serving", one["running"], 1, 9]]}
        for one in loads
    ]
    rows.append({"time": start + 30, "engines": [[1, "lost", None, None, None]]})
    (folder / "engines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def add_other_run(folder: Path) -> None:
    """Copy the run to an older one with higher norms of the gradient; the page opens the newest."""
    other = Path(shutil.copytree(folder, folder.with_name("other")))
    metrics = other / "metrics.jsonl"
    metrics.write_text(re.sub(r'("train/grad_norm": )(\d)', r"\g<1>10\2", metrics.read_text()))
    os.utime(metrics, (0, 0))


PIXELS = """[...document.querySelectorAll('.chart canvas')].reduce((count, canvas) => {
    const probe = document.body.appendChild(document.createElement('i'));
    probe.style.color = 'var(COLOUR)';
    const [red, green, blue] = getComputedStyle(probe).color.match(/\\d+/g).map(Number);
    probe.remove();
    const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    for (let i = 0; i < data.length; i += 4)
        count += data[i] === red && data[i + 1] === green && data[i + 2] === blue && data[i + 3] === 255;
    return count;
}, 0)"""


async def unharmed(browser: Browser) -> None:
    """Nothing of a run became HTML, nothing failed in the page, and nothing is wider than the
    window.
    """
    assert await browser.run(
        "document.title !== 'owned' && !document.querySelector('main script, main img')"
    )
    assert not browser.errors
    assert not await browser.run(
        "/\\b(null|undefined|NaN)\\b/.test(document.querySelector('main').innerText)"
    )
    wide = (
        "[...document.querySelectorAll('body *')].filter((e) => e.getBoundingClientRect().right "
        "> innerWidth + 1 && !e.closest('.scroll, nav, pre')).map((e) => e.outerHTML.slice(0, "
        "200))"
    )  # fmt: skip
    assert await browser.run(wide) == []
    if PICTURES is not None:  # a recording of the click path
        PICTURES.mkdir(parents=True, exist_ok=True)
        view = str(await browser.run("document.body.dataset.ready.split('/')[0]"))
        await browser.picture(
            PICTURES / f"{len(list(PICTURES.iterdir())):03d}_{view}.png", whole=True
        )


async def walk(browser: Browser) -> None:
    """Go through all views by clicks, as a reader would."""
    await browser.view("overview/tiny")
    assert "slime doctor" in await browser.text("main")
    await browser.until("document.querySelectorAll('.chart canvas').length > 3")
    assert HOSTILE in await browser.text("main")
    await unharmed(browser)

    await browser.click("nav a[href='#/curves/tiny']")
    await browser.view("curves/tiny")
    await browser.until("document.querySelectorAll('.chart canvas').length > 10")
    await browser.enter("#find", "grad_norm")
    await browser.until("document.querySelectorAll('.chart').length === 1")
    await browser.enter("#smoothing", "0.9")
    await browser.until("document.querySelector('.u-legend')?.textContent.includes('(raw)')")
    assert await browser.run(PIXELS.replace("COLOUR", "--c2")) == 0
    await browser.click("input[name=compare][value=other]")
    await browser.until("document.querySelector('.u-legend')?.textContent.includes('other (raw)')")
    labels = await browser.run(
        "[...document.querySelectorAll('.u-legend th')].map((one) => one.textContent)"
    )
    assert labels == ["step", "tiny (raw)", "tiny", "other (raw)", "other"]
    for colour in ("--c1", "--c2"):
        await browser.until(f"{PIXELS.replace('COLOUR', colour)} > 20")
    await unharmed(browser)

    await browser.click("nav a[href='#/step/tiny']")
    await browser.view("step/tiny")
    await browser.until("document.querySelectorAll('#timeline svg rect').length > 8")
    assert await browser.run("document.querySelector('#step').value") == "3"
    await browser.click("#before")
    await browser.view("step/tiny/2")
    await browser.click("#before")
    await browser.view("step/tiny/1")
    assert await browser.text("#count") == "5 of 5 groups"
    # The time line is drawn after the groups.
    who = "[...document.querySelectorAll('#timeline .who')].map((one) => one.textContent)"
    await browser.until(f"{who}.length >= 5")
    lanes = await browser.run(who)
    assert isinstance(lanes, list) and {
        "driver",
        "actor rank 0",
        "actor rank 1",
        "engine 0",
        "engine 1",
    } <= set(lanes)
    assert await browser.run("document.querySelectorAll('#timeline .running').length > 10")
    fill = "fill: var(--c2);"  # of the phase train, in every step
    assert await browser.run(
        f"document.querySelectorAll('#timeline rect[style=\"{fill}\"]').length > 0"
    )
    assert "rank worked" in await browser.text("#notes")
    await browser.enter("#filter-state", "trained")
    assert await browser.text("#count") == "2 of 5 groups"
    await browser.click("#groups th:nth-child(4) button")  # the reward
    assert (
        await browser.run("document.querySelector('#groups th:nth-child(4)').ariaSort")
        == "descending"
    )
    rewards = await browser.run(
        "[...document.querySelectorAll('#groups tbody tr')].map((row) => +row.cells[3].textContent)"
    )
    assert isinstance(rewards, list) and rewards == sorted(rewards, reverse=True)
    await unharmed(browser)

    await browser.click("#groups a.chip")
    await browser.view("sample/tiny/rollout/1/")
    await browser.until("document.querySelector('#tokens') !== null")
    await browser.click("#tokens [data-i='30']")
    assert "rollout_log_probs" in await browser.text("#token")
    for name in ("advantages", "version", "loss_masks", "gap"):
        await browser.enter("#colour", name)
        await browser.until("document.querySelector('#legend').textContent !== ''")
    await unharmed(browser)

    await browser.click("#to-prompt")
    await browser.view("prompt/tiny/")
    await browser.until("document.querySelectorAll('#samples tbody tr').length >= 4")
    await unharmed(browser)
    await browser.click("nav a[href='#/prompts/tiny']")
    await browser.view("prompts/tiny")
    assert HOSTILE in await browser.text("#prompts")
    await unharmed(browser)

    await browser.click("nav a[href='#/evaluations/tiny']")
    await browser.view("evaluations/tiny")
    await browser.click("#compared button.link")
    await browser.until("document.querySelectorAll('#pair .text').length === 2")
    await unharmed(browser)

    await browser.click("nav a[href='#/ledger/tiny']")
    await browser.view("ledger/tiny")
    assert "consistent" in await browser.text("#balance")
    await unharmed(browser)
    await browser.click("nav a[href='#/engines/tiny']")
    await browser.view("engines/tiny")
    assert "lost" in await browser.text("#loads")
    assert HOSTILE in await browser.text("main")
    await unharmed(browser)


async def test_a_click_path_through_all_views(runs: Runs, folder: Path, tmp_path: Path) -> None:
    make_hostile(folder)
    add_other_run(folder)
    plant_processes(folder)
    runs.find()
    runs.refresh()
    file = tmp_path / "run.html"
    file.write_text(export(runs, Limits()), encoding="utf-8")
    async with served(runs) as (address, _), Browser(tmp_path / "profile") as browser:
        for width, dark in ((1280, False), (390, True)):
            await browser.size(width, 800, dark)
            await browser.open("about:blank")
            await browser.open(f"{address}/")
            await walk(browser)
            if PICTURES is not None and width == 1280:
                film(sorted(PICTURES.glob("*.png")), PICTURES / "click_path.webp")
        await browser.open(file.as_uri())  # the same path in the file, which has no server
        await walk(browser)
        assert "Exported on" in await browser.text("footer")


async def test_ticks_have_as_many_digits_as_they_need(runs: Runs, tmp_path: Path) -> None:
    async with served(runs) as (address, _), Browser(tmp_path / "profile") as browser:
        await browser.open(f"{address}/#/engines/tiny")
        await browser.view("engines/tiny")
        for ticks, texts in (
            ([1e-8, 1.5e-8, 2e-8], ["1.0e-8", "1.5e-8", "2.0e-8"]),
            ([0, 20000, 40000], ["0", "20k", "40k"]),
            ([23.601, 23.602, 23.603], ["23.601", "23.602", "23.603"]),
            ([-0.5, 0, 0.5], ["-0.5", "0", "0.5"]),
            ([12400, 12450], ["12.40k", "12.45k"]),
        ):
            assert (
                await browser.run(f"import('slime/chart.js').then((one) => one.tickTexts({ticks}))")
                == texts
            )
        for steps, shown in (([0], [0, 1]), ([7], [6, 8]), ([2, 9], [2, 5]), ([], [0, 1])):
            asked = f"{{ data: [{steps}] }}, 2, 5"
            assert (
                await browser.run(f"import('slime/chart.js').then((one) => one.xRange({asked}))")
                == shown
            )
        last = "one.ticks(SECONDS, (x) => 9 * x, 50).at(-1).getAttribute('text-anchor')"
        last = f"import('slime/timeline.js').then((one) => {last})"
        assert await browser.run(last.replace("SECONDS", "100.5")) == "end", (
            "it would be cut off at the right edge"
        )
        assert await browser.run(last.replace("SECONDS", "109")) == "start"


async def test_the_page_follows_a_run(runs: Runs, folder: Path, tmp_path: Path) -> None:
    metrics = folder / "metrics.jsonl"
    state = json.loads((folder / "state.json").read_text())
    refresher = Refresher(runs, seconds=0.1)
    refresher.start()
    try:
        async with served(runs) as (address, _), Browser(tmp_path / "profile") as browser:
            await browser.size(1280, 800)
            await browser.open(f"{address}/#/overview/tiny")
            await browser.view("overview/tiny")
            assert "4 of 4 steps" in await browser.text("header")
            last = next(
                line
                for line in reversed(metrics.read_text().splitlines())
                if '"rollout/step": 3' in line
            )
            with metrics.open("a") as file:
                file.write(re.sub(r'"rollout/step": 3', '"rollout/step": 4', last) + "\n")
            waiting = {
                "status": "running",
                "host": "elsewhere",
                "waiting": "rollout 5 to be generated",
                "deadline": 60.0,
            }
            (folder / "state.json").write_text(json.dumps({**state, **waiting}))
            await browser.until(
                "document.querySelector('header')?.textContent.includes('5 of 4 steps')"
            )
            await browser.until(
                "document.querySelector('#waits')?.textContent.includes('rollout 5 to be "
                "generated')"
            )
            assert not browser.errors
    finally:
        refresher.stop()
