"""What this machine allows."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from make_args import make_args

from slime.config import machine
from slime.config.cluster import check_machine
from slime.config.machine import Machine, connection_limit, raise_file_limit
from slime.config.rules import Run


@pytest.mark.parametrize(
    ("router", "ports", "files", "limit"),
    [
        ("192.0.2.7", "32768\t60999\n", 1_000_000, 28232 * 9 // 10),
        ("router.example", "32768\t60999\n", 1_000_000, 28232 * 9 // 10),
        ("::1", "32768\t60999\n", 1_000_000, 28232 * 9 // 10),
        ("192.0.2.7", "32768\t60999\n", 20_000, 9000),
        ("192.0.2.7", "32768\t60999\n", resource.RLIM_INFINITY, 28232 * 9 // 10),
        ("127.0.0.1", "32768\t60999\n", 1_000_000, 450_000),
        (None, "32768\t60999\n", 20_000, 9000),
        (None, "32768\t60999\n", resource.RLIM_INFINITY, 28232 * 254 * 9 // 10),
        (None, "", 1000, 450),
    ],
)
def test_requests_under_way_are_bounded_by_ports_and_files(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    router: str | None,
    ports: str,
    files: int,
    limit: int,
) -> None:
    (tmp_path / "ports").write_text(ports)
    monkeypatch.setattr(resource, "getrlimit", lambda what: (256, files))
    assert connection_limit(router, tmp_path / "ports") == limit


def test_a_limit_of_the_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.config.cluster.connection_limit", lambda router: 25_000)
    here = Machine(gpus=64, cores=8, in_cluster=False)
    for engines, told in ((48, False), (56, True)):
        args = make_args(
            rollout_num_gpus=engines, rollout_num_gpus_per_engine=1, sglang_server_concurrency=512
        )
        check_machine(Run(args, machine=here))
        notices = [
            notice
            for notice in args.notices
            if "concurrent requests; they are limited to 25000" in notice
        ]
        assert bool(notices) == told


async def test_the_client_keeps_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from slime.rollout.state import GenerateState

    monkeypatch.setattr("slime.rollout.state.connection_limit", lambda router: 3)
    args = make_args(hf_checkpoint=None, rollout_num_gpus=2)
    state = GenerateState(args)
    assert state.semaphore._value == state.threads._max_workers == 3  # type: ignore[attr-defined]


def test_the_soft_limit_of_open_files_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        machine.resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
