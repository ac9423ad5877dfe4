"""The processes of a run by their roles, for tests and benchmarks that send signals to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import psutil

MARK = "SLIME_TEST_RUN"
"""A variable in the environment of a run, by which all of its processes are found. Verifiers have a
reduced environment and need ``--verifier-env SLIME_TEST_RUN``."""
SCRIPTS = ("train.py", "train_async.py")

Words = Sequence[str]
ROLES: dict[str, Callable[[Words], bool]] = {
    "engine": lambda words: (
        "slime.plugins.embedded.server" in words and "slime.engines.guard" not in words
    ),
    "engine actor": lambda words: words[0].startswith("ray::EngineActor"),
    "router": lambda words: words[0].startswith("sglang::router"),
    "rank": lambda words: words[0].startswith("ray::TrainActor"),
    "manager": lambda words: words[0].startswith("ray::RolloutManager"),
    "verifier": lambda words: "slime.rollout.verifier.worker" in words,
    "worker": lambda words: words[0].startswith("ray::RolloutWorker"),
    # The supervisor has the script on its command line as well, but behind its own.
    "driver": lambda words: len(words) > 1 and words[1].endswith(SCRIPTS),
    "raylet": lambda words: words[0].endswith("/raylet"),
    "GCS": lambda words: words[0].endswith("/gcs_server"),
}
"""By name, whether a command line is one of this role."""


def alive(mark: str) -> list[psutil.Process]:
    """Processes with this mark in their environment that have not ended."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def command_line(process: psutil.Process) -> list[str]:
    """The words of a command line; those of a process that has ended are ``[""]``."""
    try:
        return process.cmdline() or [process.name()]
    except psutil.Error:
        return [""]


def of_role(mark: str, role: str) -> list[psutil.Process]:
    """The processes of a run that have this role, oldest first."""
    found = [process for process in alive(mark) if ROLES[role](command_line(process))]
    return sorted(found, key=lambda process: process.pid)
