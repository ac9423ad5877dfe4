"""What a start finds out before the first phase."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from driver_parts import Driver
from make_args import make_args

from slime.checkpoint.files import FolderError, answer
from slime.checkpoint.snapshot import Snapshot
from slime.cluster.folders import lock_run
from slime.cluster.placement import Placement, Slots
from slime.cluster.rollout_manager import RolloutManager
from slime.cluster.run import run_loop
from slime.cluster.snapshots import StartingPoint, check_save_folder
from slime.cluster.start import Parts, open_metrics
from slime.engines.keys import RunKeys
from slime.observability.metrics import read_metrics
from slime.observability.run_dir import RunDir


@pytest.mark.parametrize("lost", ["rollout manager", "actor rank 1", "critic rank 0"])
def test_a_process_on_a_node_without_the_folder_is_named(tmp_path: Path, lost: str) -> None:
    def look(folder: str, token: str, who: str) -> Any:
        return answer(str(tmp_path / "other node") if who == lost else folder, token, who)

    def group(role: str) -> Any:
        names = [f"{role} rank {rank}" for rank in range(2)]
        return SimpleNamespace(
            try_folder=lambda folder, token: {who: look(folder, token, who) for who in names}
        )

    driver = Driver()
    driver.actor_manager.results["try_folder"] = lambda folder, token: look(
        folder, token, "rollout manager"
    )
    groups = [group("actor"), group("critic")]
    with pytest.raises(
        FolderError, match=f"{lost} on .*: the driver's file is not there"
    ) as caught:
        check_save_folder(tmp_path / "save", driver.manager, groups)
    assert (
        sum(who in str(caught.value) for who in ("rollout manager", "actor rank", "critic rank"))
        == 1
    )
    assert list((tmp_path / "save").iterdir()) == []
    lost = "nobody"
    check_save_folder(tmp_path / "save", driver.manager, groups)


class Rows:
    """A data source with as many prompts as the run's name says; what a user may name with
    ``--data-source-path``.
    """

    def __init__(self, args: Any) -> None:
        self.args = args

    def __len__(self) -> int:
        return int(self.args.run_name)


@pytest.mark.parametrize(
    ("num_rollout", "num_epoch", "rows", "expected"),
    [
        (7, None, 10, 7),
        (None, None, 10, 3),
        (None, 3, 10, 8),
        (None, 3, 2, 2),
        (0, None, 10, 0),
        (7, 3, 10, 7),
        (None, 2, 8, 4),
        (None, 1, 1, 1),
        (None, 1, 0, 1),
    ],
)
def test_the_number_of_rollouts_is_given_or_follows_from_the_data(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    num_rollout: int,
    num_epoch: int,
    rows: int,
    expected: int,
) -> None:
    """Users' functions read it as ``args.num_rollout``; the driver's args are left as they are."""
    monkeypatch.setattr("slime.plugins.actors.ray_actors.redirect_output", lambda *_: None)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    # it goes into the environment
    monkeypatch.setattr("slime.cluster.rollout_manager.exempt_from_proxy", lambda _: {})
    # of this whole process
    monkeypatch.setattr("slime.cluster.rollout_manager.GarbageCollection", lambda: None)
    args = make_args(rollout_batch_size=4).with_values(
        num_rollout=num_rollout,
        num_epoch=num_epoch,
        run_name=str(rows),
        data_source_path=f"{__file__}:Rows",
        rollout_external_engine_addrs=["127.0.0.1:1"],  # so that it starts none
    )
    layout: Any = None
    manager = RolloutManager(args, tmp_path, layout, layout, RunKeys())
    assert manager.num_rollout() == manager.args.num_rollout == expected
    assert args.num_rollout == num_rollout


def test_engines_start_before_the_data_is_read_and_end_if_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done: list[str] = []

    class Fleet:
        def begin(self) -> None:
            done.append("begin")

        def stop(self, now: bool) -> None:
            done.append("stop")

    class Missing:
        def __init__(self, args: Any) -> None:
            done.append("read")
            raise OSError("no such file")

    room = "slime.cluster.rollout_manager"
    monkeypatch.setattr("slime.plugins.actors.ray_actors.redirect_output", lambda *_: None)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(f"{room}.exempt_from_proxy", lambda _: {})
    monkeypatch.setattr(f"{room}.GarbageCollection", lambda: None)
    monkeypatch.setattr(f"{room}.fleet_of", lambda *_: Fleet())
    monkeypatch.setattr(f"{room}.load_function", lambda _: Missing)
    layout: Any = None
    with pytest.raises(OSError, match="no such file"):
        RolloutManager(make_args(), tmp_path, layout, layout, RunKeys())
    assert done == ["begin", "read", "stop"]


@pytest.mark.parametrize(
    ("slots", "expected"), [((1, 1), 8), ((2, 1), 4), ((1, 3), 2), ((16, 0), 1), ((0, 0), 8)]
)
def test_trainers_and_engines_take_turns_on_the_cores(
    monkeypatch: pytest.MonkeyPatch, slots: tuple[int, int], expected: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    placement: Any = Placement.__new__(Placement)
    placement.slots = Slots(*slots, 0)
    assert placement.threads_per_process() == expected


# --- metrics of a resumed run
# -----------------------------------------------------------------------


def resumed(tmp_path: Path, logged: list[int], **begin: Any) -> list[tuple[int, float]]:
    """Steps and rewards in metrics.jsonl after a run that has logged some steps is resumed from
    step 2's snapshot.
    """
    args = make_args(output_dir=str(tmp_path), use_tensorboard=False)
    folder = RunDir(tmp_path)
    rows = [
        f'{{"rollout/step": {step}, "time": 1.0, "rollout/reward": {step / 10}}}\n'
        for step in logged
    ]
    folder.metrics.write_text("".join(rows))
    driver = Driver()
    snapshot = Snapshot(tmp_path / "iter_2", {"rollout_id": 2, "metrics": {"rollout/reward": 0.2}})
    point = StartingPoint(
        snapshot, **{"resumes": True, "trained": 2, "first_rollout": 3, "attempt": 1, **begin}
    )
    open_metrics(Parts(args, folder, point, driver.log, driver.stop)).close()
    return [
        (int(row["rollout/step"]), row["rollout/reward"]) for row in read_metrics(folder.metrics)
    ]


def test_rows_of_steps_that_are_made_again_are_rolled_back(tmp_path: Path) -> None:
    assert resumed(tmp_path, [0, 1, 2, 3, 4]) == [(0, 0.0), (1, 0.1), (2, 0.2)]


def test_the_row_of_a_step_that_was_saved_and_not_logged_comes_from_the_snapshot(
    tmp_path: Path,
) -> None:
    assert resumed(tmp_path, [0, 1]) == [(0, 0.0), (1, 0.1), (2, 0.2)]


def test_finetuning_logs_nothing_of_the_snapshots_run(tmp_path: Path) -> None:
    fresh = {"resumes": False, "trained": None, "first_rollout": 0, "attempt": 0}
    assert resumed(tmp_path, [], **fresh) == []


def test_a_folder_that_cannot_be_used_is_told_without_a_traceback(tmp_path: Path) -> None:
    """That of another run, and one that cannot be written."""
    other = lock_run(tmp_path, "twin")
    (tmp_path / "file").touch()
    try:
        for parent, name, told in (
            (tmp_path, "twin", "--run-name"),
            (
                tmp_path / "file",
                "one",
                "--output-dir",
            ),
        ):
            args = make_args(output_dir=str(parent), run_name=name)
            with pytest.raises(SystemExit, match=f"the run did not start: .*{told}"):
                run_loop(args, lambda args, run: None)
    finally:
        other.release()
