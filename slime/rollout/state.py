"""State that all tasks of a run share: tokenizer, sampling parameters, limit of requests in flight,
abort flag.

The settings are made once from the arguments. User functions get ``args`` itself.
"""

from __future__ import annotations

import asyncio
import functools
import math
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from slime.config.engine import FIRST_CONCURRENCY
from slime.config.hf_config import media_token_ids, model_config
from slime.config.lora import engine_adapter
from slime.config.machine import connection_limit
from slime.config.rollout import RolloutConfig, context_limit, served_context
from slime.config.seeds import derive_seed
from slime.data.sample import Group, Sample
from slime.data.tokenizers import end_ids, load_processor, load_tokenizer
from slime.engines.launch import engine_count
from slime.rollout.weight_timeline import WeightTimeline
from slime.types import SamplingParams, Tokenizer

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.config.engine import EngineConfig
    from slime.rollout.group import GroupGenerator

T = TypeVar("T")
_POLICIES_WITH_KEYS = ("consistent_hashing", "manual")


def request_params(rollout: RolloutConfig) -> SamplingParams:
    """Return SGLang's ``sampling_params`` of a training request, without the seed."""
    return {
        "temperature": rollout.rollout_temperature, "top_p": rollout.rollout_top_p, "top_k": rollout.rollout_top_k,
        "max_new_tokens": rollout.rollout_max_response_len,
        "stop": rollout.rollout_stop, "stop_token_ids": rollout.rollout_stop_token_ids,
        "skip_special_tokens": rollout.rollout_skip_special_tokens,
        "no_stop_trim": True, "spaces_between_special_tokens": False,
    }  # fmt: skip


@dataclass(frozen=True)
class RequestSettings:
    """How requests are sent.

    Attributes:
        timeout: Maximum seconds of one request (``--sglang-router-request-timeout-secs``).
        embedded: Whether the engines are embedded engines, which accept media as token ids and
            report the part of the vocabulary from which a token was sampled.
        has_routing_key: Whether the router's policy reads the routing key of a session.
        returns_experts: Whether engines report the experts of each token
            (``--use-rollout-routing-replay``).
        adapter: The name of the trained adapter, for engines that load adapters by name
            (``--lora-sync adapter`` with SGLang or vLLM).
        vocabulary: The number of token ids of the model; None if config.json does not tell it.
    """

    timeout: float
    embedded: bool
    has_routing_key: bool
    returns_experts: bool
    adapter: str | None = None
    vocabulary: int | None = None


def seeded(
    seed: int, params: SamplingParams, sample: Sample, position: int, purpose: str = "sampling"
) -> SamplingParams:
    """Return ``params`` with those of the sample itself, and the seed of its next request.

    The seed depends on the run seed, the purpose, the prompt, the position, and the number of
    earlier engine calls of the sample. It does not depend on time, on the engine, or on the order
    of requests.

    Args:
        seed: The seed of the run (``--rollout-seed``).
        position: The position of the sample in its group.
        purpose: What the sample is for, such as ``sampling`` or an evaluation data set.
    """
    prompt = sample.group_index if sample.group_index is not None else sample.index
    own = cast(SamplingParams, {**params, **sample.sampling_params})
    # the data source assigns no indices: without a seed is better than one seed for all prompts
    if prompt is None:
        return own
    turn = len(sample.weight_versions)
    return {**own, "sampling_seed": derive_seed(seed, purpose, prompt, position, turn)}


Observer = Callable[[str, Group, dict[str, Any]], None]
"""Called on the event loop as ``observer(event, group, facts)``. The events of a group, in their
order:

* ``asked``: the group came from the data source.
* ``started``: its generation started.
* ``continued``: an engine ended a request that the rollout had not aborted, and generation
  continues.
* ``generated``: all its samples are finished and scored. One of the next three events follows.
* ``accepted``: it will be trained; the fact ``rollout_id`` is its rollout.
* ``filtered``: it was dropped; the fact ``reason`` says why.
* ``replaced``: its verifier gave no result.
* ``given_back``: it was returned to the data source.
"""

# a process cannot have many more; further calls of synchronous functions wait in a queue
_MOST_THREADS = 4096
_GROWTH_SECONDS = 1.0
_MORE_SLOTS = 128
EVALUATION: ContextVar[bool] = ContextVar("evaluation", default=False)
"""Whether the current task generates for an evaluation. Both go through the same functions, with
the same ``args``.
"""
_lock = threading.Lock()
states_by_args: dict[int, tuple[Callable[[], Args | None], GenerateState]] = {}
"""By the id of ``args``: a function that returns them while they exist, and their state."""


class GenerateState:
    """The shared state of one run. ``GenerateState(args)`` returns the same object for the same
    ``args``.

    It lives as long as ``args``, so no state leaks from one run into the next in the same process.

    Attributes:
        seed: The seed from which the seeds of all samples are derived (``--rollout-seed``).
        sampling_params: The sampling parameters of a training request. Copy them before you change
            them.
        requests: How requests are sent.
        served: Maximum sequence length of the engines, see
            :func:`~slime.config.rollout.served_context`.
        media_token_ids: Ids of the placeholder tokens of images and other media; empty for a text
            model.
        aborted: True if the rollout has all groups that it needs. Tasks that have not started then
            mark their samples ABORTED and send no request.
        rollout_id: The current rollout.
        eval_rollout_id: The current evaluation. A fully asynchronous run can have both at once.
        eval_datasets: The evaluation data sets by their settings; each is read once.
        encoded: The text that was tokenized last and its ids. The samples of a group have the same
            prompt.
        pool: The standing pool of a fully asynchronous run.
        observer: Called with each event of a group, see :data:`Observer`.
        schedule: The schedule of an asynchronous run, see :mod:`slime.rollout.weight_timeline`.
        generator: Where groups are generated; None: in this process.
        share: The share of the run's requests in flight that this process may send, above 0 and at
            most 1.
        repeats_placeholders: Whether the processor only repeats the placeholder of an image; None:
            not asked yet.
        weights_seen: The newest weights that have answered, as (attempt, step).
        warned_of_media: Whether the warning of :func:`slime.rollout.generate.compare_read` was
            given.
    """

    pool: Any

    def __new__(cls, args: Args) -> GenerateState:
        with _lock:
            # Args are not hashable, so states are found by id. An id can be reused after its object
            # was deleted, which is why the referenced object is compared as well.
            known = states_by_args.get(id(args))
            if known is not None and known[0]() is args:
                return known[1]
            state = super().__new__(cls)
            try:
                state._start(args)
            except AttributeError as error:
                error.add_note(
                    "slime.rollout needs the `args` that hooks get, or an object with all its "
                    "attributes"
                )
                raise
            states_by_args[id(args)] = (state._args, state)
            return state

    def _start(self, args: Args) -> None:
        self._args = _reference(args)
        # Limits of a sequence, which differ between rollouts and evaluations.
        self.served = served_context(args)
        self._contexts = {
            False: context_limit(self.served, args.rollout_max_context_len),
            True: context_limit(self.served, args.eval_max_context_len),
        }
        self.media_token_ids = frozenset(media_token_ids(args.hf_checkpoint))
        self.seed = args.rollout_seed
        self.requests = RequestSettings(
            timeout=float(args.sglang_router_request_timeout_secs),
            embedded=args.rollout_backend == "embedded",
            has_routing_key=args.router_policy in _POLICIES_WITH_KEYS,
            returns_experts=args.use_rollout_routing_replay,
            # Without a trainer nobody loads the adapter, and the engines have the base only.
            adapter=None
            if args.debug_rollout_only
            else engine_adapter(args.lora_rank, args.lora_sync, args.rollout_backend),
            vocabulary=model_config(args.hf_checkpoint).get("vocab_size"),
        )
        self.sampling_params = self.stopping_at_media(request_params(args))
        self.eval_datasets: dict[bytes, Any] = {}
        self.encoded: tuple[str, list[int]] = "", []
        self.warned_of_media = False
        self.repeats_placeholders: bool | None = None
        self.generator: GroupGenerator | None = None
        self.share = 1.0
        self._semaphores: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, asyncio.Semaphore
        ] = weakref.WeakKeyDictionary()
        self._spare = 0  # slots that may be added
        self._growth: asyncio.Task[None] | None = None
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget the standing pool and everything else of the rollouts so far. None may be in
        progress.
        """
        self.pool = None
        self.observer: Observer | None = None
        self.schedule: WeightTimeline | None = None
        self.weights_seen = (0, 0)
        self.eval_rollout_id: int | None = None
        self.reset()

    def stopping_at_media(self, params: SamplingParams) -> SamplingParams:
        """Return sampling parameters that also stop at a media placeholder.

        A response must contain none, because there are no media for it: a later request with it is
        refused. Where the model samples one, it is removed
        (:func:`~slime.rollout.prompts.cut_at_sampled_media`, and after each turn of a
        conversation).
        """
        if not self.media_token_ids:
            return params
        return {
            **params,
            "stop_token_ids": sorted(
                {*(params.get("stop_token_ids") or []), *self.media_token_ids}
            ),
        }

    @property
    def context(self) -> int | None:
        """Maximum number of tokens of prompt and response together, in an evaluation or a rollout;
        None if no limit is known."""
        return self._contexts[EVALUATION.get()]

    @property
    def args(self) -> Args:
        """The arguments of the run, as user functions get them."""
        args = self._args()
        assert args is not None, "a state is reached only through its args, so the args still exist"
        return args

    def reset(self) -> None:
        """Clear the abort flag and the rollout id before the next rollout."""
        self.aborted = False
        self.rollout_id: int | None = None

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of ``--hf-checkpoint``, loaded at the first access."""
        return load_tokenizer(self.args.hf_checkpoint, self.args.trust_remote_code)

    @functools.cached_property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end what the model says, see :func:`~slime.data.tokenizers.end_ids`."""
        return end_ids(self.tokenizer, self.args.hf_checkpoint, self.args.rollout_stop_token_ids)

    @functools.cached_property
    def processor(self) -> Any:
        """Processor of ``--hf-checkpoint`` for multimodal inputs, or None for text-only models."""
        return load_processor(self.args.hf_checkpoint, self.args.trust_remote_code)

    @property
    def semaphore(self) -> asyncio.Semaphore:
        """Limits the number of samples that are generated at once.

        The limit is ``--sglang-server-concurrency`` per engine, by default what their KV caches
        hold, but never more than the connections that this machine's ports and open files allow.
        """
        # a semaphore works in one event loop only; users may run several
        loop = asyncio.get_running_loop()
        if loop not in self._semaphores:
            self._semaphores[loop] = asyncio.Semaphore(self._in_flight)
        slots = self._semaphores[loop]
        if slots.locked() and (self._growth is None or self._growth.done()):
            self._growth = loop.create_task(self._grow(slots))
        return slots

    async def _grow(self, slots: asyncio.Semaphore) -> None:
        """Add slots each second, as long as all are taken and no engine has a queue.

        SGLang queues a request if with it a running one may have to be retracted for its KV cache.
        There is no use in more requests than it runs, and some harm: a queued request stays with
        its engine when another one has room, and loses its place when weights are updated.
        """
        from slime.engines import handle

        while self._spare >= _MORE_SLOTS and slots.locked():
            await asyncio.sleep(_GROWTH_SECONDS)
            try:
                urls = await handle.worker_urls(
                    f"http://{self.args.sglang_router_ip}:{self.args.sglang_router_port}"
                )
                loads = await asyncio.gather(*(handle.EngineHandle(url).load() for url in urls))
            except (handle.EngineError, handle.HttpError):
                continue
            if not any(load["waiting"] for load in loads):
                self._spare -= _MORE_SLOTS
                for _ in range(_MORE_SLOTS):
                    slots.release()

    @functools.cached_property
    def threads(self) -> Executor:
        """Threads in which synchronous user functions run, one for each sample that may be in
        flight, at most 4,096.

        Such functions mostly wait for engines. The default executor of the event loop is sized by
        the number of cores, which would limit generation. Threads start when they are needed.
        """
        most = self._in_flight + self._spare
        return ThreadPoolExecutor(min(most, _MOST_THREADS), thread_name_prefix="hook")

    @functools.cached_property
    def _in_flight(self) -> int:
        args = self.args
        share = math.ceil(concurrency(args, engine_count(args)) * self.share)
        most = connection_limit(args.sglang_router_ip)
        first = min(share, most)
        self._spare = 0 if args.sglang_server_concurrency else most - first
        return first


def concurrency(engines: EngineConfig, count: int) -> int:
    """Number of requests in flight over the ``count`` engines that serve the trained model, at
    first if it is not given.
    """
    return max(1, (engines.sglang_server_concurrency or FIRST_CONCURRENCY) * count)


def _reference(shared: T) -> Callable[[], T | None]:
    """Return a function that returns an object as long as it exists. One without weak references
    is kept.
    """
    try:
        return weakref.ref(shared, functools.partial(_forget, id(shared)))
    except TypeError:  # SimpleNamespace
        return lambda: shared


def _forget(
    key: int,
    reference: object,
    states: dict[int, tuple[Callable[[], Args | None], GenerateState]] = states_by_args,
) -> None:
    # `states` is a default argument because module globals may be gone when this runs at
    # interpreter shutdown.
    if key in states and states[key][0] is reference:  # otherwise newer args have the same id
        del states[key]
