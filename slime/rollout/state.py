"""What the tasks of one run share: tokenizer, sampling parameters, the limit of requests in flight, the abort flag."""

from __future__ import annotations

import asyncio
import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias

from slime.config.hf_config import media_token_ids
from slime.config.machine import connection_limit
from slime.config.rollout import context_limit, served_context
from slime.data.sample import Group
from slime.rollout.settings import RequestSettings, request_params
from slime.rollout.weight_timeline import WeightTimeline
from slime.types import Tokenizer

if TYPE_CHECKING:
    from slime.config.args import Args

Observer = Callable[[str, Group, dict[str, Any]], None]
"""Called on the event loop with an event, the group, and facts of the event:

``asked`` (it came from the data source), ``started``, ``continued`` (an engine ended a request that nobody aborted),
``generated`` (all its samples are finished and scored), then one of ``accepted`` (``rollout_id``: the step that trains
it), ``filtered`` (``reason``), ``replaced`` (its verifier gave no answers), ``given_back`` (to the data source)."""

Reference: TypeAlias = "weakref.ref[Args] | Args"
"""Weak, except to a value that cannot be referred to weakly, as a test's SimpleNamespace."""
_KEPT_WITHOUT_WEAKREF = 8
_MOST_THREADS = 4096  # a process cannot have many more; plain functions beyond it wait for their turn
_lock = threading.Lock()
_states: OrderedDict[int, tuple[Reference, GenerateState]] = OrderedDict()


class GenerateState:
    """One per configuration object: ``GenerateState(args)`` gives the same one for the same ``args``.

    It lives as long as ``args`` does, so nothing leaks from one run into the next in the same process.

    Attributes:
        seed: from which the seeds of all samples are derived (``--rollout-seed``).
        sampling_params: of a training request; copy before changing.
        requests: how a request is sent.
        context: tokens that prompt and response may have together; None where nothing says so.
        served: tokens of the longest sequence that the engines take, see :func:`~slime.config.rollout.served_context`.
        media_token_ids: stand for images and the like in the model's input; none for a text model.
        aborted: the rollout has what it needs; tasks that have not begun leave their samples ABORTED.
        rollout_id: the rollout under way.
        eval_rollout_id: the evaluation under way; in a fully asynchronous run both are.
        eval_datasets: read once, by their settings.
        encoded: the text that was tokenised last, and its ids.
        pool: the standing pool of a fully asynchronous run.
        observer: told what becomes of each group: ``observer(event, group, facts)``; see :data:`Observer`.
        schedule: of an asynchronous run, see :mod:`slime.rollout.weight_timeline`.
        warned_of_media: an engine read a sample with media as other tokens, and a warning said so.
    """

    pool: Any

    def __new__(cls, args: Args) -> GenerateState:
        with _lock:
            held = _states.get(id(args))
            if held is not None and _target(held[0]) is args:
                return held[1]
            state = super().__new__(cls)
            try:
                state._start(args)
            except AttributeError as error:
                error.add_note("functions of slime.rollout need the `args` that hooks get, or all attributes of it")
                raise
            _states[id(args)] = (_reference(args), state)
            strong = [key for key, (reference, _) in _states.items() if not isinstance(reference, weakref.ref)]
            for key in strong[:-_KEPT_WITHOUT_WEAKREF]:
                del _states[key]
            return state

    def _start(self, args: Args) -> None:
        self._args = _reference(args)
        self.context, self.served = context_limit(args), served_context(args)
        self.media_token_ids = frozenset(media_token_ids(args.hf_checkpoint))
        self.seed, self.requests = args.rollout_seed, RequestSettings.from_args(args)
        self.sampling_params = request_params(args)
        if self.media_token_ids:  # the model must not write them: see prompts.cut_at_sampled_media
            given = self.sampling_params["stop_token_ids"] or []
            self.sampling_params["stop_token_ids"] = sorted({*given, *self.media_token_ids})
        self.eval_datasets: dict[bytes, Any] = {}
        self.encoded: tuple[str, list[int]] = "", []
        self.pool = None
        self.observer: Observer | None = None
        self.schedule: WeightTimeline | None = None
        self.warned_of_media = False
        self.eval_rollout_id: int | None = None
        self._semaphores: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        self.reset()

    @property
    def args(self) -> Args:
        """What users' functions get."""
        args = _target(self._args)
        assert args is not None, "a state is reached through its args only, so they are alive"
        return args

    def reset(self) -> None:
        """Prepare for another rollout."""
        self.aborted = False
        self.rollout_id: int | None = None

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of ``--hf-checkpoint``, loaded when first asked for."""
        from slime.data.tokenizers import load_tokenizer

        return load_tokenizer(self.args.hf_checkpoint, **self._trust())

    @functools.cached_property
    def processor(self) -> Any:
        """Processor of ``--hf-checkpoint`` for multimodal inputs; None for text-only models."""
        from slime.data.tokenizers import load_processor

        return load_processor(self.args.hf_checkpoint, **self._trust())

    def _trust(self) -> dict[str, bool]:
        return {"trust_remote_code": True} if self.args.trust_remote_code else {}

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
        return min(concurrency(self.args), connection_limit(self.args.sglang_router_ip))


def concurrency(args: Args) -> int:
    """Requests in flight over all engines that answer for the trained model."""
    return max(1, args.sglang_server_concurrency * engine_count(args))


def engine_count(args: Args) -> int:
    """Engines behind the first router that decode."""
    from slime.engines.plan import plan_engines

    if args.rollout_external_engine_addrs:
        return len(args.rollout_external_engine_addrs)
    if args.sglang_config:
        specs = plan_engines(args)
        return sum(spec.model == specs[0].model and spec.worker_type != "prefill" for spec in specs)
    engines = args.rollout_num_gpus // args.rollout_num_gpus_per_engine
    return max(1, engines - (args.prefill_num_servers or 0))


def _reference(args: Args) -> Reference:
    try:
        return weakref.ref(args, functools.partial(_forget, id(args)))
    except TypeError:  # SimpleNamespace
        return args


def _target(reference: Reference) -> Args | None:
    return reference() if isinstance(reference, weakref.ref) else reference


def _forget(
    key: int, reference: Reference, states: OrderedDict[int, tuple[Reference, GenerateState]] = _states
) -> None:
    held = states.get(key)  # an argument, since the module's names may be gone when the interpreter ends
    if held is not None and held[0] is reference:
        states.pop(key, None)
