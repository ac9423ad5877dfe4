"""vLLM's ``AsyncLLM`` as an engine of the routes for generation, with pauses and weight updates."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from slime.plugins.embedded.protocol import GenerateRequest
from slime.plugins.embedded.sequence import (
    Detokenizer,
    FinishReason,
    Sequence,
    VersionEvent,
    aborted,
)
from slime.plugins.embedded.served import WeightError
from slime.plugins.http.server import BadRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.output_processor import RequestOutputCollector

    from slime.plugins.embedded.served import Listener

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
Folder = tempfile.TemporaryDirectory[str]
POLL_SECONDS = 0.01
MEMORY = ("weights", "kv_cache")
"""What vLLM's sleep releases, always both. ``cuda_graph`` has no memory of its own here."""


class VllmEngine:
    """An engine on the event loop of the server; the model is in vLLM's own processes.

    Attributes:
        halted: Why nothing is computed: ``pause``, an open ``update``, or released ``memory``.
        released: The tags of memory that a client has released.
        version: The weight version.
        adapters: The loaded adapters by name, with the temporary folder of their files, if they have
            one. vLLM reads the files again when it has no room for all adapters.
    """

    def __init__(self, llm: AsyncLLM, context_len: int, can_sleep: bool) -> None:
        self.llm = llm
        self.context_len = context_len
        self.can_sleep = can_sleep
        self.halted: set[str] = set()
        self.released: set[str] = set()
        self.version = "default"
        self.adapters: dict[str, tuple[LoRARequest, Folder | None]] = {}
        self.last_step = time.monotonic()
        self.sequences: dict[str, Sequence] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself does not keep them alive
        self._numbers = itertools.count(1)
        self._resumed = asyncio.Event()
        self._weights = 0  # how often they have changed; KV cache of others is never shared

    @property
    def failure(self) -> BaseException | None:
        return self.llm.dead_error if self.llm.errored else None

    @property
    def resting(self) -> bool:
        return bool(self.halted)

    @property
    def idle(self) -> bool:
        return not self.sequences

    async def call(self, function: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        return function(*arguments)

    # --- generation ----------------------------------------------------------------------------

    async def submit(self, request: GenerateRequest, listener: Listener) -> Sequence:
        """Queue a request, and call ``listener`` when it makes progress.

        Raises:
            BadRequest: vLLM refuses the request, or the adapter that it names is not loaded.
        """
        if len(request.input_ids) >= self.context_len:
            raise BadRequest(
                f"the prompt has {len(request.input_ids)} tokens, which leaves no room in the "
                f"context length {self.context_len}"
            )
        adapter = None
        if request.lora_path is not None:
            while self.halted:  # an update may be replacing the adapter
                await self._resumed.wait()
            if request.lora_path not in self.adapters:
                raise BadRequest(f"lora_path: the adapter {request.lora_path!r} does not exist")
            adapter, _ = self.adapters[request.lora_path]
        number = next(self._numbers)
        name = str(number)
        sequence = Sequence(request, number, 0)
        prompt = tokens_input(list(request.input_ids), cache_salt=str(self._weights))
        self.sequences[name] = sequence
        try:
            params = sampling_params(request)
            outputs = await self.llm.add_request(name, prompt, params, lora_request=adapter)
        except ValueError as error:
            del self.sequences[name]
            raise BadRequest(str(error)) from error
        except BaseException:
            del self.sequences[name]
            raise
        self._in_background(self._follow(name, sequence, outputs, listener))
        return sequence

    def _in_background(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(
        self, name: str, sequence: Sequence, outputs: RequestOutputCollector, listener: Listener
    ) -> None:
        """Take the tokens of a sequence as they come, until it ends."""
        version = self.version
        try:
            while sequence.finish_reason is None:
                output = outputs.get_nowait() or await outputs.get()
                self.last_step = time.monotonic()
                version = take(sequence, output) or self.version
                if sequence.finish_reason is None and sequence.request.stream:
                    listener(sequence, sequence.num_output, None, version)
        except Exception as error:  # vLLM's own, which the server must survive to report it
            sequence.finish_reason = aborted(f"vLLM failed: {type(error).__name__}: {error}", 500)
        finally:
            del self.sequences[name]
            outputs.close()
        listener(sequence, sequence.num_output, sequence.finish_reason, version)

    def abort(self, rid: str | None, exact: bool = False) -> None:
        def chosen(own: str) -> bool:
            return rid is None or own == rid or (not exact and own.startswith(rid))

        names = [name for name, one in self.sequences.items() if chosen(one.request.rid)]
        if names and not self.llm.errored:
            self._in_background(self.llm.abort(names))

    # --- pauses and memory ---------------------------------------------------------------------

    async def pause(self, mode: str) -> None:
        """Stop to compute; see :data:`slime.engines.sglang_api.PauseMode`."""
        self.halted.add("pause")
        if mode == "abort":
            await self.llm.pause_generation(mode="abort", clear_cache=False)
            return
        await self._stand_still(mode == "retract")

    async def resume(self) -> None:
        await self._go_on("pause")

    async def _stand_still(self, retract: bool) -> None:
        """Keep all requests. With ``retract`` their KV cache is dropped and computed again."""
        await self.llm.pause_generation(mode="keep", clear_cache=retract)
        for sequence in self.sequences.values():
            sequence.retractions += retract and sequence.num_output > 0

    async def _go_on(self, reason: str) -> None:
        self.halted.discard(reason)
        if not self.halted:
            await self.llm.resume_generation()
            self._resumed.set()
            self._resumed.clear()

    async def release(self, tags: list[str]) -> None:
        """Release memory. On a CPU nothing is released, but nothing is computed until it is resumed.

        Raises:
            BadRequest: The engine was started without sleep mode.
        """
        if not self.can_sleep:
            raise BadRequest("start vLLM with --offload-rollout (its --enable-sleep-mode)")
        asleep = bool(self.released)
        self.released |= set(tags) & set(MEMORY)
        if self.released and not asleep:
            self.halted.add("memory")
            await self._stand_still(retract=True)
            await self.llm.sleep(level=1, mode="keep")  # the weights go to host memory

    async def take_back(self, tags: list[str]) -> None:
        """Take memory again. What no client has released comes back with the first tag."""
        if not self.released:
            return
        kept = set(MEMORY) - self.released
        self.released -= set(tags)
        await self.llm.wake_up(sorted((set(tags) & set(MEMORY)) | kept))
        if self.released:
            return
        await self._go_on("memory")
        if self.halted:  # vLLM goes on by itself when all memory is back
            await self.llm.pause_generation(mode="keep", clear_cache=False)

    # --- weights -------------------------------------------------------------------------------

    async def on_workers(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of :class:`slime.plugins.vllm.worker.SlimeWorker` on all ranks.

        Raises:
            WeightError: It failed. The message is that of the worker.
        """
        try:
            results: list[Any] = await self.llm.collective_rpc(method, args=arguments)
        except Exception as error:
            if self.llm.errored:
                raise
            raise WeightError(str(error)) from error
        return results

    async def begin_update(self) -> bool:
        """Open a weight update. Return False if one is open already."""
        if "update" in self.halted:
            return False
        if not self.halted:
            await self._stand_still(retract=True)
        self.halted.add("update")
        return True

    async def end_update(self) -> bool:
        if "update" not in self.halted:
            return False
        await self.on_workers("slime_end")
        await self._go_on("update")
        return True

    async def change(self, version: str | None, method: str, *arguments: object) -> None:
        """Change weights with a method of the workers, and then name their version."""
        self._weights += 1
        await self.on_workers(method, *arguments)
        if version is not None:
            await self.name_version(version)

    async def name_version(self, version: str) -> None:
        self.version = version
        await self.llm.update_weight_version(version)

    # --- adapters ------------------------------------------------------------------------------

    async def load_adapter(self, name: str, path: str, folder: Folder | None = None) -> None:
        """Load the adapter in PEFT's files under a name that is not taken.

        Args:
            path: The folder of the files, which must stay as long as the adapter.
            folder: The same, if it shall be removed with the adapter.
        """
        if name in self.adapters:
            raise BadRequest(f"the adapter {name!r} is loaded already; unload it first")
        number = next(self._numbers)
        # The keys of the KV cache contain this name, so another version has another one.
        request = LoRARequest(f"{name}-{number}", number, path)
        try:
            await self.llm.add_lora(request)
        except Exception as error:
            raise WeightError(f"vLLM cannot load the adapter {name!r}: {error}") from error
        self.adapters[name] = request, folder

    async def unload_adapter(self, name: str) -> None:
        """Remove an adapter. Its requests end with the tokens so far, since vLLM would load it again
        for the next one.
        """
        if name not in self.adapters:
            raise BadRequest(f"the adapter {name!r} does not exist")
        request, folder = self.adapters.pop(name)
        users = {n for n, one in self.sequences.items() if one.request.lora_path == name}
        while users := users & self.sequences.keys():
            await self.llm.abort(users)
            await asyncio.sleep(POLL_SECONDS)
        await self.llm.remove_lora(request.lora_int_id)
        if folder is not None:
            folder.cleanup()

    def remove_files(self) -> None:
        """Remove the temporary folders of all adapters, when the server ends."""
        for _, folder in self.adapters.values():
            if folder is not None:
                folder.cleanup()


def sampling_params(request: GenerateRequest) -> SamplingParams:
    """Translate SGLang's sampling parameters.

    Raises:
        ValueError: vLLM does not allow a value.
    """
    params = request.params
    scores = request.top_logprobs_num if request.return_logprob else None
    reads = request.return_logprob and 0 <= request.logprob_start_len < len(request.input_ids)
    return SamplingParams(
        temperature=0.0 if params.greedy else params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
        seed=params.sampling_seed,
        stop=list(params.stop),
        stop_token_ids=[] if params.ignore_eos else sorted(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        max_tokens=max(params.max_new_tokens, 1),
        min_tokens=params.min_new_tokens,
        logprobs=scores,
        prompt_logprobs=scores if reads else None,
        logprob_token_ids=request.token_ids_logprob or None,
        logit_bias=dict(params.logit_bias) or None,
        detokenize=bool(params.stop),
        skip_special_tokens=params.skip_special_tokens,
        output_kind=RequestOutputKind.DELTA,
    )


def take(sequence: Sequence, output: RequestOutput) -> str | None:
    """Add the new tokens of a ``RequestOutput`` to a sequence, and its finish reason at the end.

    Returns:
        The weight version of the last token, if the output tells it, as the last one does.
    """
    request = sequence.request
    part = output.outputs[0]
    sequence.cached_tokens = max(sequence.cached_tokens, output.num_cached_tokens or 0)
    if output.prompt_logprobs and sequence.wants_input_logprobs and not sequence.input_logprobs:
        for position in range(request.logprob_start_len + 1, len(request.input_ids)):
            scored = output.prompt_logprobs[position]
            sequence.input_logprobs.append(scored[request.input_ids[position]].logprob)
            sequence.input_top.append(best(scored, request.top_logprobs_num))
    if request.params.max_new_tokens:  # vLLM generates one token at least
        sequence.tokens += part.token_ids
        for token, scored in zip(part.token_ids, part.logprobs or (), strict=False):
            sequence.output_logprobs.append(scored[token].logprob)
            sequence.output_top.append(best(scored, request.top_logprobs_num))
            chosen = [(scored[one].logprob, one) for one in request.token_ids_logprob]
            sequence.output_chosen.append(chosen)
    if part.finish_reason is None:
        return None
    sequence.finish_reason = finish_reason(sequence, part)
    spans = part.weight_versions or []
    sequence.version_events = [VersionEvent(span.version, span.end) for span in spans[:-1]]
    return spans[-1].version if spans else None


def best(scored: dict[int, Logprob], count: int) -> list[tuple[float, int]]:
    """Return the ``count`` likeliest tokens of a position as pairs of log-prob and id."""
    ranked = sorted((one.rank, one.logprob, token) for token, one in scored.items() if one.rank)
    return [(value, token) for rank, value, token in ranked if rank <= count]


def finish_reason(sequence: Sequence, part: CompletionOutput) -> FinishReason:
    """Return why vLLM has ended a sequence, in SGLang's format."""
    if part.finish_reason == "length":
        return {"type": "length", "length": sequence.num_output}
    if part.finish_reason == "stop":
        matched = part.stop_reason
        return {"type": "stop", "matched": sequence.tokens[-1] if matched is None else matched}
    if part.finish_reason == "abort":
        return aborted("the request was aborted")
    return aborted(f"vLLM ended the request: {part.finish_reason}", 500)


@dataclass
class Loaded:
    """An engine with what belongs to its model (:class:`slime.plugins.embedded.served.Served`).

    Attributes:
        info: What ``/server_info`` tells besides the state.
    """

    engine: VllmEngine
    tokenizer: PreTrainedTokenizerBase
    detokenizer: Detokenizer
    context_len: int
    vocab_size: int
    model_path: str
    images: None = None
    info: dict[str, object] = field(default_factory=dict)
