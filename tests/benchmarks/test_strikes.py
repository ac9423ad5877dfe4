"""The campaign of strikes: which cells there are, what is judged, and a run that is struck."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
import strike_cells
import strike_cover
import strike_results
import strikes
from strike_cells import Cell
from strikes import Campaign, Work

DRIVER = '''
"""A run of one process that makes steps, in the phases of the real one."""
import json
import os
import sys
from pathlib import Path

import strike_hooks

from slime.checkpoint.ledger import Ledger

steps = int(sys.argv[1])
out = Path("outputs/run")
out.mkdir(parents=True, exist_ok=True)
rows = out / "metrics.jsonl"
done = rows.read_text().count("\\n") if rows.exists() else 0
noise = 0.5 if Path("noisy").exists() else 0.0
for step in range(done, steps):
    for phase in ("generate", "reward", "train", "sync", "evaluation", "save"):
        strike_hooks.hold(strike_hooks.due(phase, step))
    weights = {"version": f"0.{step}", "digest": str(step), "dtype": None, "tensors": 1}
    row = {"rollout/step": step, "train/loss": step / 3 + noise, "perf/step_time": os.getpid()}
    for file, line in ((out / "weights.jsonl", weights), (rows, row)):
        with file.open("a") as lines:
            lines.write(json.dumps(line) + "\\n")
Ledger(out / "ledger.jsonl").cut(-1, -1)
strike_hooks.hold(strike_hooks.due("end", -1))
'''
PARENT = """
import subprocess
import sys

while (code := subprocess.call([sys.executable, *sys.argv[1:]])) == -9:
    print("lost the driver: going on from its last snapshot", flush=True)
sys.exit(code)
"""


class Small(Work):
    """Runs of one process, with a parent that starts it again."""

    def command(self, mode: strike_cells.Mode, steps: int, name: str) -> list[str]:
        return [
            sys.executable,
            str(self.folder / "parent.py"),
            str(self.folder / "train.py"),
            str(steps),
        ]


@pytest.fixture
def campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Campaign:
    (tmp_path / "train.py").write_text(DRIVER)
    (tmp_path / "parent.py").write_text(PARENT)
    monkeypatch.setenv("PYTHONPATH", str(strikes.HOOKS.parent))
    return Campaign(Small(tmp_path), tmp_path / "out.jsonl", deadline=60.0)


def cell(
    phase: str, target: str = "driver", signal: str = "SIGKILL", mode: str = "synchronous"
) -> Cell:
    return Cell(mode, target, phase, signal)


def test_every_cell_is_in_one_chain_in_the_order_of_time() -> None:
    cells = strike_cells.all_cells()
    assert len(cells) == len(set(cells)) == 6 * 10 * 8 * 2
    there = [cell for cell in cells if not strike_cells.absent(cell)]
    made = strike_cells.chains(there, 4)
    assert sorted(map(str, there)) == sorted(str(cell) for chain in made for cell in chain)
    for chain in made:
        assert len({cell.mode for cell in chain}) == 1
        assert [cell.phase for cell in chain if cell.phase in ("start", "end")] in (
            [],
            ["start"],
            ["end"],
            ["start", "end"],
        )
        middle = [cell for cell in chain if cell.phase in strike_cells.MIDDLE]
        assert len(middle) <= 4 and len({cell.target for cell in middle}) == len(middle)
        struck = [rollout for rollout in strike_cells.rollouts_of(chain) if rollout >= 0]
        assert (
            struck == sorted(set(struck))
            and strike_cells.steps_of(chain) > max(struck, default=-1) + 1
        )


def test_a_process_that_nothing_watches_is_frozen_last() -> None:
    frozen, killed = cell("reward", "GCS", "SIGSTOP"), cell("save", "engine")
    assert strike_cells.chains([frozen, killed, cell("end")], 5) == [[killed, frozen, cell("end")]]


def test_a_cover_has_each_pair_and_takes_little() -> None:
    cells = [cell for cell in strike_cells.all_cells() if cell.mode != strike_cells.WORKERS]
    taken = strike_cover.cover(cells, [])
    # Of 5 modes, 9 targets (no worker), 8 phases and 2 signals, verifiers have no start.
    parts = 5 * 9 + 5 * 8 + (9 * 8 - 1) + 9 * 2 + 8 * 2 + 5 * 8 * 2
    assert len(strike_cover.missing(cells, [])) == parts and not strike_cover.missing(cells, taken)
    assert 80 <= len(taken) <= 88  # each mode, phase and signal needs a cell
    assert taken == strike_cover.cover(cells, []) != strike_cover.cover(cells, [], seed=1)
    assert not any(strike_cells.absent(cell) for cell in taken)
    rest = strike_cover.cover(cells, taken[:60])
    assert len(rest) < 40 and not strike_cover.missing(cells, taken[:60] + rest)


def test_cells_of_the_output_are_skipped_and_samples_repeat() -> None:
    ask = argparse.Namespace(
        mode=["one-step"],
        only=["engine:*:SIGKILL", "router:end:*"],
        sample=None,
        cover=False,
        seed=0,
    )
    found = strikes.chosen(ask, [])
    assert len(found) == 10 and {cell.mode for cell in found} == {"one-step"}
    assert strikes.chosen(ask, found[:4]) == found[4:]
    ask.sample = 3
    drawn = strikes.chosen(ask, [])
    assert len(drawn) == 3 and drawn == strikes.chosen(ask, [])
    ask.only, ask.sample, ask.cover = None, None, True
    covering = strikes.chosen(ask, found)
    assert covering == strike_cover.cover(
        [cell for cell in strike_cells.all_cells() if cell.mode == "one-step"], found
    )


@pytest.mark.real
def test_a_run_goes_on_restarts_or_hangs(campaign: Campaign) -> None:
    """A killed driver comes back; one that is stopped for good hangs, which is no promised
    outcome.
    """
    campaign.strike([cell("train"), cell("save"), cell("end")])
    lines = strike_results.read_results(campaign.output)
    assert [values["outcome"] for values in lines.values()] == ["restarted"] * 3
    assert all(
        values["ok"] and values["equal"] and len(values["chain"]) == 2 for values in lines.values()
    )
    campaign.deadline = 5.0
    campaign.strike([cell("generate", signal="SIGSTOP"), cell("train", signal="SIGSTOP")])
    lines = strike_results.read_results(campaign.output)
    assert [(values["outcome"], values["ok"]) for values in lines.values()][3:] == [
        ("hung", False)
    ] * 2


def test_a_message_names_what_was_lost() -> None:
    assert strike_results.clear(
        "slime.ServerFailed: embedded engine 0 (pid 7) ended with status -9"
    )
    assert strike_results.clear("the actor's rank 0 did not answer for 30 s (--status-timeout)")
    assert not strike_results.clear("ray.exceptions.ActorUnavailableError: the actor was lost")
    assert strike_results.clear(
        "slime.ServerFailed: embedded engine 0 (pid 7) was not healthy after 100 s"
    )
    assert not strike_results.clear("KeyError: 3")


@pytest.mark.real
def test_a_chain_that_differs_is_struck_again_cell_by_cell(
    campaign: Campaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the run of the chain has other numbers, and those of single cells have not."""
    struck = strikes.StruckRun.strike_all

    def strike_all(run: strikes.StruckRun) -> None:
        if len(run.chain) > 1:
            (run.cwd / "noisy").touch()
        struck(run)

    monkeypatch.setattr(strikes.StruckRun, "strike_all", strike_all)
    campaign.strike([cell("train"), cell("save")])
    lines = strike_results.read_results(campaign.output).values()
    assert [(values["equal"], values["chain"]) for values in lines] == [(True, []), (True, [])]


def test_numbers_and_weights_are_compared_as_far_as_both_went(tmp_path: Path) -> None:
    def write(name: str, losses: list[float], digests: list[str]) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        rows = [
            {"rollout/step": i, "train/loss": loss, "perf/x": name} for i, loss in enumerate(losses)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sent = [
            {"version": f"0.{i}", "digest": one, "dtype": None, "tensors": 1}
            for i, one in enumerate(digests)
        ]
        (folder / "weights.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sent))
        return folder

    right = write("right", [1.0, 2.0, 3.0], ["a", "b", "c"])
    assert strike_results.differences(write("same", [1.0, 2.0], ["a", "b"]), right) == []
    assert strike_results.differences(write("loss", [1.0, 2.5], ["a", "b"]), right) == [
        "step 1: train/loss"
    ]
    assert strike_results.differences(write("weights", [1.0, 2.0], ["a", "x"]), right) == [
        "weights after 1 steps"
    ]


def test_the_table_shows_what_fell_short() -> None:
    good = {
        "outcome": "went on",
        "seconds": 3.2,
        "ok": True,
        "message": "",
        "date": "2026-01-02",
        "commit": "abc",
    }
    bad = {**good, "ok": False, "message": "differs: step 3"}
    none = {**good, "outcome": "absent"}
    results = {
        cell("train", "engine"): good,
        cell("save", "engine"): bad,
        cell("start", "worker"): none,
    }
    text = strike_results.table(results)
    assert "2 cells, 1" in text and "2026-01-02" in text
    (row,) = [line for line in text.splitlines() if line.startswith("| engine")]
    assert row == "| engine | went on 3 s | **went on 3 s: differs** |"
    assert "worker" not in text
