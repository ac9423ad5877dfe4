"""Generation that is ended so that a run can go back to a snapshot."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError

import pytest

from slime.cluster.generation import Generation, GenerationEnded
from slime.cluster.polling import WaitExpired
from slime.engines.background import run


def test_calls_in_progress_end_with_their_last_words() -> None:
    generation, begun, said = Generation(), threading.Event(), list[str]()

    async def forever() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            said.append("groups returned")

    def rollout() -> None:
        with generation.call():
            try:
                run(forever())
            except CancelledError:
                said.append("cancelled")

    thread = threading.Thread(target=rollout)
    thread.start()
    begun.wait()
    generation.end()
    assert said == ["groups returned", "cancelled"]
    thread.join()
    with pytest.raises(GenerationEnded), generation.call():
        pass
    generation.begin()
    with generation.call():
        assert run(asyncio.sleep(0, "next")) == "next"


def test_a_call_that_blocks_its_thread_is_not_waited_for_without_end() -> None:
    generation, begun, release = Generation(), threading.Event(), threading.Event()

    def stubborn() -> None:
        with generation.call():
            begun.set()
            release.wait()

    thread = threading.Thread(target=stubborn)
    thread.start()
    begun.wait()
    with pytest.raises(WaitExpired, match="generation in progress"):
        generation.end(0.05)
    release.set()
    thread.join()
