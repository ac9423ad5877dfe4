"""Several turns in one sample, for generate functions in which the model talks to tools or to a
user.

The tokens that are trained are exactly those that the engine sampled: each turn is appended as the
ids and log-probs of the engine's reply, the next request contains the same ids, and no text is
tokenized twice. Text that the model did not write (tool output, the next user message) is tokenized
once, separately, and gets mask 0.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

from slime.config.seeds import derive_seed
from slime.data.media import collect_media
from slime.data.plain_values import parse_json
from slime.data.sample import Sample
from slime.observability.trace_utils import trace_span
from slime.rollout.ends import end_text
from slime.rollout.generate import generate, remaining, without_room
from slime.rollout.group import TURNS, gather_all
from slime.rollout.prompts import encode, prompt_ids, render, text_ids
from slime.rollout.state import GenerateState
from slime.types import SamplingParams

from .chat import results_as_shown

if TYPE_CHECKING:
    from slime.config.args import Args

# characters; the longest tokens of known vocabularies are runs of 128 or 256 spaces
_LONGEST_TOKEN = 512
# placeholder for the model's turn while the chat template renders the messages after it
_MARK = "slime.4f1d.turn"


class ModelTurn(TypedDict):
    """One turn of the model.

    Attributes:
        start: Token offset in the response at which the turn begins.
        end: Token offset in the response at which the turn ends, or None if an abort interrupted
            it.
        text: The text of the turn, without the token that ended it.
        finish: Value of :class:`Sample.Status` with which the turn ended, or None if an abort
            interrupted it.
        answered: Whether an observation or a reply was appended after the turn.
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

    An aborted sample continues where it stopped. If the abort came in the middle of a turn, that
    turn is completed. If it came after a turn that has no answer yet, :meth:`turn` returns that
    turn again, so that the function can answer it. To restore the state of a tool, call the tool
    with the turns in :attr:`answered`.

    ``max_new_tokens`` of the sampling parameters and ``--rollout-max-context-len`` limit the whole
    response, observations included. ``--max-turns`` limits the number of model turns.

    Args:
        args: The arguments that the generate function got.
        sample: The sample that the generate function got. It is changed in place.
        sampling_params: The sampling parameters that the generate function got.
        evaluation: The flag that the generate function got. Between two turns, a training sample
            stops if its rollout was aborted; an evaluation sample does not.
        max_turns: Maximum number of model turns. Default: ``--max-turns``.
    """

    def __init__(
        self,
        args: Args,
        sample: Sample,
        sampling_params: SamplingParams,
        evaluation: bool = False,
        max_turns: int | None = None,
    ) -> None:
        self.args = args
        self.sample = sample
        self.evaluation = evaluation
        self.params: SamplingParams = {**sampling_params}
        self.max_turns = max_turns or args.max_turns
        self.state = GenerateState(args)
        self._calls = 0
        if not sample.tokens:
            sample.tokens = prompt_ids(self.state, sample)
        # Metadata are kept when a response is discarded, so they may still contain turns of a
        # discarded response.
        if not sample.response_length or TURNS not in sample.metadata:
            sample.metadata = {**sample.metadata, TURNS: []}

    @property
    def turns(self) -> list[ModelTurn]:
        """The model turns of the sample, in order."""
        turns: list[ModelTurn] = self.sample.metadata[TURNS]
        return turns

    @property
    def answered(self) -> list[str]:
        """The texts of the model turns that were answered by :meth:`observe` or :meth:`reply`."""
        return [turn["text"] for turn in self.turns if turn["answered"]]

    @property
    def left(self) -> int:
        """Number of tokens that may still be added to the response."""
        params = remaining(self.state, self.sample, self.params)
        return params["max_new_tokens"] if params else 0

    async def turn(self, stop: Sequence[str] = (), max_tokens: int | None = None) -> str | None:
        """Generate the model's next turn and append it to the sample.

        Args:
            stop: Strings after which this turn ends, in addition to those of the sampling
                parameters.
            max_tokens: Maximum number of tokens of this turn.

        Returns:
            The text of the turn, including the stop string that ended it, but without an end token.
            None if there is
            no further turn: The sample is then ABORTED, or TRUNCATED because no turns or tokens are
            left. A sample whose prompt alone leaves no room is TRUNCATED and excluded from
            training.
        """
        sample = self.sample
        turns = self.turns
        last = turns[-1] if turns else None
        if last and last["end"] is not None and not last["answered"]:
            # The turn was never answered, for example because of an abort: return it again instead
            # of a new one.
            sample.status = Sample.Status(last["finish"])
            return str(last["text"])
        if self.state.aborted and not self.evaluation:
            sample.status = Sample.Status.ABORTED
            return None
        # A new turn needs room and must be allowed; otherwise an interrupted turn goes on.
        if last is None or last["end"] is not None:
            if self.left <= 0 and not sample.response_length:
                without_room(self.state, sample)
                return None
            if self.left <= 0 or (self.max_turns and len(turns) >= self.max_turns):
                sample.status = Sample.Status.TRUNCATED
                return None
            last = {
                "start": sample.response_length,
                "end": None,
                "text": "",
                "finish": None,
                "answered": False,
            }
            turns.append(last)
            sample.metadata["round_number"] = len(turns)
        return await self._generate_turn(last, self._parameters(stop, max_tokens, last))

    def observe(self, text: str, limit: int | None = None) -> bool:
        """Append text that the model did not write, such as the output of a tool, with mask 0 and
        log-prob 0.

        Args:
            text: The text.
            limit: Maximum number of tokens; the rest of the text is dropped.

        Returns:
            Whether the text fits and leaves room for at least one more token of the model. If not,
            nothing is appended and the sample is TRUNCATED.

        Raises:
            ValueError: The model has not finished a turn yet.
        """
        return self._append(self._encode(text, self.left)[:limit], None if limit else text)

    def reply(self, messages: Sequence[Mapping[str, object]]) -> bool:
        """Close the model's turn and append chat messages, rendered by the chat template.

        The appended text ends where the model's next turn begins. Results of tools (role ``tool``)
        become a user's message if the template does not know them. Media parts (``{"type": "image",
        "image": path, URL, data URI or bytes}``) are added to those of the sample: engine and
        trainer get them from here on.

        Args:
            messages: The messages after the model's turn, for example with role ``tool`` or
                ``user``.

        Returns:
            As :meth:`observe`.

        Raises:
            ValueError: The chat template leaves out the assistant's turn or a message, or the model
                has not finished a turn yet.
        """
        new = Sample(multimodal_inputs=collect_media(messages))
        tokens, after = self._rendered(messages, new, self.sample.tokens[-1], self.left)
        fits = self._append(tokens, after if new.multimodal_inputs else None)
        if fits and new.multimodal_inputs:
            _join_media(self.sample, new)
        return fits

    def was_reply(self, turn: ModelTurn, messages: Sequence[Mapping[str, object]]) -> bool:
        """Return whether :meth:`reply` with these messages would append what the sample has after
        an answered turn.
        """
        tokens = self.sample.tokens
        following = self.turns[self.turns.index(turn) + 1 :]
        begin = len(tokens) - self.sample.response_length
        end = begin + following[0]["start"] if following else len(tokens)
        assert turn["end"] is not None, "an answered turn has ended"
        appended = [*tokens[begin + turn["end"] : end]]
        new = Sample(multimodal_inputs=collect_media(messages))
        return (
            self._rendered(messages, new, tokens[begin + turn["end"] - 1], len(appended) + 1)[0]
            == appended
        )

    def _rendered(
        self, messages: Sequence[Mapping[str, object]], new: Sample, last: int, room: int
    ) -> tuple[list[int], str]:
        """Return the tokens and the text of messages after a turn of the model.

        Args:
            new: A sample with the media of the messages, which gets their tensors.
            last: The last token of the turn.
            room: The number of tokens for which there is room.
        """
        state = self.state
        renderer = state.processor if new.multimodal_inputs else state.tokenizer
        if renderer is None:
            raise ValueError(
                f"the messages have {', '.join(new.multimodal_inputs or ())}, but the model of "
                "--hf-checkpoint has no processor for media"
            )
        # Render a short conversation with a placeholder as the model's turn, and keep what follows
        # the placeholder. The real conversation is not rendered again: the template might change
        # earlier turns (drop reasoning, trim text).
        said = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _MARK}]
        whole = [*said, *results_as_shown(renderer, messages)]
        text = render(renderer, self.sample, whole)
        _, found, after = text.partition(_MARK)
        if not found:
            raise ValueError(
                "the chat template leaves out the assistant's turn: use Conversation.observe "
                "instead"
            )
        # Templates drop roles and contents that they do not know without an error. One may write a
        # text in another way (as JSON), so see whether it makes a difference.
        for i, message in enumerate(whole[2:], start=2):
            content = message.get("content")
            if not content or (isinstance(content, str) and content.strip() in after):
                continue
            emptied = [*whole[:i], {**message, "content": type(content)()}, *whole[i + 1 :]]
            if render(renderer, self.sample, emptied) == text:
                raise ValueError(
                    f"the chat template leaves out the {type(content).__name__} that is the "
                    f"content of a message with the role {message['role']!r}: use another role, "
                    "or a text (json.dumps)"
                )
        # The model may have sampled the end-of-turn token itself.
        tokens = text_ids(state, new, after) if new.multimodal_inputs else self._encode(after, room)
        if tokens and tokens[0] == last and tokens[0] in state.tokenizer.all_special_ids:
            # _append writes its text
            after = after.removeprefix(state.tokenizer.decode(tokens[:1]))
            # the model sampled the end-of-turn token itself: do not append it twice
            tokens = tokens[1:]
        return tokens, after

    async def tools(self, calls: Iterable[Awaitable[str]], timeout: float) -> list[str]:
        """Run tool calls concurrently.

        A call that takes longer than ``timeout`` seconds is cancelled and counted in
        ``metadata["tool_timeouts"]``; its result is an error text for the model. An exception of a
        tool cancels the other calls and propagates. The time of the calls is added to
        ``sample.non_generation_time``.

        Returns:
            The results in the order of the calls.

        Raises:
            Exception: A tool raised it. In a generate function that lets it through, it costs the
                sample.
        """
        began = time.monotonic()
        with trace_span(self.sample, "tools") as span:
            results = await gather_all(self._tool(call, timeout) for call in calls)
            span.set(calls=len(results))
        self.sample.non_generation_time += time.monotonic() - began
        return results

    async def _tool(self, call: Awaitable[str], timeout: float) -> str:
        try:
            async with asyncio.timeout(timeout):
                return await call
        except TimeoutError:
            metadata = self.sample.metadata
            metadata["tool_timeouts"] = metadata.get("tool_timeouts", 0) + 1
            return f"error: no answer within {timeout:g} s"

    def _parameters(
        self, stop: Sequence[str], max_tokens: int | None, turn: ModelTurn
    ) -> SamplingParams:
        params: SamplingParams = {**self.params}
        given = params.get("stop") or []
        params["stop"] = [*([given] if isinstance(given, str) else given), *stop] or None
        # generate() compares max_new_tokens with the length of the whole response
        if max_tokens is not None:
            params["max_new_tokens"] = min(
                int(params["max_new_tokens"]), turn["start"] + max_tokens
            )
        # Each request after the first gets a seed of its own; the first one keeps the seed of the
        # sample.
        if self._calls and params.get("sampling_seed") is not None:
            params["sampling_seed"] = derive_seed(params["sampling_seed"], "turn", self._calls)
        return params

    async def _generate_turn(self, turn: ModelTurn, params: SamplingParams) -> str | None:
        """Generate ``turn``, or the rest of a turn that an abort interrupted."""
        sample = self.sample
        before = self.sample.response_length
        written = len(sample.response)
        begin = written - len(turn["text"])  # in the text of the response
        # generate() cuts the rest of an interrupted turn, which is ABORTED, at a stop string that
        # began before.
        sample.status = Sample.Status.ABORTED if before > turn["start"] else Sample.Status.PENDING
        self._calls += 1
        await generate(self.args, sample, params)
        self._drop_sampled_medium(before, written)
        # not "+=": an incomplete character before the rest is complete now
        turn["text"] = sample.response[begin:]
        if sample.status is Sample.Status.ABORTED:
            return None
        turn["end"] = sample.response_length
        turn["finish"] = sample.status.value
        return str(turn["text"])

    def _drop_sampled_medium(self, before: int, written: int) -> None:
        """Remove a media placeholder token that the model sampled at the end of its turn.

        Such a token is a stop token, so it can only be the last one of the turn. There are no media
        for it, so no later request could contain it.
        """
        sample = self.sample
        if sample.response_length > before and sample.tokens[-1] in self.state.media_token_ids:
            own = self.state.tokenizer.decode(
                sample.tokens[len(sample.tokens) - sample.response_length + before : -1]
            )
            sample.cut_response(sample.response_length - 1, sample.response[:written] + own)

    def _encode(self, text: str, room: int) -> list[int]:
        """Tokenize what a tool or an environment said, but not much more of it than can fit: a text
        of 100 MB would keep all other samples waiting for a minute."""
        return encode(self.state.tokenizer, text[: room * _LONGEST_TOKEN + 1])

    def _append(self, tokens: list[int], text: str | None) -> bool:
        sample = self.sample
        if not self.turns or self.turns[-1]["end"] is None:
            raise ValueError(
                f"sample {sample.index}: the model has not finished a turn yet; call turn() first"
            )
        if len(tokens) >= self.left:  # ">=": the model needs room for at least one token after it
            sample.status = Sample.Status.TRUNCATED
            return False
        if text is None:
            text = self.state.tokenizer.decode(tokens)
        text = self._unsaid() + text
        sample.append_response_tokens(
            self.args, tokens=tokens, log_probs=None, trainable=False, text=text
        )
        self.turns[-1]["answered"] = True
        return True

    def _unsaid(self) -> str:
        """Return the text of the end token of a turn that nothing follows yet. The turn's text is
        without it, but the conversation, whose next turn may be asked for as text, is not."""
        turn = self.turns[-1]
        sample = self.sample
        if turn["end"] != sample.response_length or self.params.get("skip_special_tokens"):
            return ""
        return end_text(
            self.state, sample.tokens[-1], turn["finish"] == Sample.Status.COMPLETED.value
        )


def _join_media(sample: Sample, new: Sample) -> None:
    """Append the media of ``new`` to those of ``sample``.

    The samples of a group share their media, so new dicts and tensors are made and nothing is
    changed in place.
    """
    import torch

    raw = sample.multimodal_inputs or {}
    tensors = sample.multimodal_train_inputs or {}
    added = {
        k: v
        for k, v in (new.multimodal_train_inputs or {}).items()
        if not k.endswith("token_type_ids")
    }
    sample.multimodal_inputs = raw | {
        k: [*raw.get(k, []), *v] for k, v in (new.multimodal_inputs or {}).items()
    }
    sample.multimodal_train_inputs = tensors | {
        k: torch.cat([torch.as_tensor(tensors[k]), torch.as_tensor(v)]) if k in tensors else v
        for k, v in added.items()
    }


@dataclass(frozen=True)
class ToolCall:
    """A tool call that the model wrote. If it cannot be parsed, ``error`` says why; otherwise
    ``error`` is empty.
    """

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def tool_calls(text: str) -> list[ToolCall]:
    """Parse all tool calls in a turn, in their order.

    A call is a JSON object ``{"name": …, "arguments": {…}}`` between ``<tool_call>`` and
    ``</tool_call>``. The key ``parameters``, which some models write, is accepted in place of
    ``arguments``. Malformed calls are returned with an ``error``.

    >>> tool_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    [ToolCall(name='add', arguments={'a': 1}, error='')]
    """
    end = "</tool_call>"
    blocks = [block.partition(end) for block in text.split("<tool_call>")[1:]]
    return [
        _read_call(body) if found else ToolCall(error=f"the call is not closed by {end}")
        for body, found, _ in blocks
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
