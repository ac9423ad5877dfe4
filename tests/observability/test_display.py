"""What the user sees, on a terminal and in a file, and what a run leaves at its end."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from make_args import make_args
from rich.console import Console

from slime.observability import progress
from slime.observability.display import Display, Phase, sparkline
from slime.observability.evaluations import evaluation_table, figures
from slime.observability.metrics import MetricsError, MetricsLogger
from slime.observability.progress import Timers
from slime.observability.run_dir import RunDir
from slime.plugins.tools.summary.charts import bar_chart, reward_curve, reward_curve_png
from slime.plugins.tools.summary.figures import print_summary, summarize


def finished_run(tmp_path: Path, rollouts: int = 3) -> RunDir:
    """Rows as the driver writes them: evaluation before, a row a step, evaluation before the last row."""
    args = make_args().with_values(output_dir=str(tmp_path), run_name="r", rollout_seed=7, seed=1)
    run = RunDir.create(args)
    log = MetricsLogger(args, run)
    log.log({"eval/products": 0.25, "eval/products-truncated_ratio": 0.5, "perf/eval_time": 2.0}, 0, "eval/step")
    for i in range(rollouts):
        if i == rollouts - 1:
            log.log(
                {"eval/products": 0.75, "eval/products/response_len": 9, "perf/eval_time": 3.0}, rollouts, "eval/step"
            )
        times = {"perf/rollout_time": 4.0, "perf/train_time": 5.0, "perf/eval_time": 5.0 / rollouts}
        log.log({"rollout/raw_reward": 0.2 + 0.1 * i, "rollout/rewards": 0.0, **times}, i)
    log.close()
    return run


def test_figures_come_from_the_rows(tmp_path: Path) -> None:
    summary = summarize(finished_run(tmp_path), seconds_total=40.0)
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.25, 0.75)
    assert summary["reward_per_rollout"] == pytest.approx([0.2, 0.3, 0.4])
    assert summary["eval"] == {"products": {"steps": [0, 3], "values": [0.25, 0.75]}}
    assert summary["seed"] == 7 and summary["num_rollouts"] == 3 and summary["seconds_total"] == 40.0
    assert summary["seconds_per_phase"] == {"rollout": 12.0, "train": 15.0, "eval": 5.0, "start_and_rest": 8.0}


def test_a_folder_without_rows_is_named(tmp_path: Path) -> None:
    with pytest.raises(MetricsError, match="is not the folder of a run"):
        summarize(RunDir(tmp_path))
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(MetricsError, match="no rows"):
        summarize(RunDir(tmp_path))


def test_a_run_without_a_step_has_no_summary(tmp_path: Path) -> None:
    """``--num-rollout 0`` starts everything, and ends in order."""
    run = RunDir.create(make_args().with_values(output_dir=str(tmp_path), run_name="r"))
    run.metrics.touch()
    Display(run, Console(file=io.StringIO())).finish()
    assert not run.summary.exists()


def test_finish_prints_the_table_and_leaves_json_and_picture(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    out = io.StringIO()
    Display(run, Console(file=out, width=100)).finish()
    assert json.loads(run.summary.read_text())["num_rollouts"] == 3
    text = out.getvalue()
    assert re.search(r"products\s+0\.250\s+0\.750\s+\+0\.500", text)
    assert "0.200 → 0.400" in text and "█" in text
    assert re.search(r"train\s+15\.0", text) and "tensorboard --logdir" in text
    assert json.loads(run.summary.read_text())["accuracy_after"] == 0.75
    assert run.reward_curve.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


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
    assert lines[0].split() == ["rollout", "0.0", "s", "8/8", "reward", "0.5", "·", "100", "tokens/s"]
    assert lines[1].split() == ["sync", "0.0", "s"], "a count that was left behind is not shown"
    assert (
        lines[2].startswith("step 1/12  reward 0.500") and "loss 0.25 " in lines[2] and "rollout 0.0 + sync" in lines[2]
    )
    assert set(times) == {"perf/rollout_time", "perf/update_weights_time"}
    assert display.pop_times() == {} and display.finish() is None


def test_a_step_line_tells_its_whole_time_and_every_long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("slime.observability.progress.time.perf_counter", lambda: now)
    out = io.StringIO()
    display = Display(None, Console(file=out, width=200))
    for name, seconds in (("rollout", 0.0), ("train", 9.0), ("drain", 5.0), ("update_weights", 0.2), ("audit", 0.1)):
        with display.phase(name):
            now += seconds
    display.step_line(0, 2, {"perf/step_time": 14.6}, display.pop_times())
    assert out.getvalue().splitlines()[-1].endswith("14.6 s (rollout 0.0 + train 9.0 + drain 5.0 + sync 0.2)")


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
    phase.update({"phase": "generate", "done": 8, "total": 8, "updated": before, "numbers": {"reward": 0.5}})
    assert phase.counts() == "" and phase.numbers() == ""


def test_progress_counts_its_time_from_the_first_report_of_a_phase_and_anew_when_it_begins_again() -> None:
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
    for said in (None, {}, {"done": 0, "total": 0, "numbers": None}, {"phase": None, "numbers": {"tokens": 0}}):
        phase.update(said)
        assert phase.line().strip().startswith("x")
        Console(file=io.StringIO()).print(phase)


def test_markup_in_texts_is_shown_as_typed() -> None:
    out = io.StringIO()
    display = Display(None, Console(file=out, width=80, soft_wrap=True))
    display.samples(["[bold]x[/bold] [/oops] :smile:"])
    display.note("[1, 2]")
    display.eval_line(3, {"eval/a": 0.5, "eval/a/len": 3, "eval/a-truncated_ratio": 0.7, "eval/step": 3})
    assert out.getvalue().splitlines() == ["    [bold]x[/bold] [/oops] :smile:", "[1, 2]", "eval at 3  a 0.500"]


def test_several_data_sets_are_a_table() -> None:
    out = io.StringIO()
    display = Display(None, Console(file=out, width=100, soft_wrap=True))
    metrics = {"eval/a": 0.5, "eval/a-mean@4": 0.5, "eval/a-pass@1": 0.5, "eval/a-pass@4": 0.75, "eval/step": 3}
    metrics |= {"eval/b-2": 0.25, "eval/b-2/response_len/mean": 7, "eval/b-2-truncated_ratio": 0.5}
    display.eval_line(3, {**metrics, "eval/b-2-reward_missing_count": 1.0})
    header, a, b = (line.split() for line in out.getvalue().splitlines())
    assert header == ["eval", "at", "3", "reward", "pass@1", "pass@4", "cut", "length", "no", "answer"]
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


def test_bars() -> None:
    assert bar_chart([0.0, 0.5, 1.0], height=2, width=9) == [" 1.00 ┤       ██", " 0.00 ┤    ██ ██"]
    assert bar_chart([]) == []
    rows = bar_chart([float(i) for i in range(500)], width=40)
    assert len(rows) == 6 and max(map(len, rows)) <= 48 and rows[0].startswith("487")
    assert all(character.isascii() for line in bar_chart([0.1, -0.2], ascii_only=True) for character in line)
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█" and sparkline([]) == ""


def test_a_picture_of_a_run_without_evaluation(tmp_path: Path) -> None:
    summary = {"run": "r", "num_rollouts": 2, "seconds_total": 3.0, "reward_per_rollout": [-1.0, 2.0], "eval": {},
               "seconds_per_phase": {}}  # fmt: skip
    assert reward_curve_png(tmp_path / "a" / "b.png", summary).stat().st_size > 5000


def test_the_evaluations_table_fits_and_counts_missing_verdicts_only_where_there_are_some() -> None:
    row = {"reward": 0.5, **{f"pass@{k}": 0.5 for k in (1, 2, 4, 8)}, "truncated_ratio": 0.3, "response_len/mean": 9.0}

    def lines(width: int = 80, **more: float) -> list[str]:
        out = io.StringIO()
        Console(file=out, width=width).print(evaluation_table(12, {"difference": row | more, "sum": row}))
        return [line.rstrip() for line in out.getvalue().splitlines()]

    whole = lines()
    assert len(whole) == 3 and whole[0].split()[:3] == ["eval", "at", "12"] and whole[0].endswith("length")
    counted = lines(reward_missing_count=2.0)
    assert counted[-2].endswith(" 2") and "answer" in counted[-3]
    narrow = lines(60, reward_missing_count=2.0)  # headings wrap, but for the first column's
    assert any(line.startswith("eval at 12 ") for line in narrow) and narrow[-2].startswith("difference ")


def test_a_notebook_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True)  # as the standard output of a notebook says
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    display = Display()
    with display.phase("train"):
        pass
    display.step_line(0, 2, {"rollout/raw_reward": 0.5}, {})
    assert re.fullmatch(r"  train +\d+\.\d s\nstep 1/2  reward 0\.500 .\n", out.getvalue()), repr(out.getvalue())


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


@pytest.mark.parametrize("how", ["a full disk", "a pipe without a reader", "no stdout", "ascii"])
def test_output_that_cannot_be_written_does_not_end_the_run(how: str) -> None:
    """Ctrl-C ends the ``tee`` of ``train.py | tee FILE`` as well, before the run has saved its snapshot."""
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


def written_run(folder: Path, *rows: dict[str, float]) -> RunDir:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunDir(folder)


def step_row(step: int, time: float) -> dict[str, float]:
    times = {"perf/rollout_time": 90.0, "perf/step_time": 100.0}
    return {"rollout/step": step, "time": time, "rollout/raw_reward": 0.5, **times}


def test_the_phases_of_a_resumed_run_are_shares_of_the_time_of_all_attempts(tmp_path: Path) -> None:
    run = written_run(tmp_path / "r", *(step_row(i, 1000.0 + 100 * i) for i in range(9)), step_row(9, 9000.0))
    summary = summarize(run, seconds_total=120.0, since=8000.0)
    assert summary["seconds_total"] == 9 * 100 + 120
    assert summary["seconds_per_phase"] == {"rollout": 900.0, "start_and_rest": 120.0}
    run.summary.write_text(json.dumps({"seconds_total": 250.0}))  # of the first attempt; the second one was killed
    assert summarize(run)["seconds_total"] == 1000.0


def test_one_row_is_enough_for_the_time_of_a_run(tmp_path: Path) -> None:
    out = io.StringIO()
    run = written_run(tmp_path / "r", step_row(0, 1000.0))
    print_summary(run, summarize(run), Console(file=out, width=100))
    assert re.search(r"rollout +90\.0 +90%", out.getvalue()), out.getvalue()


def test_names_in_brackets_are_no_styles(tmp_path: Path) -> None:
    out = io.StringIO()
    evaluation = {"eval/step": 1, "time": 2.0, "eval/aime[hard]": 0.5}
    run = written_run(tmp_path / "exp[lr1]", step_row(0, 1.0), evaluation)
    print_summary(run, summarize(run), Console(file=out, width=100))
    assert "run exp[lr1]" in out.getvalue() and "aime[hard]" in out.getvalue()


def test_the_name_of_a_data_set_may_have_slashes(tmp_path: Path) -> None:
    row = {"eval/math/l5": 0.5, "eval/math/l5/response_len/mean": 8.0, "eval/math/l5-pass@2": 0.75, "eval/math": 0.25,
           "eval/math/response_len/mean": 9.0, "eval/all_missing/response_len/mean": 7.0}  # fmt: skip
    assert figures(row) == {
        "math/l5": {"reward": 0.5, "response_len/mean": 8.0, "pass@2": 0.75},
        "math": {"reward": 0.25, "response_len/mean": 9.0},
        "all_missing": {"response_len/mean": 7.0},
    }
    run = written_run(tmp_path / "r", {"eval/step": 1, "time": 2.0, **row}, step_row(0, 3.0))
    assert summarize(run)["eval"] == {
        "math/l5": {"steps": [1], "values": [0.5]},
        "math": {"steps": [1], "values": [0.25]},
    }


def test_the_picture_has_all_evaluations_at_the_steps_of_the_run(tmp_path: Path) -> None:
    """Of a run that continues the snapshot of another one, the first reward is not that of the first rollout."""
    evaluations = {f"eval/{name}": 0.5 for name in "abcde"}
    rows = (step_row(100, 1.0), step_row(101, 2.0), {"eval/step": 102, "time": 3.0, **evaluations})
    axes = reward_curve(summarize(written_run(tmp_path / "r", *rows))).axes[0]
    assert list(axes.lines[0].get_xdata()) == [101, 102] and list(axes.lines[1].get_xdata()) == [102]
    labels = axes.get_legend_handles_labels()[1]
    assert labels == ["reward while training", *(f"evaluation: {name}" for name in "abcde")]


def test_dollar_signs_in_names_are_no_formulas(tmp_path: Path) -> None:
    """A formula that matplotlib cannot read would end a run whose steps are all done."""
    summary = summarize(finished_run(tmp_path), seconds_total=40.0)
    summary["run"], summary["eval"] = "a$_{b$c", {"$_{$": summary["eval"]["products"]}
    assert reward_curve_png(tmp_path / "curve.png", summary).stat().st_size > 0
    (title,) = [axes.get_title(loc="left") for axes in reward_curve(summary).axes[:1]]
    assert title.startswith(r"a\$_{b\$c: 3 rollouts")


def test_a_reward_that_is_no_number_does_not_end_the_run() -> None:
    """A logging function of the user may return one."""
    display = Display(None, Console(file=io.StringIO()))
    for reward in (0.5, float("nan"), float("inf"), 1.0):
        display.step_line(0, 1, {"rollout/raw_reward": reward}, {})
    assert sparkline(display.rewards) == "▅█"
