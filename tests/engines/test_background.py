"""The event loop on a thread of its own, for which synchronous code waits."""

from __future__ import annotations

import asyncio

import pytest

from slime.engines.background import run


@pytest.mark.parametrize("in_a_task", [False, True])
@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt])
def test_a_function_that_exits_ends_neither_the_loop_nor_the_wait(
    in_a_task: bool, raised: type[BaseException]
) -> None:
    async def exits() -> None:
        await asyncio.sleep(0)
        raise raised(3)

    async def waits() -> None:
        await (asyncio.create_task(exits()) if in_a_task else exits())

    with pytest.raises(RuntimeError, match=rf"{raised.__name__}\(3\)"):
        run(waits())
    assert run(asyncio.sleep(0, "goes on")) == "goes on"
