"""Call user functions, synchronous or asynchronous, with only the keyword arguments that they accept."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from slime.config.hooks import is_async


@functools.lru_cache(maxsize=256)
def parameters(fn: Callable[..., object]) -> tuple[frozenset[str], bool]:
    """Return the names of a function's parameters, and whether it accepts any keyword (``**kwargs``)."""
    found = inspect.signature(fn).parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in found.values())
    return frozenset(found), anything


def supported_kwargs(fn: Callable[..., object], **keywords: object) -> dict[str, Any]:
    """Return the entries of ``keywords`` that ``fn`` accepts."""
    names, anything = parameters(fn)
    return {name: value for name, value in keywords.items() if anything or name in names}


async def call(fn: Callable[..., object], *args: object, threads: Executor | None = None, **keywords: object) -> Any:
    """Await an async function; run a synchronous one in a thread, so that it cannot block the event loop.

    Args:
        threads: Executor for a synchronous function. Default: that of the event loop, which has only a few more threads
            than the machine has cores.
    """
    if is_async(fn):
        answer: Any = fn(*args, **keywords)
        return await answer
    # run_in_executor does not copy the context. Without the copy, context variables (traces, the schedule of the run)
    # would be unset in the user function.
    run = functools.partial(contextvars.copy_context().run, fn, *args, **keywords)
    result = await asyncio.get_running_loop().run_in_executor(threads, run)
    return await result if inspect.isawaitable(result) else result
