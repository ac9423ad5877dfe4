"""Several turns in one sample: for generate functions in which the model talks to tools or to a user.

What the engine produced is what is trained: a turn is appended as the ids and log-probs that the engine
answered with, the next request carries these very ids, and nothing is ever tokenised again. What the
model did not write (tool output, the next user message) is tokenised once, alone, and has mask 0.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

from slime.config.seeds import derive_seed
from slime.data.json_text import parse_json
from slime.data.media import collect_media
from slime.data.sample import Sample
from slime.observability.trace_utils import trace_span
from slime.rollout.generate import generate, remaining, without_room
from slime.rollout.prompts import encode, prompt_ids, render, text_ids
from slime.rollout.state import GenerateState
from slime.types import SamplingParams

if TYPE_CHECKING:
    from slime.config.args import Args

TURNS = "model_turns"  # key of sample.metadata: where each turn of the model lies, so that an aborted sample can go on
_MARGIN = 4  # tokens: a tokenizer may write the first of a text otherwise
_MARK = "slime.4f1d.turn"  # stands for the model's words while the chat template renders what comes after them


class ModelTurn(TypedDict):
    """One turn of the model; ``end`` and ``finish`` are None in a turn that an abort interrupted.

    ``start`` and ``end`` are token offsets in the response, ``finish`` is a value of :class:`Sample.Status`.
    """

    start: int
    end: int | None
    text: str
    finish: str | None
    answered: bool


class Conversation:
    """The turns of one sample.

    ::

        async def generate(args, sample, sampling_params, evaluation=False):
            talk = Conversation(args, sample, sampling_params, evaluation)
            while (said := await talk.turn(stop=["</search>"])) is not None and "<search>" in said:
                hits = await talk.tools([search(said)], timeout=10)
                talk.observe(f"<information>{hits[0]}</information>")
            return sample

    A sample that was aborted goes on where it was: in the middle of a turn, or with the answer to its last
    turn (:meth:`turn` gives a turn that nobody answered again). Tools that keep state are brought there by
    running :attr:`answered` through them.

    ``max_new_tokens`` of the sampling parameters and ``--rollout-max-context-len`` bound the whole response,
    observations included; ``--max-turns`` the turns of the model.

    Args:
        evaluation: as the generate function got it; a training sample stops between turns when its rollout is over.
        max_turns: instead of ``--max-turns``.
    """

    def __init__(
        self,
        args: Args,
        sample: Sample,
        sampling_params: SamplingParams,
        evaluation: bool = False,
        max_turns: int | None = None,
    ) -> None:
        self.args, self.sample, self.evaluation = args, sample, evaluation
        self.params: SamplingParams = {**sampling_params}
        self.max_turns = max_turns or args.max_turns
        self.state = GenerateState(args)
        self._calls = 0
        if not sample.tokens:
            sample.tokens = prompt_ids(self.state, sample)
        if not sample.response_length or TURNS not in sample.metadata:  # metadata outlives a response thrown away
            sample.metadata = {**sample.metadata, TURNS: []}

    @property
    def turns(self) -> list[ModelTurn]:
        """Where each turn of the model lies in the response."""
        turns: list[ModelTurn] = self.sample.metadata[TURNS]
        return turns

    @property
    def answered(self) -> list[str]:
        """What the model said in the turns that were answered."""
        return [turn["text"] for turn in self.turns if turn["answered"]]

    @property
    def left(self) -> int:
        """Tokens that the response may still grow by."""
        params = remaining(self.state, self.sample, self.params)
        return params["max_new_tokens"] if params else 0

    async def turn(self, stop: Sequence[str] = (), max_tokens: int | None = None) -> str | None:
        """The model's next turn, appended to the sample; its text, with the stop string that ended it.

        Args:
            stop: strings after which this turn ends, besides those of the sampling parameters.
            max_tokens: of this turn.

        Returns:
            None when there is none: the sample is then ABORTED, or TRUNCATED because turns or tokens are used up (and
            left out where its prompt alone did so).
        """
        sample, turns = self.sample, self.turns
        last = turns[-1] if turns else None
        if last and last["end"] is not None and not last["answered"]:
            sample.status = Sample.Status(last["finish"])
            return str(last["text"])
        if self.state.aborted and not self.evaluation:
            sample.status = Sample.Status.ABORTED
            return None
        if last is None or last["end"] is not None:
            if self.left <= 0 and not sample.response_length:
                without_room(self.state, sample)
                return None
            if self.left <= 0 or (self.max_turns and len(turns) >= self.max_turns):
                sample.status = Sample.Status.TRUNCATED
                return None
            last = {"start": sample.response_length, "end": None, "text": "", "finish": None, "answered": False}
            turns.append(last)
            sample.metadata["round_number"] = len(turns)
        return await self._generate_turn(last, self._parameters(stop, max_tokens, last))

    def observe(self, text: str, limit: int | None = None) -> bool:
        """Append text that the model did not write: mask 0, log-prob 0.

        Args:
            limit: keep this many of its tokens.

        Returns:
            Whether it fits, with room for an answer. Where not, nothing is appended and the sample is TRUNCATED.
        """
        return self._append(encode(self.state.tokenizer, text)[:limit], None if limit else text)

    def reply(self, messages: Sequence[Mapping[str, object]]) -> bool:
        """Close the model's turn and append chat messages (``tool``, ``user``) as the chat template renders them,
        up to where the model's next turn begins. Returns as :meth:`observe`.

        Media parts (``{"type": "image", "image": path, URL, data URI or bytes}``) join those of the sample: engine
        and trainer get them from here on.
        """
        state, new = self.state, Sample(multimodal_inputs=collect_media(messages))
        renderer = state.processor if new.multimodal_inputs and state.processor is not None else state.tokenizer
        said = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _MARK}]
        text = render(renderer, self.sample, [*said, *map(dict, messages)])
        _, found, after = text.partition(_MARK)
        if not found:
            raise ValueError("the chat template leaves out what the assistant said: use Conversation.observe instead")
        tokens = text_ids(state, new, after) if new.multimodal_inputs else encode(state.tokenizer, after)
        if tokens and tokens[0] == self.sample.tokens[-1] and tokens[0] in state.tokenizer.all_special_ids:
            after = after.removeprefix(state.tokenizer.decode(tokens[:1]))
            tokens = tokens[1:]  # the model closed its turn itself
        fits = self._append(tokens, after if new.multimodal_inputs else None)
        if fits and new.multimodal_inputs:
            _join_media(self.sample, new)
        return fits

    async def tools(self, calls: Iterable[Awaitable[str]], timeout: float) -> list[str]:
        """Results of tool calls that run side by side, in the order of the calls.

        A call that takes longer than ``timeout`` seconds is cancelled; its result says so to the model, and
        ``metadata["tool_timeouts"]`` counts it. An exception of a tool is a fault and propagates. The time
        counts as ``non_generation_time``.
        """
        began = time.monotonic()
        with trace_span(self.sample, "tools") as span:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._tool(call, timeout)) for call in calls]
            span.set(calls=len(tasks))
        self.sample.non_generation_time += time.monotonic() - began
        return [task.result() for task in tasks]

    async def _tool(self, call: Awaitable[str], timeout: float) -> str:
        try:
            async with asyncio.timeout(timeout):
                return await call
        except TimeoutError:
            metadata = self.sample.metadata
            metadata["tool_timeouts"] = metadata.get("tool_timeouts", 0) + 1
            return f"error: no answer within {timeout:g} s"

    def _parameters(self, stop: Sequence[str], max_tokens: int | None, turn: ModelTurn) -> SamplingParams:
        params: SamplingParams = {**self.params}
        given = params.get("stop") or []
        params["stop"] = [*([given] if isinstance(given, str) else given), *stop] or None
        if max_tokens is not None:  # generate() counts the whole response
            params["max_new_tokens"] = min(int(params["max_new_tokens"]), turn["start"] + max_tokens)
        if self._calls and params.get("sampling_seed") is not None:  # the first request keeps the sample's seed
            params["sampling_seed"] = derive_seed(params["sampling_seed"], "turn", self._calls)
        return params

    async def _generate_turn(self, turn: ModelTurn, params: SamplingParams) -> str | None:
        """Generate ``turn``, or the rest of a turn that an abort interrupted."""
        sample, before = self.sample, self.sample.response_length
        written = len(sample.response)
        sample.status = Sample.Status.PENDING
        self._calls += 1
        await generate(self.args, sample, params)
        self._drop_sampled_medium(before, written)
        turn["text"] += sample.response[written:]
        if before > turn["start"]:
            self._cut_at_stop(turn, before - turn["start"], params["stop"] or [])
        if sample.status is Sample.Status.ABORTED:
            return None
        turn["end"], turn["finish"] = sample.response_length, sample.status.value
        return str(turn["text"])

    def _drop_sampled_medium(self, before: int, written: int) -> None:
        """The model's own placeholder of an image ends its turn, since it is a stop token. Nothing could be put in its
        place, so it is no part of the sample: no later request could carry it."""
        sample = self.sample
        if sample.response_length > before and sample.tokens[-1] in self.state.media_token_ids:
            own = self.state.tokenizer.decode(sample.tokens[len(sample.tokens) - sample.response_length + before : -1])
            sample.cut_response(sample.response_length - 1, sample.response[:written] + own)

    def _cut_at_stop(self, turn: ModelTurn, before: int, stop: Sequence[str]) -> None:
        """End a turn that went on after an abort where a stop string lies across the two requests: an engine
        looks for it in what it generates alone."""
        sample, decode = self.sample, self.state.tokenizer.decode
        ids = sample.tokens[len(sample.tokens) - sample.response_length + turn["start"] :]
        length = first_stop(decode, ids, before, stop)
        if length is not None:
            text = decode(ids[:length])
            before_turn = sample.response[: len(sample.response) - len(turn["text"])]
            sample.cut_response(turn["start"] + length, before_turn + text)
            turn["text"], sample.status = text, Sample.Status.COMPLETED

    def _append(self, tokens: list[int], text: str | None) -> bool:
        sample = self.sample
        if not self.turns or self.turns[-1]["end"] is None:
            raise ValueError(f"sample {sample.index}: the model has not finished a turn that could be answered")
        if len(tokens) >= self.left:
            sample.status = Sample.Status.TRUNCATED
            return False
        if text is None:
            text = self.state.tokenizer.decode(tokens)
        sample.append_response_tokens(self.args, tokens=tokens, log_probs=None, trainable=False, text=text)
        self.turns[-1]["answered"] = True
        return True


def first_stop(decode: Callable[[list[int]], str], ids: list[int], before: int, stop: Sequence[str]) -> int | None:
    """The least ``n`` above ``before`` for which the text of ``ids[:n]`` holds a stop string; None where there is none.

    In time linear in the number of ids: each text that is looked at begins a little before what is known to hold none.
    A token is a byte or more, so a stop string of ``b`` bytes begins at most ``b`` tokens before its end.
    """
    stops = [text for text in stop if text]
    if not stops or before >= len(ids):
        return None
    margin = max(len(text.encode()) for text in stops) + _MARGIN

    def stopped(known: int, end: int) -> bool:
        text = decode(ids[max(known - margin, 0) : end])
        return any(stop in text for stop in stops)

    if stopped(0, before + 1):
        return before + 1
    low, step = before + 1, 1  # ids[:low] hold none
    while not stopped(low, min(low + step, len(ids))):
        if low + step >= len(ids):
            return None
        low, step = low + step, 2 * step
    high = min(low + step, len(ids))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if stopped(low, middle) else (middle, high)
    return high


def _join_media(sample: Sample, new: Sample) -> None:
    """Put the media of ``new`` behind those of ``sample``. Samples of a group share theirs: none changes in place."""
    import torch

    raw, tensors = sample.multimodal_inputs or {}, sample.multimodal_train_inputs or {}
    added = {k: v for k, v in (new.multimodal_train_inputs or {}).items() if not k.endswith("token_type_ids")}
    sample.multimodal_inputs = raw | {k: [*raw.get(k, []), *v] for k, v in (new.multimodal_inputs or {}).items()}
    sample.multimodal_train_inputs = tensors | {
        k: torch.cat([torch.as_tensor(tensors[k]), torch.as_tensor(v)]) if k in tensors else v for k, v in added.items()
    }


@dataclass(frozen=True)
class ToolCall:
    """One call that the model asked for; ``error`` says what is wrong with one that cannot be read."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def tool_calls(text: str, start: str = "<tool_call>", end: str = "</tool_call>") -> list[ToolCall]:
    """All calls in a turn, in their order: ``{"name": …, "arguments": {…}}`` between ``start`` and ``end``; some models
    write ``parameters`` for ``arguments``.

    >>> tool_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    [ToolCall(name='add', arguments={'a': 1}, error='')]
    """
    blocks = [block.partition(end) for block in text.split(start)[1:]]
    return [
        _read_call(body) if found else ToolCall(error=f"the call is not closed by {end}") for body, found, _ in blocks
    ]


def _read_call(body: str) -> ToolCall:
    try:
        call = parse_json(body)
    except ValueError as error:
        return ToolCall(error=f"the call is not JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(error='the call is not an object with a "name"')
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, dict):
        return ToolCall(call["name"], error='"arguments" is not an object')
    return ToolCall(call["name"], arguments)
