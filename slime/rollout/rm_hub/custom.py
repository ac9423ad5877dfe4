"""Run users' rewards: functions on an event loop of their own, and reward model classes in a
process of their own.

The event loop runs in its own thread, next to that of the rollout, and each call has the time limit
``--reward-timeout``. A function that blocks the loop (symbolic algebra inside an ``async def``, a
request without a time limit) therefore delays other rewards at most, and never generation. A loop
that is blocked for longer than the limit is abandoned: the function that blocks it counts as timed
out, and the other calls start again on a new loop. Objects that are bound to an event loop
(clients, semaphores) must therefore be created inside the reward function and not be shared with
the generate function.

A reward model class has ``__init__(self, model_path)`` and ``compute_reward(self, prompts,
responses) -> list``. ``--custom-rm-path`` may name such a class. Its constructor gets
``--rm-model-path``, or nothing if it is not set. ``compute_reward`` may have the parameters
``labels`` and ``metadata`` as well (lists as long as ``prompts``). The model is created once per
run, and scores a batch (the samples of a group) at a time. It does not share an interpreter with
the rollout, so it cannot block it, and if it hangs, its process is killed and replaced.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.config.hooks import is_async, load_function
from slime.data.sample import Message, Sample
from slime.engines.background import serve_forever
from slime.observability.progress import DEBUGGER
from slime.rollout.base_types import supported_kwargs
from slime.rollout.rm_hub.outcome import RAISED, mark_unscored
from slime.rollout.verifier.pool import default_workers, shared_pool
from slime.types import JsonObject, JsonValue

if TYPE_CHECKING:
    from slime.config.data import RewardConfig

logger = logging.getLogger(__name__)
_BEAT = 0.1  # seconds between two checks of the open calls
_MOST_STARTS = 3  # attempts for a call whose event loop was blocked by another call


class RewardTimeout(TimeoutError):
    """A reward function exceeded its time limit."""


@dataclass(eq=False)
class _Call:
    start: Callable[[], Any]
    blocking: bool  # a synchronous function, which runs in a thread
    limit: float
    used: float = 0.0  # seconds during which the loop was free to run the call
    running: bool = False  # False while the call waits for a thread
    expired: bool = False


class _Host:
    """An event loop on a daemon thread, with a limit on the synchronous functions that run at
    once.
    """

    def __init__(self, threads: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.open: dict[asyncio.Task[Any], _Call] = {}
        self.last_beat = time.monotonic()
        self.stuck = False
        self._threads = asyncio.Semaphore(threads)
        # task that runs, since when
        self._found: tuple[asyncio.Task[Any] | None, float] = (None, 0.0)
        self._thread = threading.Thread(
            target=serve_forever, args=(self.loop,), name="custom-rewards", daemon=True
        )
        self._thread.start()

    async def timed(self, call: _Call) -> Any:
        """Run one call. Its time counts from here, or for a synchronous function from the moment it
        gets a thread.
        """
        task = asyncio.current_task()
        assert task is not None
        if not self.open:
            self.last_beat = DEBUGGER.clock()
            self._beat = self.loop.create_task(self._watch())
        self.open[task] = call
        try:
            if call.blocking:
                async with self._threads:
                    result = await self._in_thread(call)
            else:
                call.running = True
                result = call.start()
            return await result if inspect.isawaitable(result) else result
        finally:
            del self.open[task]
            if not self.open:
                self._beat.cancel()

    async def _in_thread(self, call: _Call) -> Any:
        """Run a synchronous function in its own daemon thread.

        A pool of threads would lose a thread to each call that hangs, and would wait for it when
        the process exits.
        """
        future: asyncio.Future[Any] = self.loop.create_future()
        call.running = True

        def settle(result: object, error: BaseException | None) -> None:
            if not future.done():
                future.set_result(result) if error is None else future.set_exception(error)

        def work() -> None:
            try:
                answer: tuple[Any, BaseException | None] = (call.start(), None)
            except BaseException as error:  # any error is raised in the caller
                answer = (None, error)
            self.loop.call_soon_threadsafe(settle, *answer)

        thread = threading.Thread(target=work, name="custom-reward", daemon=True)
        thread.start()
        try:
            return await future
        finally:
            if future.cancelled():  # the call timed out; a thread cannot be ended, so remember it
                left_threads.append(thread)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_BEAT)
            now = DEBUGGER.clock()
            # While one call blocks the loop, this task does not run either. The cap keeps that time
            # from being charged to the other calls.
            spent = min(now - self.last_beat, 2 * _BEAT)
            self.last_beat = now
            for task, call in list(self.open.items()):
                call.used += spent if call.running else 0.0
                if call.used > call.limit:
                    call.expired = True
                    task.cancel()

    def blocked_call(self, limit: float) -> _Call | None:
        """Return the call that was running at every check for ``limit`` seconds, or None.

        That the loop is late is not enough: if many short calls are ready at once, one iteration of
        the loop runs all of them, and none of them blocks it.
        """
        task = asyncio.current_task(self.loop)
        now = DEBUGGER.clock()
        if task is not self._found[0]:
            self._found = (task, now)
        return self.open.get(task) if task is not None and now - self._found[1] > limit else None

    def position(self) -> str:
        """The file and line that the thread of the loop is executing."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"


# threads of synchronous functions that timed out and still run
left_threads: list[threading.Thread] = []
MOST_LEFT = 64
_lock = threading.Lock()
_host: _Host | None = None


def _current(threads: int) -> _Host:
    global _host
    with _lock:
        if _host is None or _host.stuck:
            _host = _Host(threads)
        return _host


async def call_bounded(
    limit: float, threads: int | None, fn: Callable[..., object], *args: object, **keywords: object
) -> Any:
    """Call a reward function, synchronous or async, from any event loop.

    Args:
        limit: Maximum seconds of the call.
        threads: Maximum number of synchronous functions that run at once. Default: half of the
            cores.

    Raises:
        RewardTimeout: The function took longer, or blocked the event loop of the rewards for
            longer.
    """
    # A thread of a synchronous function cannot be ended. Too many that hang mean that more would
    # hang as well.
    count = threads or default_workers()
    left_threads[:] = [thread for thread in left_threads if thread.is_alive()]
    if not is_async(fn) and len(left_threads) >= MOST_LEFT:
        raise RewardTimeout(
            f"{MOST_LEFT} earlier calls of synchronous reward functions hang in threads that "
            "cannot be killed: no more are started. Give them time limits, or use "
            "slime.rollout.rm_hub.outcome.verify, which can be killed"
        )
    # A call whose loop another call blocked begins again on a new loop, within bounds.
    for _ in range(_MOST_STARTS):
        host = _current(count)
        call = _Call(functools.partial(fn, *args, **keywords), not is_async(fn), limit)
        future = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(host.timed(call), host.loop))
        try:
            while not future.done() and not host.stuck and not call.expired:
                await asyncio.wait({future}, timeout=min(max(limit / 4, _BEAT), 2.0))
                _look_after(host, call)
        finally:
            future.cancel()
        if call.expired:
            raise RewardTimeout(f"no answer in {limit:g} s")
        if not host.stuck or (future.done() and not future.cancelled()):
            return _result(future)
    raise RewardTimeout(
        f"other reward functions blocked it {_MOST_STARTS} times for more than {limit:g} s"
    )


def _look_after(host: _Host, call: _Call) -> None:
    blocked = host.blocked_call(call.limit)
    if blocked is None:
        return
    with _lock:  # several calls may find the blocked loop at once; only the first one reports it
        if host.stuck:
            return
        host.stuck = True
    blocked.expired = True
    logger.warning(
        "a reward function has blocked its event loop for more than %g s%s: it counts as timed "
        "out, and its thread is abandoned. Use asynchronous clients, or "
        "slime.rollout.rm_hub.outcome.verify, which can be killed.",
        blocked.limit,
        host.position(),
    )


def _result(future: asyncio.Future[object]) -> object:
    try:
        return future.result()
    except RuntimeError as error:
        if "event loop" in str(error):
            error.add_note(
                "reward functions run on an event loop of their own: create clients and locks "
                "inside them"
            )
        raise


_WORKER = "slime.rollout.rm_hub.custom"
DEFAULT_CLASS = "CustomRewardModel"  # the class if --custom-rm-path names only a file
_models: dict[tuple[str, str | None], Any] = {}  # used in the worker process


async def model_rewards(
    reward: RewardConfig,
    path: str,
    model_class: type,
    samples: Sequence[Sample],
    responses: Sequence[str],
) -> list[Any] | None:
    """Score all samples with one call of ``compute_reward``.

    Args:
        responses: The texts to score, one per sample; see :func:`slime.rollout.ends.spoken`.

    Returns:
        The rewards in the order of the samples. None if the call timed out, its process crashed,
        the model could not be created, or ``compute_reward`` raised an exception; all samples are
        then marked as unscored.

    Raises:
        TypeError: The class has no method ``compute_reward``.
        ValueError: The class needs a model path, but ``--rm-model-path`` is not set.
    """
    model_path = reward.rm_model_path
    check_class(model_class, model_path)
    columns = [
        [sample.prompt for sample in samples],
        list(responses),
        [sample.label for sample in samples],
        [sample.metadata for sample in samples],
    ]
    setup = (f"{_WORKER}:load", path, model_path)
    # One process per model, which needs more memory than a verifier.
    pool = shared_pool(1, reward.verifier_env or (), memory_bytes=0, of=(path, model_path))
    verdict = await pool.run(
        f"{_WORKER}:compute", path, model_path, *columns, timeout=reward.reward_timeout, setup=setup
    )
    if verdict.ok:
        assert isinstance(verdict.value, list), "compute() returns a list"
        return verdict.value
    status = RAISED if verdict.status == "error" else verdict.status
    for sample in samples:
        mark_unscored(sample, status, f"{path}: {verdict.detail}")
    return None


def check_class(model_class: type, model_path: str | None) -> None:
    """Check that the class can be instantiated and called. The errors are those of
    :func:`model_rewards`.
    """
    if not callable(getattr(model_class, "compute_reward", None)):
        raise TypeError(
            f"reward model class {model_class.__name__} has no compute_reward(prompts, responses)"
        )
    required = [
        name
        for name, parameter in inspect.signature(model_class).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if model_path is None and required:
        raise ValueError(
            f"reward model class {model_class.__name__} needs {', '.join(required)}: set "
            "--rm-model-path to the folder or name that its __init__ loads"
        )


# --- in the model's process ------------------------------------------------------------------


def load(path: str, model_path: str | None) -> None:
    """Create the model, once per process."""
    if (path, model_path) not in _models:
        model_class = load_function(path, DEFAULT_CLASS)
        takes_path = model_path is not None and bool(inspect.signature(model_class).parameters)
        _models[path, model_path] = model_class(model_path) if takes_path else model_class()


def compute(
    path: str,
    model_path: str | None,
    prompts: list[str | list[Message]],
    responses: list[str],
    labels: list[JsonValue],
    metadata: list[JsonObject],
) -> list[Any]:
    """Return the rewards of one batch, as floats or dicts."""
    load(path, model_path)
    function = _models[path, model_path].compute_reward
    rewards = function(
        prompts, responses, **supported_kwargs(function, labels=labels, metadata=metadata)
    )
    if inspect.isawaitable(rewards):
        rewards = asyncio.run(asyncio.wait_for(rewards, None))
    return [dict(reward) if isinstance(reward, dict) else float(reward) for reward in rewards]
