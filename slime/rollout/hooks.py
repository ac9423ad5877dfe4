"""Calling the functions that users give: sync or async, with the keywords that they take."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any


@functools.lru_cache(maxsize=256)
def parameters(fn: Callable[..., object]) -> tuple[frozenset[str], bool]:
    """Names of a function's parameters, and whether it takes any keyword."""
    found = inspect.signature(fn).parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in found.values())
    return frozenset(found), anything


def supported_kwargs(fn: Callable[..., object], **keywords: object) -> dict[str, Any]:
    """The entries of ``keywords`` that ``fn`` accepts by its signature."""
    names, anything = parameters(fn)
    return {name: value for name, value in keywords.items() if anything or name in names}


def is_async(fn: Callable[..., object]) -> bool:
    """Whether calling ``fn`` gives a coroutine, also for callable objects."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


async def call(fn: Callable[..., object], *args: object, threads: Executor | None = None, **keywords: object) -> Any:
    """Await an async function; run a plain one in a thread, so that it cannot stop the event loop.

    Args:
        threads: where a plain function runs; default: the event loop's own threads, some few more than the cores.
    """
    if is_async(fn):
        answer: Any = fn(*args, **keywords)
        return await answer
    run = functools.partial(contextvars.copy_context().run, fn, *args, **keywords)
    result = await asyncio.get_running_loop().run_in_executor(threads, run)
    return await result if inspect.isawaitable(result) else result
