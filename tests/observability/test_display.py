"""What the user sees, on a terminal and in a file, and what a run leaves at its end."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from slime.observability import progress
from slime.observability.display import Display, Phase, sparkline
from slime.observability.metrics import evaluation_table
from slime.observability.progress import Timers


def test_a_file_gets_one_plain_line_a_phase_and_a_step(tmp_path: Path) -> None:
    out = io.StringIO()
    display = Display(None, Console(file=out, width=60, soft_wrap=True))
    with display.phase("rollout") as phase:
        now = time.time()
        phase.update({"phase": "generate", "done": 8, "total": 8, "since": now - 2, "updated": time.time(),
                      "numbers": {"tokens": 200, "reward": 0.5}})  # fmt: skip
    with display.phase("update_weights") as phase:
        phase.update({"done": 1, "total": 9})
    times = display.pop_times()
    display.step_line(0, 12, {"rollout/raw_reward": 0.5, "train/loss": 0.25}, times)
    lines = out.getvalue().splitlines()
    assert len(lines) == 3 and "\x1b" not in out.getvalue()
    assert lines[0].split() == [
        "rollout",
        "0.0",
        "s",
        "8/8",
        "reward",
        "0.5",
        "·",
        "100",
        "tokens/s",
    ]
    assert lines[1].split() == ["sync", "0.0", "s"], "a count that was left behind is not shown"
    assert (
        lines[2].startswith("step 1/12  reward 0.500")
        and "loss 0.25 " in lines[2]
        and "rollout 0.0 + sync" in lines[2]
    )
    assert set(times) == {"perf/rollout_time", "perf/update_weights_time"}
    learned = {"train/preference_accuracy": 0.75, "train/preference_margin": -0.125}
    display.step_line(1, 12, {**learned, "train/loss": 0.6931}, {})
    said = out.getvalue().splitlines()[-1]
    assert said == "step 2/12  accuracy 75%  margin -0.12  loss 0.693"
    assert display.pop_times() == {} and display.finish() is None


def test_a_step_line_tells_its_whole_time_and_every_long_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("slime.observability.progress.time.perf_counter", lambda: now)
    out = io.StringIO()
    display = Display(None, Console(file=out, width=200))
    for name, seconds in (
        ("rollout", 0.0),
        ("train", 9.0),
        ("drain", 5.0),
        ("update_weights", 0.2),
        ("audit", 0.1),
    ):
        with display.phase(name):
            now += seconds
    display.step_line(0, 2, {"perf/step_time": 14.6}, display.pop_times())
    assert (
        out.getvalue()
        .splitlines()[-1]
        .endswith("14.6 s (rollout 0.0 + train 9.0 + drain 5.0 + sync 0.2)")
    )


def test_a_terminal_gets_a_live_line_that_goes_away_also_after_an_error() -> None:
    out = io.StringIO()
    display = Display(None, Console(file=out, width=80, force_terminal=True))
    with pytest.raises(RuntimeError), display.phase("train"), display.phase("inner"):
        raise RuntimeError
    text = out.getvalue()
    assert "train" in text and "inner" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") > 0, "the cursor is shown again"
    display.close()


def test_a_report_of_the_phase_before_is_left_aside() -> None:
    before = time.time() - 1
    phase = Phase("offload")
    phase.update(
        {"phase": "generate", "done": 8, "total": 8, "updated": before, "numbers": {"reward": 0.5}}
    )
    assert phase.counts() == "" and phase.numbers() == ""


def test_progress_counts_its_time_from_the_first_report_of_a_phase_and_anew_when_it_begins_again() -> (
    None
):
    progress.report("generate", 0, 8)
    first = progress.latest()["since"]
    progress.report("generate", 5, 8, tokens=100)
    assert progress.latest()["since"] == first and progress.latest()["numbers"] == {"tokens": 100}
    time.sleep(0.002)
    progress.report("generate", 0, 8)
    again = progress.latest()["since"]
    assert again > first
    progress.report("train")
    assert progress.latest()["since"] >= again and progress.latest()["phase"] == "train"


def test_odd_progress_does_not_hurt() -> None:
    phase = Phase("x")
    for said in (
        None,
        {},
        {"done": 0, "total": 0, "numbers": None},
        {"phase": None, "numbers": {"tokens": 0}},
    ):
        phase.update(said)
        assert phase.line().strip().startswith("x")
        Console(file=io.StringIO()).print(phase)


def test_markup_in_texts_is_shown_as_typed() -> None:
    out = io.StringIO()
    display = Display(None, Console(file=out, width=80, soft_wrap=True))
    display.samples(["[bold]x[/bold] [/oops] :smile:"])
    display.note("[1, 2]")
    display.eval_line(
        3, {"eval/a": 0.5, "eval/a/len": 3, "eval/a-truncated_ratio": 0.7, "eval/step": 3}
    )
    assert out.getvalue().splitlines() == [
        "    [bold]x[/bold] [/oops] :smile:",
        "[1, 2]",
        "eval at 3  a 0.500",
    ]


def test_several_data_sets_are_a_table() -> None:
    out = io.StringIO()
    display = Display(None, Console(file=out, width=100, soft_wrap=True))
    metrics = {
        "eval/a": 0.5,
        "eval/a-mean@4": 0.5,
        "eval/a-pass@1": 0.5,
        "eval/a-pass@4": 0.75,
        "eval/step": 3,
    }
    metrics |= {"eval/b-2": 0.25, "eval/b-2/response_len/mean": 7, "eval/b-2-truncated_ratio": 0.5}
    display.eval_line(3, {**metrics, "eval/b-2-reward_missing_count": 1.0})
    header, a, b = (line.split() for line in out.getvalue().splitlines())
    assert header == [
        "eval",
        "at",
        "3",
        "reward",
        "pass@1",
        "pass@4",
        "cut",
        "length",
        "no",
        "answer",
    ]
    assert a == ["a", "0.500", "0.500", "0.750"]
    assert b == ["b-2", "0.250", "50%", "7.0", "1"]


def test_timers_add_up_and_keep_spans() -> None:
    timers = Timers()
    with pytest.raises(ValueError), timers("train"):
        raise ValueError
    timers.add("train", 2.0, started=100.0)
    times = timers.pop()
    assert times["perf/train_time"] >= 2.0 and timers.pop() == {}
    assert timers.pop_spans()[-1] == {"name": "train", "start": 100.0, "end": 102.0}


def test_the_evaluations_table_fits_and_counts_missing_verdicts_only_where_there_are_some() -> None:
    row = {
        "reward": 0.5,
        **{f"pass@{k}": 0.5 for k in (1, 2, 4, 8)},
        "truncated_ratio": 0.3,
        "response_len/mean": 9.0,
    }

    def lines(width: int = 80, **more: float) -> list[str]:
        out = io.StringIO()
        Console(file=out, width=width).print(
            evaluation_table(12, {"difference": row | more, "sum": row})
        )
        return [line.rstrip() for line in out.getvalue().splitlines()]

    whole = lines()
    assert (
        len(whole) == 3
        and whole[0].split()[:3] == ["eval", "at", "12"]
        and whole[0].endswith("length")
    )
    counted = lines(reward_missing_count=2.0)
    assert counted[-2].endswith(" 2") and "answer" in counted[-3]
    narrow = lines(60, reward_missing_count=2.0)  # headings wrap, but for the first column's
    assert any(line.startswith("eval at 12 ") for line in narrow) and narrow[-2].startswith(
        "difference "
    )


def test_a_notebook_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True)  # as the standard output of a notebook says
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    display = Display()
    with display.phase("train"):
        pass
    display.step_line(0, 2, {"rollout/raw_reward": 0.5}, {})
    assert re.fullmatch(r"  train +\d+\.\d s\nstep 1/2  reward 0\.500 .\n", out.getvalue()), repr(
        out.getvalue()
    )


TALK = """
import sys
from slime.observability.display import Display, sparkline

sys.stdin.readline()
display = Display()
display.step_line(0, 2, {"rollout/raw_reward": 0.5}, {"perf/train_time": 1.0})
display.samples(["\u7b54\u6848"])
with display.phase("save_model"):
    pass
print("saved", file=sys.stderr)
sys.exit(130)
"""


@pytest.mark.real
@pytest.mark.parametrize("how", ["a full disk", "a pipe without a reader", "no stdout", "ascii"])
def test_output_that_cannot_be_written_does_not_end_the_run(how: str) -> None:
    """Ctrl-C ends the ``tee`` of ``train.py | tee FILE`` as well, before the run has saved its
    snapshot.
    """
    command = ["bash", "-c", 'exec "$@" >&-', "bash"] if how == "no stdout" else []
    full = open("/dev/full", "w") if how == "a full disk" else None  # noqa: SIM115
    process = subprocess.Popen(
        [*command, sys.executable, "-c", TALK],
        stdin=subprocess.PIPE, stdout=full or subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii" if how == "ascii" else "utf-8"},
    )  # fmt: skip
    if how == "a pipe without a reader":
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
    said, complained = process.communicate("go\n", timeout=60)
    assert process.returncode == 130 and complained == "saved\n"
    if how == "ascii":
        assert "reward 0.500 ?" in said and "??" in said
    if full is not None:
        full.close()


def test_a_reward_that_is_no_number_does_not_end_the_run() -> None:
    """A logging function of the user may return one."""
    display = Display(None, Console(file=io.StringIO()))
    for reward in (0.5, float("nan"), float("inf"), 1.0):
        display.step_line(0, 1, {"rollout/raw_reward": reward}, {})
    assert sparkline(display.rewards) == "▅█"
