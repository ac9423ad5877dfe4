"""What the tasks of one run share: tokenizer, sampling parameters, the limit of requests in flight, the abort flag."""

from __future__ import annotations

import asyncio
import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from slime.config.context import context_limit
from slime.config.hf_config import media_token_ids
from slime.config.machine import connection_limit
from slime.data.sample import Group
from slime.rollout.sampling_params import sampling_params
from slime.rollout.schedule import Schedule

Observer = Callable[[str, Group, dict[str, Any]], None]
"""Called on the event loop with an event, the group, and facts of the event:

``asked`` (it came from the data source), ``started``, ``continued`` (an engine ended a request that nobody aborted),
``generated`` (all its samples are finished and scored), then one of ``accepted`` (``rollout_id``: the step that trains
it), ``filtered`` (``reason``), ``replaced`` (its verifier gave no answers), ``given_back`` (to the data source)."""

_KEPT_WITHOUT_WEAKREF = 8
_MOST_THREADS = 4096  # a process cannot have many more; plain functions beyond it wait for their turn
_lock = threading.Lock()
_states: OrderedDict[int, tuple[Any, GenerateState]] = OrderedDict()


class GenerateState:
    """One per configuration object: ``GenerateState(args)`` gives the same one for the same ``args``.

    It lives as long as ``args`` does, so nothing leaks from one run into the next in the same process.

    Attributes:
        sampling_params: defaults of training requests; copy before changing.
        context: tokens that prompt and response may have together; None where nothing says so.
        media_token_ids: stand for images and the like in the model's input; none for a text model.
        aborted: the rollout has what it needs; tasks that have not begun leave their samples ABORTED.
        rollout_id: the rollout under way.
        eval_rollout_id: the evaluation under way; in a fully asynchronous run both are.
        eval_datasets: read once, by their settings.
        encoded: the text that was tokenised last, and its ids.
        pool: the standing pool of a fully asynchronous run.
        observer: told what becomes of each group: ``observer(event, group, facts)``; see :data:`Observer`.
        schedule: of an asynchronous run, see :mod:`slime.rollout.schedule`.
    """

    args: Any
    sampling_params: dict[str, Any]
    context: int | None
    media_token_ids: frozenset[int]
    aborted: bool
    rollout_id: int | None
    eval_rollout_id: int | None
    eval_datasets: dict[bytes, Any]
    encoded: tuple[str, list[int]]
    pool: Any
    observer: Observer | None
    schedule: Schedule | None

    def __new__(cls, args: Any) -> GenerateState:
        with _lock:
            held = _states.get(id(args))
            if held is not None and _target(held[0]) is args:
                return held[1]
            state = super().__new__(cls)
            state._start(args)
            _states[id(args)] = (_reference(args), state)
            strong = [key for key, (reference, _) in _states.items() if not isinstance(reference, weakref.ref)]
            for key in strong[:-_KEPT_WITHOUT_WEAKREF]:
                del _states[key]
            return state

    def _start(self, args: Any) -> None:
        self._args = _reference(args)
        self.context = context_limit(args)
        self.media_token_ids = frozenset(media_token_ids(getattr(args, "hf_checkpoint", None)))
        self.sampling_params = sampling_params(args)
        if self.media_token_ids:  # the model must not write them: see prompts.cut_at_sampled_media
            given = self.sampling_params["stop_token_ids"] or []
            self.sampling_params["stop_token_ids"] = sorted({*given, *self.media_token_ids})
        self.eval_datasets = {}
        self.encoded = "", []
        self.pool = None
        self.observer = None
        self.schedule = None
        self.eval_rollout_id = None
        self._semaphores: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        self.reset()

    def reset(self) -> None:
        """Ready for another rollout."""
        self.aborted = False
        self.rollout_id = None

    @functools.cached_property
    def tokenizer(self) -> Any:
        """Tokenizer of ``--hf-checkpoint``, loaded when first asked for."""
        from slime.utils.processing_utils import load_tokenizer

        return load_tokenizer(_target(self._args).hf_checkpoint, **self._trust())

    @functools.cached_property
    def processor(self) -> Any:
        """Processor of ``--hf-checkpoint`` for multimodal inputs; None for text-only models."""
        from slime.utils.processing_utils import load_processor

        return load_processor(_target(self._args).hf_checkpoint, **self._trust())

    def _trust(self) -> dict[str, bool]:
        return {"trust_remote_code": True} if getattr(_target(self._args), "trust_remote_code", False) else {}

    @property
    def semaphore(self) -> asyncio.Semaphore:
        """Limits generations in flight to ``--sglang-server-concurrency`` per engine, and to what this machine's ports
        and open files allow."""
        loop = asyncio.get_running_loop()
        if loop not in self._semaphores:
            self._semaphores[loop] = asyncio.Semaphore(self._in_flight)
        return self._semaphores[loop]

    @functools.cached_property
    def threads(self) -> Executor:
        """Where users' plain functions run, as many at once as generations are in flight: they wait for engines, so
        the number of cores, which limits an event loop's own threads, must not limit them. Threads start as needed, at
        most 4,096."""
        return ThreadPoolExecutor(min(self._in_flight, _MOST_THREADS), thread_name_prefix="hook")

    @functools.cached_property
    def _in_flight(self) -> int:
        return min(concurrency(_target(self._args)), connection_limit())


def concurrency(args: Any) -> int:
    """Requests in flight over all engines that answer for the trained model."""
    return max(1, (getattr(args, "sglang_server_concurrency", None) or 512) * engine_count(args))


def engine_count(args: Any) -> int:
    """Engines behind the first router that decode."""
    from slime.engines.plan import plan_engines

    external = getattr(args, "rollout_external_engine_addrs", None)
    if external:
        return len(external)
    if getattr(args, "sglang_config", None):
        specs = plan_engines(args)
        return sum(spec.model == specs[0].model and spec.worker_type != "prefill" for spec in specs)
    gpus = getattr(args, "rollout_num_gpus", None) or 1
    per_engine = getattr(args, "rollout_num_gpus_per_engine", None) or 1
    return max(1, gpus // per_engine - (getattr(args, "prefill_num_servers", None) or 0))


def _reference(args: Any) -> Any:
    try:
        return weakref.ref(args, functools.partial(_forget, id(args)))
    except TypeError:  # SimpleNamespace
        return args


def _target(reference: Any) -> Any:
    return reference() if isinstance(reference, weakref.ref) else reference


def _forget(key: int, reference: Any) -> None:
    held = _states.get(key)
    if held is not None and held[0] is reference:
        _states.pop(key, None)
