"""The sinks of the numbers: rows, TensorBoard events that its own reader reads, resume, and what is
refused.
"""

from __future__ import annotations

import json
import math
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_args import make_args
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from slime.observability import metrics
from slime.observability.metrics import MetricsError, MetricsLogger, read_metrics, roll_back
from slime.observability.run_dir import RunDir
from slime.observability.trackers import TrackerError
from slime.plugins.trackers import services


def logger(
    tmp_path: Path, resume_from: int | None = None, **flags: object
) -> tuple[MetricsLogger, RunDir]:
    args = make_args().with_values(output_dir=str(tmp_path), run_name="r", **flags)
    run = RunDir.create(args, resume=resume_from is not None)
    return MetricsLogger(args, run, resume_from), run


def test_a_row_has_step_time_and_numbers_of_every_kind(tmp_path: Path) -> None:
    log, run = logger(tmp_path)
    log.log({"train/loss": np.float32(0.5), "rollout/count": np.int64(3), "perf/x": 1}, 4)
    log.log({"eval/products": 0.25}, 5, "eval/step")
    log.close()
    first, second = read_metrics(run.metrics)
    assert first.pop("time") > 1.6e9
    assert first == {"rollout/step": 4, "train/loss": 0.5, "rollout/count": 3.0, "perf/x": 1.0}
    assert second["eval/step"] == 5 and second["eval/products"] == 0.25


def test_tensorboard_reads_the_same_numbers(tmp_path: Path) -> None:
    log, run = logger(tmp_path)
    for step in range(3):
        log.log({"rollout/raw_reward": step / 4}, step)
    log.close()
    events = EventAccumulator(str(run.tensorboard)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("rollout/raw_reward")] == [
        (0, 0.0),
        (1, 0.25),
        (2, 0.5),
    ]


# of TensorBoard's writer
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("tensorboard", [True, False])
def test_rows_wait_for_room_on_a_full_disk(
    tmp_path: Path,
    small_disk: Callable[[int], None],
    caplog: pytest.LogCaptureFixture,
    tensorboard: bool,
) -> None:
    log, run = logger(tmp_path, use_tensorboard=tensorboard)
    log.log({"rollout/raw_reward": 0.0}, 0)
    size, unlimited = run.metrics.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    small_disk(size + 7)  # a part of the next row
    for step in range(1, 300):
        log.log({"rollout/raw_reward": float(step)}, step)
    assert run.metrics.stat().st_size == size + 7
    small_disk(unlimited)
    log.log({"rollout/raw_reward": 300.0}, 300)
    log.close()
    log.close()
    assert [row["rollout/raw_reward"] for row in read_metrics(run.metrics)] == [
        float(step) for step in range(301)
    ]
    assert any("metrics.jsonl" in record.message for record in caplog.records)


def test_a_resumed_run_reads_as_one_that_was_never_interrupted(tmp_path: Path) -> None:
    log, run = logger(tmp_path)
    for step in range(5):
        log.log({"rollout/raw_reward": float(step)}, step)
    log.log({"eval/x": 0.5}, 2, "eval/step")
    log.log({"eval/x": 0.9}, 5, "eval/step")
    log.close()
    log, run = logger(tmp_path, resume_from=3)
    log.log({"rollout/raw_reward": 33.0}, 3)
    log.close()
    rewards = [
        (row["rollout/step"], row["rollout/raw_reward"])
        for row in read_metrics(run.metrics)
        if "rollout/step" in row
    ]
    assert rewards == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 33.0)]
    assert [row["eval/x"] for row in read_metrics(run.metrics) if "eval/x" in row] == [0.5]
    gone = [
        json.loads(line)
        for line in (run.path / "metrics-rolled-back.jsonl").read_text().splitlines()
    ]
    assert [row.get("rollout/step", row.get("eval/step")) for row in gone] == [3, 4, 5]
    scalars = (
        EventAccumulator(str(run.tensorboard), purge_orphaned_data=True)
        .Reload()
        .Scalars("rollout/raw_reward")
    )
    assert [(e.step, e.value) for e in scalars] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 33.0)]


def test_a_row_that_was_cut_in_the_middle_is_left_out_and_a_broken_one_named(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"rollout/step": 0}\n{"rollout/st')
    assert read_metrics(path) == [{"rollout/step": 0}]
    assert roll_back(path, 5) == 0 and path.read_text() == '{"rollout/step": 0}\n'
    path.write_text('{"rollout/step": 0}\nnonsense\n')
    with pytest.raises(MetricsError, match=r"metrics\.jsonl:2"):
        read_metrics(path)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["rollout/step", "eval/step"]), st.integers(0, 9)), max_size=20
    ),
    st.integers(0, 10),
)
def test_roll_back_splits_rows_by_step_and_loses_none(
    rows: list[tuple[str, int]], step: int
) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        path.write_text("".join(json.dumps({key: value}) + "\n" for key, value in rows))
        moved = roll_back(path, step)
        kept = [next(iter(row.items())) for row in read_metrics(path)]
    assert kept == [row for row in rows if row[1] < step]
    assert moved == len(rows) - len(kept)


def test_not_finite_is_null_and_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, run = logger(tmp_path)
    log.log({"train/loss": math.nan, "train/grad_norm": math.inf}, 0)
    log.log({"train/loss": math.nan}, 1)
    log.close()
    assert [row["train/loss"] for row in read_metrics(run.metrics)] == [None, None]
    said = capsys.readouterr().err
    assert said.count("train/loss is nan") == 1 and "train/grad_norm is inf" in said


@pytest.mark.parametrize("value", ["text", [1, 2], None, {"a": 1}])
def test_what_is_no_number_is_refused_by_name(tmp_path: Path, value: object) -> None:
    log, _ = logger(tmp_path)
    with pytest.raises(MetricsError, match="rollout/odd"):
        log.log({"rollout/odd": value}, 0)
    log.close()


def wandb_records(content: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format after a header of 7 bytes."""
    at, parts = 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # the rest of a block is padding
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_wandb_gets_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real package, offline: what it wrote is read back from its own file."""
    wandb = pytest.importorskip("wandb", reason="pip install 'slime-rl[wandb]'")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_SILENT", "true")
    names = {
        "wandb_team": "us",
        "wandb_project": "p",
        "wandb_group": "g",
        "wandb_run_id": "id7",
        "lr": 1e-6,
    }
    log, run = logger(tmp_path, use_wandb=True, wandb_mode="offline", wandb_dir=str(tmp_path / "w"),
                      wandb_key=None, use_tensorboard=False, **names)  # fmt: skip
    log.log({"train/loss": 0.5}, 0)
    log.log({"eval/x": 0.25}, 3, "eval/step")
    log.close()
    assert not any(run.tensorboard.iterdir()), "--no-use-tensorboard"
    (file,) = (tmp_path / "w").rglob("*.wandb")
    records = [Record.FromString(data) for data in wandb_records(file.read_bytes())]
    rows = [{i.nested_key[0] if i.nested_key else i.key: json.loads(i.value_json) for i in r.history.item}
            for r in records if r.HasField("history")]  # fmt: skip
    assert [{k: v for k, v in row.items() if k[0] != "_"} for row in rows] == [
        {"rollout/step": 0, "train/loss": 0.5},
        {"eval/step": 3, "eval/x": 0.25},
    ]
    (begun,) = (r.run for r in records if r.HasField("run"))
    assert (begun.entity, begun.project, begun.run_group, begun.run_id) == ("us", "p", "g", "id7")
    config = {item.key: json.loads(item.value_json) for item in begun.config.update}
    assert config["lr"] == 1e-6 and config["wandb_key"] is None
    assert wandb.run is None


def test_unknown_step_key_and_missing_wandb_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, _ = logger(tmp_path)
    with pytest.raises(MetricsError, match="rollout/step"):
        log.log({}, 0, "step")
    log.close()
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)  # as if it were not installed
    with pytest.raises(TrackerError, match=r"slime-rl\[wandb\]"):
        logger(tmp_path, use_wandb=True)


def test_wandb_alone_counts_optimizer_steps_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[dict[str, float]] = []
    monkeypatch.setattr(services, "start_wandb", lambda run: SimpleNamespace(log=rows.append))
    batch = {
        "rollout_batch_size": 8,
        "n_samples_per_prompt": 4,
        "global_batch_size": 16,
        "use_wandb": True,
    }
    for on in (False, True):
        log, run = logger(tmp_path / str(on), wandb_always_use_train_step=on, **batch)
        log.log({"train/x": 1.0}, 5)
        log.log({"eval/x": 1.0}, 5, "eval/step")
        assert [set(row) & set(metrics.STEP_KEYS) for row in read_metrics(run.metrics)] == [
            {"rollout/step"},
            {"eval/step"},
        ]
    keys = [{key: value for key, value in row.items() if key in metrics.STEP_KEYS} for row in rows]
    assert keys == [{"rollout/step": 5}, {"eval/step": 5}, {"train/step": 10}, {"train/step": 10}]


def test_names_of_tensorboard_flags_lead_where_the_contract_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    log, _ = logger(tmp_path, use_tensorboard=True, tb_project_name="p", tb_experiment_name="e")
    log.close()
    assert list((tmp_path / "tensorboard_log" / "p" / "e").glob("events.*"))
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "elsewhere"))
    log, _ = logger(tmp_path, use_tensorboard=True)
    log.close()
    assert list((tmp_path / "elsewhere").glob("events.*"))
