"""Which transport follows from flags and placement, and from which ranks each engine reads."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from real_engines import sync_settings

from slime.weights import transports
from slime.weights.transports import create_transport, disk, ranks_of_engines
from slime.weights.update import sent_buckets


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "on_cuda", lambda: True)
    monkeypatch.setattr(transports, "gpus_of_this_host", lambda: 8)


def choice(colocated_host: bool, **flags: Any) -> str:
    return create_transport(sync_settings(**flags), colocated_host).name


def test_on_the_cpu_the_host_decides() -> None:
    assert choice(True) == choice(True, colocate=True) == "ipc"
    assert choice(False) == "distributed"


def test_on_gpus_it_is_the_gpu_that_counts(on_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # each rank has its own host's engines
    assert choice(True, colocate=True) == choice(False, colocate=True) == "ipc"
    assert choice(True) == choice(False) == "distributed"
    monkeypatch.setattr(transports, "gpus_of_this_host", lambda: 1)
    assert choice(True) == "ipc"  # NCCL refuses two ranks on one GPU
    assert choice(False) == "distributed"


def test_files_when_asked_for(tmp_path: Path) -> None:
    files = dict(
        update_weight_transport="disk",
        update_weight_disk_dir=str(tmp_path),
        hf_checkpoint=str(tmp_path),
    )
    assert (
        choice(True, **files) == "disk"
        and choice(True, **files, update_weight_mode="delta") == "delta"
    )
    with pytest.raises(ValueError, match="--update-weight-disk-dir"):
        choice(True, update_weight_transport="disk")


_OTHER_RUN = """
import fcntl, sys, time
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(600)
"""


def test_two_runs_cannot_send_through_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both would publish ``weight_v0.1``, and the engines of one would load the weights of the
    other.
    """
    files = dict(
        update_weight_transport="disk",
        update_weight_disk_dir=str(tmp_path),
        hf_checkpoint=str(tmp_path),
    )
    for name in (
        ".weight_v0.3.tmp-99-0123abcd",
        ".delta_v0.3.tmp-99-0123abcd",
        "weight_v0.2",
        ".mine.tmp-1",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    monkeypatch.setattr(disk, "LEAVE_SECONDS", 0.0)
    other = subprocess.Popen(
        [sys.executable, "-c", _OTHER_RUN, str(tmp_path / disk.LOCK)], stdout=subprocess.PIPE
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == b"locked\n"
        with pytest.raises(ValueError, match=f"--update-weight-disk-dir {tmp_path}"):
            choice(True, **files)
        assert (tmp_path / ".weight_v0.3.tmp-99-0123abcd").is_dir(), (
            "the other run may be writing it"
        )
    finally:
        other.kill()
        other.communicate()
    monkeypatch.setattr(disk, "LEAVE_SECONDS", 30.0)
    assert choice(True, **files) == choice(True, **files) == "disk"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".mine.tmp-1",
        disk.LOCK,
        "weight_v0.2",
    ]


def test_the_hook_after_writing_gets_folder_and_engines(tmp_path: Path) -> None:
    hook = tmp_path / "hook.py"
    hook.write_text(
        "seen = []\n"
        "def after(args, version_dir, engines):\n"
        "    seen.append((version_dir, engines))\n"
    )
    settings = sync_settings(
        update_weight_transport="disk",
        update_weight_disk_dir=str(tmp_path),
        hf_checkpoint=str(tmp_path),
        custom_update_weight_post_write_path=f"{hook}:after",
    )
    transport: Any = create_transport(settings, True)
    transport.written(tmp_path / "weight_v0.1", ["engine"])
    assert transport.written.__closure__  # bound to the user's function
    from slime.config.hooks import load_function

    function = load_function(f"{hook}:after")
    assert function.__globals__["seen"] == [(str(tmp_path / "weight_v0.1"), ["engine"])]


SLOTS = {"a": range(0, 1), "b": range(2, 4), "c": range(1, 2)}


def ranks(world_size: int = 4, same_host: bool = True, **flags: Any) -> dict[str, range]:
    return ranks_of_engines(sync_settings(**flags), list(SLOTS), SLOTS, world_size, same_host)


RANK_0 = {url: range(1) for url in SLOTS}


def test_engines_read_from_rank_0_unless_they_share_gpus_with_the_trainer(on_gpus: None) -> None:
    assert ranks() == RANK_0
    assert ranks(colocate=True, update_weight_transport="disk") == RANK_0
    assert ranks(1, colocate=True) == RANK_0


def test_each_tensor_parallel_rank_reads_from_the_training_rank_on_its_gpu(on_gpus: None) -> None:
    assert ranks(colocate=True) == SLOTS
    assert ranks(colocate=True, same_host=False) == SLOTS, (
        "every handle is opened on the node of its GPU"
    )
    with pytest.raises(ValueError, match="engine b is on a GPU without a training rank"):
        ranks(3, colocate=True)  # its second GPU is nobody's


def test_on_the_cpu_pairs_are_made_where_they_can_be() -> None:
    assert ranks(colocate=True) == SLOTS
    assert ranks(3, colocate=True) == ranks(colocate=True, same_host=False) == RANK_0


MANY = {f"engine {i}": range(2 * i, 2 * i + 2) for i in range(40)}


def senders(
    urls: Iterable[str] = MANY, world_size: int = 16, same_host: bool = False, **flags: Any
) -> dict[str, int]:
    found = ranks_of_engines(sync_settings(**flags), list(urls), MANY, world_size, same_host)
    assert all(len(ranks) == 1 for ranks in found.values()), "a broadcast has one root"
    return {url: ranks[0] for url, ranks in found.items()}


def test_engines_of_broadcasts_are_divided_among_senders_on_different_nodes(on_gpus: None) -> None:
    assert Counter(senders().values()) == {0: 14, 5: 13, 10: 13}, (
        "at most sixteen engines to a sender"
    )
    assert Counter(senders(update_weight_senders=4).values()) == {0: 10, 4: 10, 8: 10, 12: 10}
    assert set(senders(update_weight_senders=1).values()) == {0}
    assert set(senders(list(MANY)[:16]).values()) == {0}
    assert set(senders(world_size=2, update_weight_senders=8).values()) == {0, 1}, (
        "no more senders than ranks"
    )
    assert len(set(senders(list(MANY)[:3], update_weight_senders=8).values())) == 3, (
        "or than engines"
    )
    assert set(senders(update_weight_transport="disk", update_weight_senders=4).values()) == {0}


def test_an_engine_keeps_its_sender_when_another_is_lost(on_gpus: None) -> None:
    before = senders(update_weight_senders=4)
    after = senders([url for url in MANY if url != "engine 7"], update_weight_senders=4)
    assert {url: rank for url, rank in before.items() if url != "engine 7"} == after


def test_senders_are_for_broadcasts_only() -> None:
    assert set(senders(same_host=True, update_weight_senders=4).values()) == {0}, "shared memory"
    assert set(senders(same_host=False, update_weight_senders=4).values()) == {0, 4, 8, 12}


def test_buckets_of_broadcasts_between_gpus_are_larger(on_gpus: None) -> None:
    assert create_transport(sync_settings(), False).bucket_bytes == 2**30
    assert create_transport(sync_settings(colocate=True), True).bucket_bytes == 2**29


@pytest.mark.parametrize("flag, buckets", [(None, 1), (8, 3), (16, 2)])
def test_the_flag_for_the_size_of_buckets_wins(flag: int | None, buckets: int) -> None:
    tensors = [(f"w{i}", torch.zeros(2)) for i in range(3)]  # of 8 bytes each
    settings = sync_settings(update_weight_buffer_size=flag)
    assert len(list(sent_buckets(settings, tensors, 2**20, []))) == buckets
