"""``--tracker``: the real packages on local stores, a class of the user's, and what is refused."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from make_args import make_args

from slime.config.args import Args
from slime.config.parser import check_args
from slime.observability.metrics import MetricsLogger, read_metrics
from slime.observability.run_dir import RunDir
from slime.observability.trackers import Tracked, TrackerError
from slime.plugins.trackers import services

OWN = """
from slime.observability.trackers import Tracker

class Lines(Tracker):
    def __init__(self, run):
        self.file = (run.folder / "lines.txt").open("a")
        self.file.write(f"{run.project} {run.config['lr']} {run.config['wandb_key']} {run.args.wandb_key} {run}\\n")

    def log(self, numbers, step, step_key):
        if step == 1:
            raise OSError("no network")
        self.file.write(f"{step_key} {step} {numbers}\\n")

    def samples(self, rows, step):
        self.file.write(f"{[row['response'] for row in rows]}\\n")

    def close(self):
        self.file.write("closed\\n")
        self.file.close()
"""


def run_args(folder: Path, *trackers: str, **flags: object) -> Args:
    return make_args(tracker=list(trackers), output_dir=str(folder), run_name="r", **flags)


def log_three(args: Args, resume: bool = False) -> RunDir:
    run = RunDir.create(args, resume=resume)
    log = MetricsLogger(args, run, 2 if resume else None)
    for step in range(2, 4) if resume else range(3):
        rows = [
            {"prompt": "p", "response": f"r{step}{i}", "label": None, "reward": i / 20}
            for i in range(20)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (run.path / "samples" / f"rollout_{step:06d}.jsonl").write_text(text)
        log.log({"rollout/reward": step / 4, "train/loss@k": 1.0, "train/odd": float("nan")}, step)
    log.log({"eval/x": 0.5}, 2, "eval/step")
    log.close()
    return run


def test_a_class_of_the_users_gets_all_and_cannot_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    run = log_three(
        run_args(tmp_path, f"{tmp_path}/own.py:Lines", tracker_project="mine", wandb_key="s3cret")
    )
    lines = (run.path / "lines.txt").read_text().splitlines()
    assert lines[0].startswith("mine ") and "s3cret" not in lines[0]
    assert lines[1] == "rollout/step 0 {'rollout/reward': 0.0, 'train/loss@k': 1.0}"
    assert lines[2] == "['r00', 'r02', 'r05', 'r07', 'r010', 'r012', 'r015', 'r017']"
    assert lines[-2:] == ["eval/step 2 {'eval/x': 0.5}", "closed"]
    assert caplog.text.count("OSError: no network") == 1 and len(read_metrics(run.metrics)) == 4
    assert not list(run.tensorboard.glob("events*")), "only the trackers that are named"


def test_tensorboard_is_one_of_them(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    run = log_three(run_args(tmp_path, "tensorboard", f"{tmp_path}/own.py:Lines"))
    assert list(run.tensorboard.glob("events*")) and (run.path / "lines.txt").exists()


def test_mlflow_has_the_curve_the_table_and_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlflow", reason="pip install 'slime-rl[mlflow]'")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    args = run_args(tmp_path, "mlflow", tracker_project="sums", lr=2e-6)
    run = log_three(args)
    tries = int(os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"])
    assert tries <= 3, "a server that is away holds up each step"
    log_three(args, resume=True)
    assert "artifacts:" not in capfd.readouterr().err, "no bars between the lines of a run"
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(run.path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("sums")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_name == "r" and found.info.status == "FINISHED", (
        "the resumed run went on in the same one"
    )
    curve = [
        (point.step, point.value)
        for point in client.get_metric_history(found.info.run_id, "rollout/reward")
    ]
    assert sorted(set(curve)) == [(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75)]
    assert found.data.metrics["train/loss_k"] == 1.0 and "train/odd" not in found.data.metrics
    table = json.loads(
        Path(
            client.download_artifacts(found.info.run_id, "samples.json", str(tmp_path))
        ).read_text()
    )
    assert (
        set(table["columns"]) == {"step", "prompt", "response", "label", "reward"}
        and len(table["data"]) == 40
    )
    config = Path(
        client.download_artifacts(found.info.run_id, "config.yaml", str(tmp_path))
    ).read_text()
    assert "lr: 2.0e-06" in config
    assert found.data.params["lr"] == "2e-06", "by which runs are sorted"


TRACKIO = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
from test_trackers import log_three, run_args
log_three(run_args(Path(sys.argv[3]), "trackio", tracker_project="sums"))
"""


def test_mlflow_says_of_a_run_that_it_goes_on_or_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="pip install 'slime-rl[mlflow]'")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    args = run_args(tmp_path, "mlflow")
    run = RunDir.create(args)
    from mlflow.tracking import MlflowClient

    def status() -> str:
        client = MlflowClient(tracking_uri=(run.path / "mlruns").as_uri())
        (found,) = client.search_runs(
            [client.get_experiment_by_name(args.tracker_project).experiment_id]
        )
        return str(found.info.status)

    MetricsLogger(args, run).close(failed=True)
    assert status() == "FAILED"
    resumed = MetricsLogger(args, run, 0)
    assert status() == "RUNNING"
    resumed.close()
    assert status() == "FINISHED"


class FailingWandb:
    """A run of W&B whose service is gone."""

    codes: list[int]

    def log(self, values: dict[str, object]) -> None:
        raise ConnectionError("the service is gone")

    def finish(self, exit_code: int) -> None:
        self.codes = [exit_code]
        raise ConnectionError("the service is gone")


def test_wandb_that_is_down_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wandb = FailingWandb()
    monkeypatch.setattr(services, "start_wandb", lambda run: wandb)
    run = log_three(run_args(tmp_path, "wandb"))
    assert len(read_metrics(run.metrics)) == 4 and wandb.codes == [0]
    assert (
        caplog.text.count("--tracker wandb: ConnectionError: the service is gone (reported once")
        == 1
    )


def test_a_tracker_that_is_down_does_not_keep_a_lost_run_from_going_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the user's own start it is an error, which the user can repair."""

    def down(run: Tracked) -> None:
        raise ConnectionError("no route")

    (tmp_path / "own.py").write_text(
        OWN.replace("self.file = (", 'raise OSError("no server")\n        self.file = (')
    )
    args = run_args(tmp_path, f"{tmp_path}/own.py:Lines", "wandb")
    run = RunDir.create(args)
    with pytest.raises(TrackerError, match="no server"):
        MetricsLogger(args, run, 0)
    monkeypatch.setattr(services, "start_wandb", down)
    with pytest.raises(TrackerError, match="no route"):
        MetricsLogger(args.with_values(tracker=["wandb"]), run, 0)
    log = MetricsLogger(args, run, 0, unattended=True)
    log.log({"rollout/reward": 1.0}, 0)
    log.close()
    assert "no server" in caplog.text and "no route" in caplog.text
    assert len(read_metrics(run.metrics)) == 1


def test_trackers_are_told_that_an_error_ended_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = FailingWandb()
    monkeypatch.setattr(services, "start_wandb", lambda run: wandb)
    (tmp_path / "own.py").write_text(OWN.replace('"closed', 'f"failed: {self.failed}'))
    args = run_args(tmp_path, "wandb", f"{tmp_path}/own.py:Lines")
    run = RunDir.create(args)
    MetricsLogger(args, run).close(failed=True)
    assert wandb.codes == [1]
    assert (run.path / "lines.txt").read_text().endswith("failed: True\n")


@pytest.mark.real
def test_trackio_has_the_curve_and_the_table(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="pip install 'slime-rl[trackio]'")
    here = Path(__file__).parent
    # it is read at import, so in another process
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "db")}
    command = [sys.executable, "-c", TRACKIO, str(here), str(here.parent), str(tmp_path)]
    subprocess.run(command, check=True, timeout=120, env=environment, capture_output=True)
    with sqlite3.connect(tmp_path / "db" / "sums.db") as database:
        rows = database.execute(
            "select step, metrics from metrics where run_name = 'r' order by id"
        ).fetchall()
    logged = [(step, json.loads(text)) for step, text in rows]
    assert {step: row["rollout/reward"] for step, row in logged if "rollout/reward" in row} == {
        0: 0.0,
        1: 0.25,
        2: 0.5,
    }
    assert any("r017" in json.dumps(row.get("samples")) for _, row in logged)


def test_the_command_line_of_the_run_shows_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["train.py", "--wandb-key", "s3cret", "--lr", "1e-6"]
    monkeypatch.setattr(sys, "argv", words)
    with services.public_command_line():  # W&B copies it
        assert sys.argv == ["train.py", "--wandb-key", "***", "--lr", "1e-6"]
    assert sys.argv is words


def test_wandb_has_the_curve_and_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="pip install 'slime-rl[wandb]'")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr(sys, "argv", ["train.py", "--wandb-key", "s3cret"])
    run = log_three(run_args(tmp_path, "wandb", wandb_mode="offline"))
    assert not [
        file for file in run.path.rglob("*") if file.is_file() and b"s3cret" in file.read_bytes()
    ]
    tables = [
        json.loads(path.read_text())
        for path in run.path.glob("wandb/offline-*/files/media/table/*.json")
    ]
    rows = {row[1]: row for table in tables for row in table["data"]}
    assert len(tables) == 3 and all(
        table["columns"] == ["prompt", "response", "label", "reward"] for table in tables
    )
    assert len(rows) == 24 and rows["r017"] == ["p", "r017", None, 0.85]
    (recorded,) = run.path.glob("wandb/offline-*/*.wandb")
    assert b"rollout/reward" in recorded.read_bytes() and b"eval/x" in recorded.read_bytes()


def test_swanlab_has_the_curve_and_the_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("swanlab", reason="pip install 'slime-rl[swanlab]'")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    run = log_three(run_args(tmp_path, "swanlab", tracker_project="sums", lr=2e-6))
    (folder,) = (run.path / "swanlog").glob("run-*")
    texts = {path.read_text() for path in folder.glob("media/text/*.txt")}
    assert (
        len(texts) == 24 and ("prompt: p\n\nresponse: r017\n\nlabel: None\n\nreward: 0.85") in texts
    )
    (recorded,) = folder.glob("*.swanlab")
    assert all(name in recorded.read_bytes() for name in (b"rollout/reward", b"eval/x", b"sums"))
    assert "value: 2.0e-06" in (folder / "files" / "config.yaml").read_text()
    about = json.loads((folder / "files" / "swanlab-metadata.json").read_text())
    assert not about.get("runtime"), "it has the command line, and so the keys on it"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tensorbord"], "'tensorbord'"),
        (["swanlab"], "'slime-rl[swanlab]'"),
    ],
)
def test_mistakes_are_told_before_the_run(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.config.resolve.installed", lambda module: module != "swanlab")
    _, problems = check_args(["--tracker", *words])
    assert [problem for problem in problems if said in problem]


def test_a_class_that_is_no_tracker_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("class Other:\n    def __init__(self, run):\n        pass\n")
    args = run_args(tmp_path, f"{tmp_path}/other.py:Other")
    with pytest.raises(TrackerError, match=r"Other.*slime\.observability\.trackers\.Tracker"):
        MetricsLogger(args, RunDir.create(args), None)
