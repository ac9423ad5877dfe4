"""What the end of a run and ``slime summary`` show: figures, table and picture."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from make_args import make_args
from rich.console import Console

from slime.observability.display import Display, sparkline
from slime.observability.metrics import MetricsError, MetricsLogger, figures
from slime.observability.run_dir import RunDir
from slime.plugins.tools.summary.charts import bar_chart, reward_curve, reward_curve_png
from slime.plugins.tools.summary.figures import print_summary, summarize


def finished_run(tmp_path: Path, rollouts: int = 3) -> RunDir:
    """Rows as the driver writes them: evaluation before, a row a step, evaluation before the last
    row.
    """
    args = make_args().with_values(output_dir=str(tmp_path), run_name="r", rollout_seed=7, seed=1)
    run = RunDir.create(args)
    log = MetricsLogger(args, run)
    log.log(
        {"eval/products": 0.25, "eval/products-truncated_ratio": 0.5, "perf/eval_time": 2.0},
        0,
        "eval/step",
    )
    for i in range(rollouts):
        if i == rollouts - 1:
            log.log(
                {"eval/products": 0.75, "eval/products/response_len": 9, "perf/eval_time": 3.0},
                rollouts,
                "eval/step",
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
    assert (
        summary["seed"] == 7 and summary["num_rollouts"] == 3 and summary["seconds_total"] == 40.0
    )
    assert summary["seconds_per_phase"] == {
        "rollout": 12.0,
        "train": 15.0,
        "eval": 5.0,
        "start_and_rest": 8.0,
    }


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
    run = finished_run(tmp_path / "my runs")
    out = io.StringIO()
    Display(run, Console(file=out, width=200)).finish()
    assert json.loads(run.summary.read_text())["num_rollouts"] == 3
    text = out.getvalue()
    assert re.search(r"products\s+0\.250\s+0\.750\s+\+0\.500", text)
    assert "0.200 → 0.400" in text and "█" in text
    assert re.search(r"train\s+15\.0", text) and f"slime ui '{run.path}'" in text
    assert json.loads(run.summary.read_text())["accuracy_after"] == 0.75
    assert run.reward_curve.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_bars() -> None:
    assert bar_chart([0.0, 0.5, 1.0], height=2, width=9) == [" 1.00 ┤       ██", " 0.00 ┤    ██ ██"]
    assert bar_chart([]) == []
    for level in (0.0, -1.0):
        ends = [line.split()[0] for line in bar_chart([level, level])]
        assert (ends[0], ends[-1]) == ("1.00", f"{level:.2f}"), "the ends of an axis differ"
    rows = bar_chart([float(i) for i in range(500)], width=40)
    assert len(rows) == 6 and max(map(len, rows)) <= 48 and rows[0].startswith("487")
    assert all(
        character.isascii()
        for line in bar_chart([0.1, -0.2], ascii_only=True)
        for character in line
    )
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█" and sparkline([]) == ""


def test_a_picture_of_a_run_without_evaluation(tmp_path: Path) -> None:
    summary = {"run": "r", "num_rollouts": 2, "seconds_total": 3.0, "reward_per_rollout": [-1.0, 2.0], "eval": {},
               "seconds_per_phase": {}}  # fmt: skip
    assert reward_curve_png(tmp_path / "a" / "b.png", summary).stat().st_size > 5000


def written_run(folder: Path, *rows: dict[str, float]) -> RunDir:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunDir(folder)


def step_row(step: int, time: float) -> dict[str, float]:
    times = {"perf/rollout_time": 90.0, "perf/step_time": 100.0}
    return {"rollout/step": step, "time": time, "rollout/raw_reward": 0.5, **times}


def test_the_phases_of_a_resumed_run_are_shares_of_the_time_of_all_attempts(tmp_path: Path) -> None:
    run = written_run(
        tmp_path / "r", *(step_row(i, 1000.0 + 100 * i) for i in range(9)), step_row(9, 9000.0)
    )
    summary = summarize(run, seconds_total=120.0, since=8000.0)
    assert summary["seconds_total"] == 9 * 100 + 120
    assert summary["seconds_per_phase"] == {"rollout": 900.0, "start_and_rest": 120.0}
    # of the first attempt; the second one was killed
    run.summary.write_text(json.dumps({"seconds_total": 250.0}))
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
    """Of a run that continues the snapshot of another one, the first reward is not that of the
    first rollout.
    """
    evaluations = {f"eval/{name}": 0.5 for name in "abcde"}
    rows = (step_row(100, 1.0), step_row(101, 2.0), {"eval/step": 102, "time": 3.0, **evaluations})
    axes = reward_curve(summarize(written_run(tmp_path / "r", *rows))).axes[0]
    assert list(axes.lines[0].get_xdata()) == [101, 102] and list(axes.lines[1].get_xdata()) == [
        102
    ]
    labels = axes.get_legend_handles_labels()[1]
    assert labels == ["reward while training", *(f"evaluation: {name}" for name in "abcde")]


def test_dollar_signs_in_names_are_no_formulas(tmp_path: Path) -> None:
    """A formula that matplotlib cannot read would end a run whose steps are all done."""
    summary = summarize(finished_run(tmp_path), seconds_total=40.0)
    summary["run"], summary["eval"] = "a$_{b$c", {"$_{$": summary["eval"]["products"]}
    assert reward_curve_png(tmp_path / "curve.png", summary).stat().st_size > 0
    (title,) = [axes.get_title(loc="left") for axes in reward_curve(summary).axes[:1]]
    assert title.startswith(r"a\$_{b\$c: 3 rollouts")
