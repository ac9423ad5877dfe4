"""Actors of a run in one process."""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path

import pytest

from slime.plugins.actors.inline_actors import InlineActors


def test_a_line_is_logged_once_though_actors_start_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actors = InlineActors()
    actors.connect()
    both = threading.Barrier(2)
    mkdir = Path.mkdir

    def slow(path: Path, *args: int, **options: bool) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)  # the other one comes this far, unless it has to wait
        mkdir(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", slow)
    threads = [
        threading.Thread(target=actors.log_to, args=(tmp_path / "logs", name)) for name in "ab"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    logging.getLogger("slime.somewhere").warning("a line")
    actors.disconnect()
    logging.getLogger("slime.somewhere").warning("of another run")
    text = (tmp_path / "logs" / "inline.log").read_text()
    assert text.count("a line") == 1 and "of another run" not in text
