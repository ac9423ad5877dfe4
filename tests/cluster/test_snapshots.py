"""When a snapshot is written and committed, and what a resumed run takes from it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from driver_parts import Driver
from make_args import make_args

from slime.checkpoint import files
from slime.checkpoint import snapshot as snapshot_files
from slime.checkpoint.manifest import ResumeError
from slime.cluster.snapshots import StartingPoint, restore_rollouts, settings_of
from slime.cluster.stop_signals import StopRequested
from slime.config.args import Args


def manifests(folder: Path) -> dict[str, dict[str, Any]]:
    """Of the complete snapshots, by their folders' names."""
    return {
        path.parent.name: json.loads(path.read_text())
        for path in sorted(folder.glob("iter_*/manifest.json"))
    }


def test_a_save_is_committed_with_what_a_resume_needs(tmp_path: Path) -> None:
    driver = Driver(
        save=str(tmp_path), save_hf=str(tmp_path / "hf-{rollout_id}"), keep_old_actor=True
    )
    driver.actor_manager.results["save_state"] = lambda *_: 2
    driver.pool.update_weights()
    driver.log.pending["rollout/reward"] = 0.5
    driver.said.clear()
    driver.run.save(3)
    assert driver.said == [
        "actor saves",
        "save_state",
        "actor has saved",
        f"actor writes {tmp_path}/hf-3",
    ]
    (manifest,) = manifests(tmp_path).values()
    facts = {"rollout_id": 3, "ahead": 2, "weight_version": "0.0", "attempt": 0, "seed": 7}
    assert manifest["old_actor"] == {"held": 0, "lag": 0, "ahead": 2}
    assert {name: manifest[name] for name in facts} == facts and manifest["metrics"][
        "rollout/reward"
    ] == 0.5
    assert driver.snapshots.saved == 3


def test_with_async_save_it_is_committed_when_all_ranks_have_written(tmp_path: Path) -> None:
    driver = Driver(save=str(tmp_path), async_save=True)
    driver.actor.writing = True
    driver.log.pending["rollout/reward"] = 0.5
    driver.run.save(0)
    driver.run.end_step(0)
    assert driver.snapshots.saved is None and not manifests(tmp_path)
    driver.actor.writing = False
    driver.run.end_step(1)
    assert driver.snapshots.saved == 0
    assert manifests(tmp_path)["iter_0000000"]["metrics"]["rollout/reward"] == 0.5, (
        "of the step that was saved"
    )


def test_the_next_save_waits_for_the_one_before(tmp_path: Path) -> None:
    driver = Driver(save=str(tmp_path), async_save=True, save_keep_last=1)
    for rollout_id in range(3):
        driver.actor.writing = True
        driver.run.save(rollout_id)
    assert driver.said.count("actor has saved") == 2 and driver.snapshots.saved == 1
    assert list(manifests(tmp_path)) == ["iter_0000001"], "--save-keep-last"


def test_who_is_saved_is_awake(tmp_path: Path) -> None:
    """Also when a signal ends the run while engines generate, and trainers sleep."""
    driver = Driver(colocated=True, critic=True, save=str(tmp_path), async_save=True)
    driver.run.save(0)
    turns = [
        "critic sleeps",
        "actor wakes",
        "actor saves",
        "actor sleeps",
        "critic wakes",
        "critic saves",
    ]
    assert driver.said == [*turns, "save_state"]


def test_a_signal_during_a_save_is_obeyed_after_it(tmp_path: Path) -> None:
    """The stop would save again, and remove the folder that ranks write to (``--async-save``)."""
    driver = Driver(save=str(tmp_path), async_save=True)
    driver.stop.requested = "SIGTERM"
    driver.run.save(0)
    assert "save_state" in driver.said and [path.name for path in tmp_path.glob(".iter_*")]
    with pytest.raises(StopRequested):
        driver.stop.check()


# --- a full disk -------------------------------------------------------------------------------


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_SECONDS", 0.0)


@pytest.mark.parametrize("times", [1, 3])
def test_a_full_disk_pauses_the_run(tmp_path: Path, short_pauses: None, times: int) -> None:
    driver = Driver(save=str(tmp_path))
    driver.actor.saves_fail = [FULL] * times
    driver.run.save(3)
    assert driver.said == ["actor saves"] * (times + 1) + ["save_state", "actor has saved"]
    assert list(manifests(tmp_path)) == ["iter_0000003"] and driver.snapshots.saved == 3
    said = driver.printed.getvalue()
    assert said.count(f"the disk of {tmp_path} is full: ") == 1 and "until rollout 3" in said
    assert "no snapshot" in said and "rollout 3" in said


def test_with_async_save_the_copies_are_written_again(tmp_path: Path, short_pauses: None) -> None:
    """The ranks have trained since, so a new save would be of another step."""
    driver = Driver(save=str(tmp_path), async_save=True)
    driver.run.save(0)
    driver.actor.saves_fail = [RuntimeError("rank 1: [Errno 122] Disk quota exceeded")]
    driver.snapshots.commit_if_written()
    assert driver.said == [
        "actor saves",
        "save_state",
        "actor has saved",
        "actor saves again",
        "actor has saved",
    ]
    assert driver.snapshots.saved == 0


def test_another_error_of_a_save_ends_the_run(tmp_path: Path) -> None:
    driver = Driver(save=str(tmp_path))
    driver.actor.saves_fail = [OSError(errno.EACCES, os.strerror(errno.EACCES))]
    with pytest.raises(PermissionError):
        driver.run.save(3)


def test_who_stops_a_paused_run_learns_what_is_not_saved(tmp_path: Path) -> None:
    driver = Driver(save=str(tmp_path), trained=2)
    driver.stop.requested = "SIGTERM"
    driver.actor.saves_fail = [FULL]
    with pytest.raises(StopRequested):
        driver.run.save(3)
    said = driver.printed.getvalue()
    assert f"rollout 3 is not saved: the disk of {tmp_path} " in said and "of rollout 2" in said


# --- going on ----------------------------------------------------------------------------------


def saved(folder: Path, rollout_id: int = 6, attempt: int = 1, **settings: Any) -> None:
    """A snapshot of a run with these settings."""
    temp = snapshot_files.begin(folder, rollout_id)
    (temp / "state").write_text("weights")
    manifest = {"rollout_id": rollout_id, "attempt": attempt, "metrics": {"rollout/reward": 0.25}}
    snapshot_files.commit(temp, {**manifest, "settings": settings_of(vars(make_args(**settings)))})


def start_of(args: Args) -> StartingPoint:
    return StartingPoint.of(args, args.start_rollout_id)


def restore(driver: Driver, args: Args) -> None:
    parts = SimpleNamespace(
        args=args, begin=start_of(args), log=driver.log, settings=settings_of(vars(args))
    )
    restore_rollouts(parts, driver.manager)  # type: ignore[arg-type]


def test_a_folder_to_load_that_is_not_there_is_told(tmp_path: Path) -> None:
    driver = Driver()
    restore(driver, make_args().with_values(load=str(tmp_path / "chekpoints")))
    assert "chekpoints does not exist: the run begins without it" in driver.printed.getvalue()
    restore(Driver(), make_args().with_values(load=str(tmp_path)))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, (True, 6, 7, 2)),
        ({"finetune": True}, (False, None, 0, 0)),
        ({"start_rollout_id": 3}, (True, 6, 3, 2)),
        ({"finetune": True, "start_rollout_id": 3}, (False, None, 3, 0)),
    ],
)
def test_where_a_run_begins(
    tmp_path: Path, flags: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    saved(tmp_path)
    begin = start_of(make_args().with_values(load=str(tmp_path), **flags))
    assert (begin.resumes, begin.trained, begin.first_rollout, begin.attempt) == expected
    assert begin.snapshot is not None and (begin.manifest is not None) == begin.resumes


def test_a_fresh_run_begins_at_the_start() -> None:
    assert start_of(make_args()) == StartingPoint()


def test_a_resume_restores_the_data_source_and_names_changed_settings(tmp_path: Path) -> None:
    saved(tmp_path, lr=1e-6)
    args = make_args(lr=2e-6).with_values(load=str(tmp_path))
    begin, driver = start_of(args), Driver()
    restore(driver, args)
    assert begin.snapshot is not None
    assert driver.actor_manager.arguments["load_state"] == [(6, begin.snapshot.path, 2)]
    assert "rollout 7" in driver.printed.getvalue()
    changed = (
        "settings that differ from the saved run's: critic_lr: 1e-06 -> 2e-06; lr: 1e-06 -> 2e-06"
    )
    assert changed in driver.printed.getvalue()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            {"lr_decay_style": "linear"},
            "num_rollout: 8 -> 16 (learning rate of the next step: 1.25e-07 -> 5.63e-07;",
        ),
        ({"lr_decay_style": "cosine"}, "num_rollout: 8 -> 16 (learning rate of the next step: "),
        (
            {"lr_warmup_fraction": 0.5},
            "num_rollout: 8 -> 16 (learning rate of the next step: 1e-06 -> 8.75e-07;",
        ),
        ({"lr_decay_style": "linear", "lr_decay_iters": 32}, ""),
        ({}, ""),
    ],
)
def test_a_run_that_is_extended_is_told_its_learning_rate(
    tmp_path: Path, flags: dict[str, Any], told: str
) -> None:
    """The snapshot is that of the seventh of eight steps."""
    saved(tmp_path, num_rollout=8, lr=1e-6, **flags)
    args = make_args(num_rollout=16, lr=1e-6, **flags).with_values(load=str(tmp_path))
    driver = Driver()
    restore(driver, args)
    printed = " ".join(driver.printed.getvalue().split())
    assert told in printed and ("settings that differ" in printed) == bool(told)


@pytest.mark.parametrize(("length", "left"), [(8, 1), (7, 0), (3, 0)])
def test_a_resumed_run_that_is_complete_says_so(tmp_path: Path, length: int, left: int) -> None:
    """The snapshot is that of the seventh step."""
    saved(tmp_path)
    args = make_args(num_rollout=length).with_values(load=str(tmp_path))
    driver = Driver()
    restore(driver, args)
    assert ("nothing is left to train" in driver.printed.getvalue()) == (not left)


def test_a_resume_with_another_order_of_prompts_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, rollout_seed=1)
    args = make_args(rollout_seed=2).with_values(load=str(tmp_path))
    driver = Driver()
    with pytest.raises(ResumeError, match="rollout_seed: 1 -> 2"):
        restore(driver, args)


def test_a_new_run_and_finetuning_restore_nothing(tmp_path: Path) -> None:
    saved(tmp_path)
    driver = Driver()
    for flags in ({}, {"load": str(tmp_path), "finetune": True}):
        args = make_args().with_values(**flags)
        restore(driver, args)
    assert driver.said == []
