"""Which transport follows from flags and placement, and which rank sends to which engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from real_engines import sync_args

from slime.weights import transports
from slime.weights.transports import create_transport, engines_of_rank


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "_on_cuda", lambda: True)
    monkeypatch.setattr(transports, "_gpus_of_this_host", lambda: 8)


def choice(colocated_host: bool, **flags: Any) -> str:
    return create_transport(sync_args(**flags), colocated_host).name


def test_on_the_cpu_the_host_decides() -> None:
    assert choice(True) == choice(True, colocate=True) == "ipc"
    assert choice(False) == "distributed"


def test_on_gpus_it_is_the_gpu_that_counts(on_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choice(True, colocate=True) == choice(False, colocate=True) == "ipc"  # each rank has its own host's engines
    assert choice(True) == choice(False) == "distributed"
    monkeypatch.setattr(transports, "_gpus_of_this_host", lambda: 1)
    assert choice(True) == "ipc"  # NCCL refuses two ranks on one GPU
    assert choice(False) == "distributed"


def test_files_when_asked_for(tmp_path: Path) -> None:
    files = dict(update_weight_transport="disk", update_weight_disk_dir=str(tmp_path), hf_checkpoint=str(tmp_path))
    assert choice(True, **files) == "disk" and choice(True, **files, update_weight_mode="delta") == "delta"
    with pytest.raises(ValueError, match="--update-weight-disk-dir"):
        choice(True, update_weight_transport="disk")


def test_the_hook_after_writing_gets_folder_and_engines(tmp_path: Path) -> None:
    hook = tmp_path / "hook.py"
    hook.write_text("seen = []\ndef after(args, version_dir, engines):\n    seen.append((version_dir, engines))\n")
    args = sync_args(
        update_weight_transport="disk",
        update_weight_disk_dir=str(tmp_path),
        hf_checkpoint=str(tmp_path),
        custom_update_weight_post_write_path=f"{hook}:after",
    )
    transport: Any = create_transport(args, True)
    transport.written(tmp_path / "weight_v0.1", ["engine"])
    assert transport.written.__closure__  # bound to the user's function
    from slime.config.hooks import load_function

    function = load_function(f"{hook}:after")
    assert function.__globals__["seen"] == [(str(tmp_path / "weight_v0.1"), ["engine"])]


def test_rank_0_serves_all_unless_ranks_and_engines_share_gpus(on_gpus: None) -> None:
    urls, slots = ["a", "b", "c"], {"a": 0, "b": 2, "c": 1}

    def of(rank: int, **flags: Any) -> list[str]:
        return engines_of_rank(sync_args(**flags), urls, slots, rank, 3)

    assert of(0) == urls and of(1) == []
    assert [of(rank, colocate=True) for rank in range(3)] == [["a"], ["c"], ["b"]]
    assert of(0, colocate=True, update_weight_transport="disk") == urls
    assert engines_of_rank(sync_args(colocate=True), urls, slots, 0, 1) == urls
    with pytest.raises(ValueError, match="no rank of the trainer is on the GPU of engine b"):
        engines_of_rank(sync_args(colocate=True), urls, slots, 0, 2)
