"""Snapshots: complete or invisible, checked when read, newest by commit."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from needs import of_all

from slime.api.arguments import InputFolder
from slime.checkpoint import manifest, snapshot
from slime.checkpoint.files import DigestedFile, FileEntry, file_digest
from slime.checkpoint.snapshot import SnapshotError
from slime.observability.files import take_warnings


def save(
    folder: Path, rollout_id: int, files: dict[str, bytes] | None = None, **manifest: object
) -> Path:
    temp = snapshot.begin(folder, rollout_id)
    for name, content in (
        files or {"actor/shard_0.bin": b"w" * 1000, "counters.json": b"{}"}
    ).items():
        path = temp / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return snapshot.commit(temp, {"rollout_id": rollout_id, "attempt": 0, **manifest})


def test_a_committed_snapshot_is_found_with_its_manifest(tmp_path: Path) -> None:
    path = save(tmp_path, 12, seed=7, world_size=2)
    assert path.name == "iter_0000012"
    found = snapshot.latest(tmp_path)
    assert found is not None and found.path == path and found.iteration == 12
    assert (found.manifest["seed"], found.manifest["world_size"]) == (7, 2)
    assert [entry["path"] for entry in found.manifest["files"]] == [
        "actor/shard_0.bin",
        "counters.json",
    ]
    assert (tmp_path / snapshot.TRACKER).read_text().strip() == "12"
    assert snapshot.latest(path) == found  # an iter folder may be named itself


@pytest.mark.parametrize("size", [999, 1001])
def test_a_size_that_has_changed_is_found_without_digests(size: int, tmp_path: Path) -> None:
    (save(tmp_path, 1) / "actor" / "shard_0.bin").write_bytes(b"w" * size)
    with pytest.raises(SnapshotError, match=f"shard_0.bin.*{size}.*of 1000"):
        snapshot.latest(tmp_path, digests=False)


def test_nothing_to_load_is_none(tmp_path: Path) -> None:
    assert snapshot.latest(tmp_path) is None
    assert snapshot.latest(tmp_path / "absent") is None
    snapshot.begin(tmp_path, 3)
    assert snapshot.latest(tmp_path) is None


def test_an_open_snapshot_is_not_seen_and_the_next_begin_removes_it(tmp_path: Path) -> None:
    save(tmp_path, 1)
    orphan = snapshot.begin(tmp_path, 2)
    (orphan / "half").write_bytes(b"x")
    found = snapshot.latest(tmp_path)
    assert found is not None and found.iteration == 1
    fresh = snapshot.begin(tmp_path, 2)
    assert not orphan.exists() and list(fresh.iterdir()) == []


def test_going_back_leaves_the_old_lineage(tmp_path: Path) -> None:
    for rollout_id in (2, 5, 8):
        save(tmp_path, rollout_id)
    assert snapshot.latest(tmp_path, step=2).iteration == 2  # type: ignore[union-attr]
    save(tmp_path, 5, {"a": b"new"}, attempt=1)
    found = snapshot.latest(tmp_path)
    assert found is not None and found.iteration == 5 and found.manifest["attempt"] == 1
    assert (found.path / "a").read_bytes() == b"new"


def test_saving_again_is_never_without_a_complete_folder(tmp_path: Path) -> None:
    final = save(tmp_path, 4, {"a": b"old"})
    os.replace(final, final.with_name(".iter_0000004.replaced"))  # died between the two renames
    found = snapshot.latest(tmp_path)
    assert found is not None and (found.path / "a").read_bytes() == b"old"
    snapshot.begin(tmp_path, 5)
    assert (final / "a").read_bytes() == b"old"


@pytest.mark.parametrize("step", [None, 4])
def test_damage_is_named(tmp_path: Path, step: int | None) -> None:
    path = save(tmp_path, 4, {"model/a.bin": b"abcdef", "b.bin": b"123", "c.bin": b"xyz"})
    (path / "model/a.bin").write_bytes(b"abc")
    (path / "b.bin").unlink()
    (path / "c.bin").write_bytes(b"xyy")
    with pytest.raises(SnapshotError, match=r"model/a.bin has 3.*of 6") as caught:
        snapshot.latest(tmp_path, step=step)
    assert "b.bin" in str(caught.value) and "c.bin" in str(caught.value)
    assert "--ckpt-step" in str(caught.value)


def test_a_step_that_is_not_there_lists_what_is(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 3)
    with pytest.raises(SnapshotError, match=r"iteration 2 .*there are: 1, 3"):
        snapshot.latest(tmp_path, step=2)
    with pytest.raises(SnapshotError, match="is iteration 3"):
        snapshot.latest(path, step=1)


def test_prune_keeps_what_was_committed_last(tmp_path: Path) -> None:
    for rollout_id in (1, 3, 5):
        save(tmp_path, rollout_id, {f"rollout/global_dataset_state_dict_{rollout_id}.pt": b"s"})
    save(tmp_path, 1, attempt=1)
    deleted = snapshot.prune(tmp_path, keep=2)
    assert [path.name for path in deleted] == ["iter_0000003"]
    assert [s.iteration for s in snapshot.snapshots(tmp_path)] == [1, 5]
    assert not (tmp_path / "rollout/global_dataset_state_dict_3.pt").exists()
    with pytest.raises(ValueError, match="at least one"):
        snapshot.prune(tmp_path, keep=0)


def test_an_old_snapshot_that_cannot_be_deleted_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on NFS, where the file of a deleted name stays in its folder as long as another process
    reads it.
    """

    def busy(folder: Path) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(folder))

    for rollout_id in range(2):
        save(tmp_path, rollout_id)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", busy)
        assert [path.name for path in snapshot.prune(tmp_path, keep=1)] == ["iter_0000000"]
        assert "iter_0000000.tmp-pruned" in caplog.text and "next save" in caplog.text
        save(tmp_path, 2)
        save(tmp_path, 2)
        assert [found.iteration for found in snapshot.snapshots(tmp_path)] == [1, 2]
    save(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.glob("*iter_0*")) == [
        "iter_0000001",
        "iter_0000002",
        "iter_0000003",
    ]
    assert all("next save" in told for told in take_warnings()), "the driver shows them"


def test_prune_keeps_one_every_so_many(tmp_path: Path) -> None:
    for rollout_id in range(1, 12, 2):
        save(tmp_path, rollout_id, {"x": b"s"})
    snapshot.prune(tmp_path, keep=1, every=4)
    assert [s.iteration for s in snapshot.snapshots(tmp_path)] == [3, 7, 11]


def test_the_data_state_is_readable_at_the_documented_path(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from slime.data.plain_values import read_state, write_state

    temp = snapshot.begin(tmp_path, 6)
    state = {
        "sample_offset": 64,
        "epoch_id": 1,
        "sample_group_index": 128,
        "sample_index": 1024,
        "metadata": {"x": 1},
    }
    write_state(temp / "rollout" / "global_dataset_state_dict_6.pt", state)
    final = snapshot.commit(temp, {"rollout_id": 6})
    assert (
        torch.load(tmp_path / "rollout/global_dataset_state_dict_6.pt", weights_only=True) == state
    )
    assert read_state(final / "rollout/global_dataset_state_dict_6.pt") == state
    with pytest.raises(FileNotFoundError, match=r"global_dataset_state_dict_7.pt.*global_dataset"):
        read_state(final / "rollout/global_dataset_state_dict_7.pt")


def test_commit_refuses_what_is_no_open_snapshot(tmp_path: Path) -> None:
    temp = snapshot.begin(tmp_path, 6)
    with pytest.raises(SnapshotError, match="is empty"):
        snapshot.commit(temp, {"rollout_id": 6})
    with pytest.raises(SnapshotError, match="rollout 7"):
        snapshot.commit(temp, {"rollout_id": 7})


def test_kind_tells_snapshots_from_hugging_face_models(tmp_path: Path) -> None:
    assert snapshot.kind(tmp_path) == "empty"
    (tmp_path / "config.json").write_text("{}")
    assert snapshot.kind(tmp_path) == "hf"
    assert snapshot.latest(tmp_path) is None
    other = tmp_path / "run"
    path = save(other, 0)
    assert (snapshot.kind(other), snapshot.kind(path)) == ("snapshots", "iteration")


def test_a_manifest_that_was_edited_is_an_error(tmp_path: Path) -> None:
    path = save(tmp_path, 0)
    (path / "manifest.json").write_text("{")
    with pytest.raises(SnapshotError, match="is not JSON"):
        snapshot.latest(tmp_path)
    (path / "manifest.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(SnapshotError, match="format 99"):
        snapshot.latest(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("rollout_id", None, "rollout_id is 'None'"),
        ("rollout_id", "3", "rollout_id is '3'"),
        ("sequence", 1.5, "sequence is '1.5'"),
        ("files", {}, "files is '{}'"),
        ("files", ["a"], "files is 'a'"),
        ("files", [{"path": "a", "size": 1}], "size and digest"),
        ("files", [{"path": "../a", "size": 1, "digest": "x"}], "'../a'"),
        ("files", [{"path": 3, "size": 1, "digest": "x"}], "names '3'"),
    ],
)
def test_entries_of_a_manifest_that_were_edited_are_named(
    tmp_path: Path, name: str, value: object, said: str
) -> None:
    path = save(tmp_path, 3)
    values = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**values, name: value}))
    for call in (
        snapshot.latest,
        lambda folder: snapshot.prune(folder, 1),
        lambda folder: save(folder, 4),
    ):
        with pytest.raises(SnapshotError, match=r"manifest.json") as caught:
            call(tmp_path)
        assert said in str(caught.value)
    for content in ("[]", "3", "[" * 100_000):
        (path / "manifest.json").write_text(content)
        with pytest.raises(SnapshotError, match=r"manifest\.json"):
            snapshot.latest(tmp_path)


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8), st.integers() | st.text() | st.none(), min_size=1
    )
)
@settings(max_examples=of_all(50, 20))
def test_changed_settings_are_named(values: dict[str, object]) -> None:
    assert (
        manifest.changes(
            manifest.settings(values), manifest.settings(dict(reversed(list(values.items()))))
        )
        == []
    )
    name = next(iter(values))
    now = manifest.settings({**values, name: "other than all", "save": "elsewhere"})
    then = manifest.settings({**values, "save": "here"})
    assert manifest.changes(then, now) == [f"{name}: {values[name]} -> other than all"] * (
        name in then
    )
    assert manifest.changes(then, {}) == []


def test_the_functions_of_a_program_are_no_changed_settings() -> None:
    """Each call of ``slime.train`` writes them to a new folder."""
    with InputFolder() as first, InputFolder() as second:
        then, now = (
            manifest.settings({"lr": 1.0, "custom_rm_path": f"{folder}/reward.py:reward"})
            for folder in (first, second)
        )
    assert first != second and manifest.changes(then, now) == []
    assert manifest.changes(then, {**now, "lr": 2.0}) == ["lr: 1.0 -> 2.0"]


def megatron_checkpoint(folder: Path, *names: str, tracker: str | None = None) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "common.pt").write_bytes(b"theirs")
    if tracker is not None:
        (folder / snapshot.TRACKER).write_text(tracker)


@pytest.mark.parametrize(
    ("names", "tracker", "load"),
    [
        (("iter_0000001", "iter_0000100"), "100", "."),
        (("release",), "release", "."),
        ((), "100", "."),
        (("iter_0000100",), None, "."),
        (("iter_0000100",), "100", "iter_0000100"),
        (("release",), "release", "release"),
    ],
)
def test_a_checkpoint_of_another_program_is_refused(
    tmp_path: Path, names: tuple[str, ...], tracker: str | None, load: str
) -> None:
    megatron_checkpoint(tmp_path, *names, tracker=tracker)
    with pytest.raises(SnapshotError, match="convert_torch_dist_to_hf"):
        snapshot.latest(tmp_path / load)
    if load == "." and names:
        with pytest.raises(SnapshotError, match=r"--save .*set another folder"):
            snapshot.begin(tmp_path, 1)
    assert all((tmp_path / name / "common.pt").read_bytes() == b"theirs" for name in names)
    assert tracker is None or (tmp_path / snapshot.TRACKER).read_text() == tracker


def test_a_folder_that_is_not_ours_is_never_replaced_or_deleted(tmp_path: Path) -> None:
    save(tmp_path, 1)
    temp = snapshot.begin(tmp_path, 2)
    (temp / "a").write_bytes(b"ours")
    megatron_checkpoint(tmp_path, "iter_0000002")  # while the run went on
    with pytest.raises(SnapshotError, match="iter_0000002"):
        snapshot.commit(temp, {"rollout_id": 2})
    snapshot.prune(tmp_path, keep=1)
    snapshot.clean_up(tmp_path)
    assert (tmp_path / "iter_0000002/common.pt").read_bytes() == b"theirs"
    assert snapshot.latest(tmp_path).iteration == 1  # type: ignore[union-attr]


def test_a_snapshot_moved_behind_a_symbolic_link_stays_usable(tmp_path: Path) -> None:
    """Saving again and pruning delete the link and leave alone what it points to."""
    folder, elsewhere = tmp_path / "save", tmp_path / "other disk"
    elsewhere.mkdir()
    for rollout_id in (1, 2, 3):
        path = save(folder, rollout_id)
        os.replace(path, elsewhere / path.name)
        path.symlink_to(elsewhere / path.name)
    assert snapshot.latest(folder).iteration == 3  # type: ignore[union-attr]
    assert save(folder, 3, {"a": b"new"}).is_dir() and not (folder / "iter_0000003").is_symlink()
    assert [path.name for path in snapshot.prune(folder, keep=2)] == ["iter_0000001"]
    # died before the link was deleted
    os.replace(folder / "iter_0000002", folder / ".iter_0000002.tmp-pruned-x")
    save(folder, 4)
    assert [s.iteration for s in snapshot.snapshots(folder)] == [3, 4]
    assert sorted(path.name for path in elsewhere.iterdir()) == [
        "iter_0000001",
        "iter_0000002",
        "iter_0000003",
    ]
    (folder / "iter_0000005").symlink_to(elsewhere / "gone")  # the other disk is not mounted
    assert save(folder, 5).is_dir()


WRITER = """
import os, sys
from pathlib import Path
from slime.checkpoint import snapshot
from slime.observability.files import take_warnings
save = Path(sys.argv[1])
found = snapshot.latest(save)
rollout_id = 0 if found is None else found.iteration
print("up", flush=True)
while True:
    for again in range(2):  # every second save goes over a folder that stands there
        temp = snapshot.begin(save, rollout_id)
        (temp / "rank").mkdir()
        for rank in range(3):
            (temp / "rank" / str(rank)).write_bytes(os.urandom(20_000))
        (temp / "state").write_bytes(str(rollout_id).encode())
        snapshot.commit(temp, {"rollout_id": rollout_id})
        snapshot.prune(save, keep=2)
    rollout_id += 1
"""


@pytest.mark.real
def test_killed_at_any_moment_leaves_a_complete_snapshot(tmp_path: Path) -> None:
    """kill -9 at random moments: what ``latest`` gives is whole, and never older than what was seen
    before.
    """
    chance = random.Random(5)
    seen = -1
    for kills in range(250):
        if kills >= 25 and seen > 5:  # a busy machine takes more of them
            break
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE
        )
        try:
            assert writer.stdout is not None and writer.stdout.readline() == b"up\n"
            time.sleep(chance.uniform(0.0, 0.3))
        finally:
            os.kill(writer.pid, signal.SIGKILL)
            writer.wait(10)
        found = snapshot.latest(tmp_path)
        if found is not None:
            assert int((found.path / "state").read_bytes()) == found.iteration >= seen
            seen = found.iteration
    assert seen > 5, "the writer hardly got to write: the test shows nothing"
    snapshot.begin(tmp_path, 99)
    assert sum(path.name.startswith(".iter") for path in tmp_path.iterdir()) == 1


def written_by_ranks(tmp_path: Path) -> tuple[Path, list[FileEntry]]:
    """An open snapshot with a file of each of two ranks, which they have digested, and one of the
    driver's.
    """
    temp = snapshot.begin(tmp_path, 7)
    (temp / "actor").mkdir()
    entries: list[FileEntry] = []
    for rank in range(2):
        with DigestedFile(temp / "actor" / f"__{rank}_0.distcp") as file:
            file.write(b"weights ")
            file.write(memoryview(bytes([rank] * 100)))
        entries.append({**file.entry(temp), "rank": rank})
    (temp / "state.pt").write_bytes(b"cursor")
    return temp, entries


def test_what_ranks_digested_is_not_read_again(tmp_path: Path) -> None:
    temp, entries = written_by_ranks(tmp_path)
    assert [entry["digest"] for entry in entries] == [
        file_digest(temp / entry["path"]) for entry in entries
    ]
    path = temp / "actor" / "__1_0.distcp"
    path.write_bytes(b"WEIGHTS " + path.read_bytes()[8:])
    final = snapshot.commit(temp, {"rollout_id": 7}, entries)
    found = snapshot.latest(tmp_path)  # of the same size: the driver does not see it
    assert found is not None and found.path == final
    listed = {entry["path"]: entry for entry in found.manifest["files"]}
    assert set(listed) == {"actor/__0_0.distcp", "actor/__1_0.distcp", "state.pt"}
    assert listed["actor/__1_0.distcp"] == entries[1]
    with pytest.raises(SnapshotError, match=r"actor/__1_0.distcp has changed"):
        snapshot.verify(found, of_ranks=True)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_damage_is_found_by_the_rank_that_reads(ranks: int, tmp_path: Path) -> None:
    temp, entries = written_by_ranks(tmp_path)
    final = snapshot.commit(temp, {"rollout_id": 7}, entries)
    assert [snapshot.damaged_part(final / "actor", rank, ranks) for rank in range(ranks)] == [
        None
    ] * ranks
    path = final / "actor" / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    found = [snapshot.damaged_part(final / "actor", rank, ranks) for rank in range(ranks)]
    assert [bool(problem) for problem in found] == [rank == 1 % ranks for rank in range(ranks)]
    assert "__1_0.distcp has changed" in (found[1 % ranks] or "") and "--ckpt-step" in (
        found[1 % ranks] or ""
    )
    assert snapshot.damaged_part(final / "critic", 1 % ranks, ranks) is None


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"")])
def test_what_a_rank_says_it_wrote_must_be_there(
    damage: Callable[[Path], object], tmp_path: Path
) -> None:
    temp, entries = written_by_ranks(tmp_path)
    damage(temp / "actor" / "__0_0.distcp")
    with pytest.raises(SnapshotError, match=r"actor/__0_0.distcp (is missing|has 0 bytes)"):
        snapshot.commit(temp, {"rollout_id": 7}, entries)
    assert snapshot.latest(tmp_path) is None
