"""The session of one agent program. Each request becomes a turn, which an engine generates and a
tree stores.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash

from slime.config.flag import section
from slime.config.rollout import ENGINES_OWN
from slime.config.seeds import derive_seed
from slime.data.reasoning import opened_by_ids
from slime.data.sample import Sample
from slime.engines.http import HttpError
from slime.plugins.http.server import Refused
from slime.rollout.abort import retry_delay
from slime.rollout.ends import UNFINISHED, cut_at_stop, end_text
from slime.rollout.generate import (
    CHARACTER_TOKENS,
    ask_engine,
    build_generate_body,
    remaining,
    with_retries,
)
from slime.rollout.rm_hub.outcome import says_too_long
from slime.rollout.state import EVALUATION, GenerateState
from slime.types import GenerateBody, GenerateOutput, SamplingParams

from .chat import ChatTemplate
from .config import AgentConfig, reasoning_tags
from .demands import UNMET
from .messages import Ask, Message, note
from .streaming import StreamedAnswer, read_stream
from .tool_formats import KNOWN_MARKS, NoCalls
from .tool_parsers import (
    Shown,
    StreamSplit,
    ToolParser,
    parse_answer,
    parser_name,
    split_reasoning,
    tool_parser,
)
from .trajectory import Tree, Turn, sampled_ids

logger = logging.getLogger(__name__)
OnText = Callable[[str], None]
OnPart = Callable[[str, str], None]
"""Called with new text of the reasoning and new text of the answer, one of which may be empty."""
Place = tuple[Turn | None, list[Message], list[int]]
"""The turn that a request continues (None for a new conversation), its new messages, and the token
ids to append.
"""


class Session:
    """The conversations of one sample's agent program with the model.

    Args:
        sample: The sample of the program; it is not changed.
        params: Sampling parameters of the run. Programs do not choose the temperature and similar
            parameters, because the trainer scores the tokens with those of the run.
        evaluation: Whether the session belongs to an evaluation, which continues if a training
            rollout is aborted.

    Attributes:
        counts: ``turns``; ``branches`` (turns whose parent already had a continuation);
            ``cancelled`` (the client disconnected before the answer); ``overflows`` (no room for an
            answer); ``unreadable`` (the tool parser raised, so the answer was kept as text);
            ``unread_calls`` (tools were given and no call was parsed, but the text contains the
            marker of one); ``unmet`` (the answer did not satisfy tool_choice or response_format,
            and the client got an error).
        fault: The first error of the engines. The code that waits for the session raises it.
        error: The first other error while a request was served. The sample is left out, and the run
            continues.
    """

    def __init__(
        self,
        session_id: str,
        state: GenerateState,
        sample: Sample,
        params: SamplingParams,
        evaluation: bool = False,
    ) -> None:
        self.id = session_id
        self.sample = sample
        self.params = params
        self.evaluation = evaluation
        args = state.args
        self.settings = section(AgentConfig, args)
        self.max_turns = args.max_turns
        self.state = state
        self.template = ChatTemplate(self.state.tokenizer, sample.apply_chat_template_kwargs)
        self.parser_name = parser_name(
            self.settings.agent_tool_parser, self.state.tokenizer, args.hf_checkpoint
        )
        # raise an error for an unknown name here, and not in the first request
        tool_parser(self.parser_name)
        self.tags = reasoning_tags(self.settings.agent_reasoning_parser, self.state.tokenizer)
        self.context = self.state.served
        self.tree = Tree()
        self.counts: Counter[str] = Counter()
        self.fault: Exception | None = None
        self.error: Exception | None = None
        self.tasks: set[asyncio.Task[Any]] = set()  # the handlers of running requests
        # number of requests by the digest of their prompt, for seeds
        self.asked: Counter[int] = Counter()
        self._open = True

    @property
    def aborted(self) -> bool:
        """Whether the rollout was aborted before this session was finished."""
        return self.state.aborted and not self.evaluation

    def close(self) -> None:
        """Refuse further requests and cancel those that are being served."""
        self._open = False
        for task in self.tasks:
            task.cancel()

    def broken(self, error: Exception) -> None:
        """Store the first error of a request that neither the client nor an engine caused."""
        if error is not self.fault:
            self.error = self.error or error

    def check_open(self) -> None:
        """Raise an error for a request that arrives after the session has ended."""
        if self.aborted:
            raise Refused(
                "the rollout was aborted, and this session will not be trained on",
                503,
                "session_aborted",
            )
        if not self._open:
            raise Refused(
                "this session is closed: its program has ended or timed out", 403, "session_closed"
            )

    def prepare(self, ask: Ask) -> Place:
        """Find the turn that a request continues, its new messages, and the token ids to append.

        Raises:
            Refused: The session is closed, the messages cannot be rendered, or there is no room
                for an answer.
        """
        self.check_open()
        parent, messages, added = self._place(ask)
        most_turns = self.max_turns
        if parent is not None and most_turns and parent.depth >= most_turns:
            self._overflow(
                parent,
                f"the conversation has {most_turns} turns (--max-turns)",
                "max_turns_exceeded",
            )
        self._room(parent, added, ask)
        return parent, messages, added

    def _place(self, ask: Ask) -> Place:
        before = None
        if ask.after is not None:
            before = self.tree.turns.get(ask.after)
            if before is None:
                raise Refused(
                    f"this session has no response {ask.after!r}",
                    404,
                    "previous_response_not_found",
                )
            new = ask.messages
            # In the Responses API, instructions are not inherited: those of this request replace
            # the earlier ones.
            system = [message for message in new if message["role"] == "system"]
            earlier = before.conversation()
            if system and earlier[0]["role"] == "system":
                earlier = earlier[1:]
            ask.messages = [
                *system,
                *earlier,
                *(message for message in new if message["role"] != "system"),
            ]
        parent = self.tree.find(ask)
        if parent is not None and before is not None and before.all_keys() == parent.all_keys():
            # the conversations are equal, but not the reasoning, which the keys leave out
            parent = before
        if parent is not None:
            # Only the new messages are tokenized. Rendering the whole conversation again could give
            # other ids for the model's earlier answers than those that it sampled, and training
            # needs the sampled ones.
            known = sum(len(turn.keys) for turn in parent.path())
            added = self.template.continuation(
                ask.messages, ask.tools, known, parent.output_ids[-1]
            )
            if added is not None:
                return parent, ask.messages[known:], added
        return None, ask.messages, self.template.prompt(ask.messages, ask.tools)

    def _room(self, parent: Turn | None, added: list[int], ask: Ask) -> int:
        """Return the maximum number of tokens of an answer; raise a :class:`Refused` if there is
        no room for one.
        """
        EVALUATION.set(self.evaluation)  # a request of the program is a task of the server's
        probe = self._probe(parent, added)
        left = (remaining(self.state, probe, self.params) or {"max_new_tokens": 0})[
            "max_new_tokens"
        ]
        if self.context:
            left = min(left, self.context - ENGINES_OWN - len(probe.tokens))
        if left < 1:
            why = _too_long(
                self.state.args.rollout_max_context_len, self.context, len(probe.tokens)
            )
            self._overflow(parent, why, "context_length_exceeded")
        return min(left, ask.max_tokens or left)

    def _overflow(self, parent: Turn | None, message: str, code: str) -> None:
        self.counts["overflows"] += 1
        if parent is not None:
            parent.overflowed = True
        raise Refused(message, 400, code)

    def _probe(self, parent: Turn | None, added: list[int]) -> Sample:
        """Return the conversation so far as a temporary sample, which the functions for requests to
        engines take.
        """
        known = parent.ids() if parent is not None else []
        first = parent.path()[0].prompt_tokens if parent is not None else len(added)
        return Sample(
            group_index=self.sample.group_index,
            index=self.sample.index,
            session_id=self.sample.session_id,
            tokens=[*known, *added],
            response_length=len(known) + len(added) - first,
        )

    async def answer(self, ask: Ask, prepared: Place, on_part: OnPart | None = None) -> Turn:
        """Generate a turn and record it.

        Args:
            prepared: The result of :meth:`prepare`.
            on_part: Called with new text of the reasoning and of the answer as soon as it can be
                shown.

        Raises:
            Refused: The rollout was aborted, the engine rejected the request, or the answer does
                not satisfy the client's demand. In the last case the turn is recorded nevertheless,
                because the model sampled it.
        """
        parent, messages, added = prepared
        stops = [*_strings(self.params.get("stop")), *ask.stop]
        params: SamplingParams = {**self.params, "stop": stops or None, "no_stop_trim": False}
        parser: ToolParser = tool_parser(self.parser_name, ask.tools) if ask.tools else NoCalls()
        if ask.tools:
            # in many formats, tool calls begin with special tokens
            params["skip_special_tokens"] = False
        probe = self._probe(parent, added)
        begun = probe.tokens  # generation replaces them by longer lists
        self._set_seed(params, probe.tokens)
        most = self._room(parent, added, ask)
        opened = self._opened(added)
        shown = Shown((*parser.marks, *stops), getattr(parser, "opening", ()))
        on_text = (
            None if on_part is None else _parting(on_part, StreamSplit(self.tags, opened, shown))
        )
        try:
            outputs = await self._generate(probe, params, most, on_text)
        except asyncio.CancelledError:
            self.counts["cancelled"] += 1
            raise
        except Refused:
            raise
        except Exception as error:
            self.fault = self.fault or error
            raise
        answer = self._message(parser, begun, opened, outputs, params)
        turn_id = ask.id if ask.choices == 1 else uuid.uuid4().hex
        turn = Turn(parent, messages, ask.tools, answer, added, outputs, turn_id)
        siblings = (
            parent.children if parent else [t for t in self.tree.turns.values() if t.parent is None]
        )
        self.counts["branches"] += bool(siblings)
        self.counts["turns"] += 1
        self.tree.add(turn)
        self._check_demand(ask, turn)
        return turn

    def _set_seed(self, params: SamplingParams, prompt_ids: list[int]) -> None:
        # Parallel requests arrive in any order. For reproducible runs, the seed depends on the
        # conversation (and on how often it was sent), not on the order of arrival.
        seed = params.get("sampling_seed")
        if isinstance(seed, int):
            prompt = _digest(prompt_ids)
            params["sampling_seed"] = derive_seed(seed, "agent", prompt, self.asked[prompt])
            self.asked[prompt] += 1

    def _check_demand(self, ask: Ask, turn: Turn) -> None:
        """Raise an error for an answer that does not meet the client's demand, unless it was
        truncated.
        """
        if ask.demand is None or turn.cut:
            return
        called = [str(entry["function"]["name"]) for entry in turn.answer.get("tool_calls", [])]
        why = ask.demand.unmet(turn.answer["content"], called)
        if why is not None:
            self.counts["unmet"] += 1
            raise Refused(why, 422, UNMET)

    def _opened(self, added: list[int]) -> bool:
        """Whether the prompt ends with the start tag of the reasoning, which some chat templates
        add.
        """
        return (
            self.tags is not None
            and opened_by_ids(self.state.tokenizer, added, (self.tags,)) is not None
        )

    def _message(
        self,
        parser: ToolParser,
        begun: list[int],
        opened: bool,
        outputs: list[GenerateOutput],
        params: SamplingParams,
    ) -> Message:
        reasoning, text = split_reasoning(self._text(outputs, params), self.tags, opened)
        try:
            content, calls = parse_answer(parser, text, self.tags)
        except Exception:  # a user's parser can raise anything, and the text can be malformed
            logger.exception("the tool parser failed, so the answer is kept as text")
            self.counts["unreadable"] += 1
            content = text
            calls = []
        mark = next((mark for mark in KNOWN_MARKS if mark in text), None)
        if mark is not None and not calls and not isinstance(parser, NoCalls):
            self.counts["unread_calls"] += 1
            note(
                f"--agent-tool-parser {self.parser_name}",
                f"found no tool call in an answer that contains {mark!r}",
            )
        ids = sampled_ids(outputs)
        # Some chat templates render the ids of calls. They follow from the tokens of the whole
        # conversation, so that a run with the same seed gives the same prompts, and a model that
        # repeats itself gives other ids.
        for number, entry in enumerate(calls):
            entry["id"] = entry["id"] or f"{_digest([*begun, *ids], number):016x}"[:9]
        message: Message = {"role": "assistant", "content": content}
        return (
            message
            | ({"reasoning_content": reasoning} if reasoning else {})
            | ({"tool_calls": calls} if calls else {})
        )

    def _text(self, outputs: list[GenerateOutput], params: SamplingParams) -> str:
        """Return the text of an answer without the stop string or stop token that ended it.

        All ids are decoded together if the engine was interrupted, because a character can be split
        between two outputs, or if it stopped at a string, because the beginning of this string may
        have been streamed.
        """
        matched = outputs[-1]["meta_info"]["finish_reason"].get("matched")
        ids = sampled_ids(outputs)
        if len(outputs) == 1 and not isinstance(matched, str):
            text = str(outputs[0]["text"])
        else:
            shown = ids[:-1] if isinstance(matched, int) else ids
            text = str(
                self.state.tokenizer.decode(
                    shown, skip_special_tokens=bool(params.get("skip_special_tokens"))
                )
            )
        if matched is None and ids:  # an end token may be the last one for which there is room
            text = text.removesuffix(end_text(self.state, ids[-1], stopped=False))
        return text.partition(matched)[0] if isinstance(matched, str) and matched else text

    async def _generate(
        self, probe: Sample, params: SamplingParams, most: int, on_text: OnText | None
    ) -> list[GenerateOutput]:
        """Return the engine's outputs for one answer. A weight update or the loss of an engine can
        interrupt an answer; then the request is sent again with the tokens so far, until the answer
        is complete."""
        outputs: list[GenerateOutput] = []
        begin = len(probe.tokens)
        tries = 0
        while True:
            body = build_generate_body(
                self.state, probe, {**_part(params, len(outputs)), "max_new_tokens": most}
            )
            output = await self.generate(probe, body, on_text)
            # raises if the rollout was aborted: its truncated answer is discarded
            self.check_open()
            if output is not None:
                output = cut_at_stop(self.state.tokenizer, probe.tokens[begin:], output, params)
            new = sampled_ids([output] if output else [])
            if output and new:
                outputs.append(output)
            if output and output["meta_info"]["finish_reason"]["type"] != "abort":
                return outputs
            probe.tokens = probe.tokens + new
            most = most - len(new)
            tries = 0 if new else tries + 1
            if str(self.state.tokenizer.decode(probe.tokens[-CHARACTER_TOKENS:])).endswith(
                UNFINISHED
            ):
                # the next part begins within a character, so the client gets the rest at the end
                on_text = None
            if most < 1:
                outputs[-1]["meta_info"]["finish_reason"] = {"type": "length", "length": len(new)}
                return outputs
            await asyncio.sleep(retry_delay(f"a request of sample {probe.index}", tries))

    async def generate(
        self, probe: Sample, body: GenerateBody, on_text: OnText | None
    ) -> GenerateOutput | None:
        try:
            if on_text is None:
                return await ask_engine(self.state, probe, body)
            answer = StreamedAnswer(on_text)
            stream = lambda: read_stream(self.state, probe, {**body, "stream": True}, answer)  # noqa: E731
            await with_retries(self.state, probe, stream)
            return answer.output(aborted=not answer.ended) if answer.meta is not None else None
        except HttpError as error:
            if error.status not in (400, 413, 422):
                raise
            code = "context_length_exceeded" if says_too_long(error) else None
            raise Refused(str(error), 400, code) from error


def _part(params: SamplingParams, number: int) -> SamplingParams:
    """Return the parameters of a part of an interrupted answer. An engine draws the tokens of each
    request by its seed from the beginning, so the parts after the first one, which is number 0,
    have seeds of their own."""
    seed = params.get("sampling_seed")
    if number == 0 or not isinstance(seed, int):
        return params
    return {**params, "sampling_seed": derive_seed(seed, "part", number)}


def _parting(on_part: OnPart, split: StreamSplit) -> OnText:
    """Return a function that splits new text of the engine into reasoning and answer and passes
    both to ``on_part``.

    U+FFFD at the end of the text is held back, because an interrupted answer can end within a
    character."""
    held = ""

    def show(text: str) -> None:
        nonlocal held
        whole = (held + text).rstrip(UNFINISHED)
        held = (held + text)[len(whole) :]
        parts = split.add(whole)
        if any(parts):
            on_part(*parts)

    return show


def _digest(ids: list[int], seed: int = 0) -> int:
    return xxhash.xxh64_intdigest(np.asarray(ids, np.int64).tobytes(), seed=seed)


def _strings(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else [*(value or [])]


def _too_long(given: int | None, context: int | None, tokens: int) -> str:
    limit = min(filter(None, (given, context)), default=None)
    if limit is not None and tokens + ENGINES_OWN >= limit:
        return (
            f"This model's maximum context length is {limit} tokens. However, your messages "
            f"resulted in {tokens} tokens (prompt is too long: {tokens} tokens > {limit} "
            "maximum). Please reduce the length of the messages."
        )
    return (
        "prompt is too long: the conversation has reached --rollout-max-response-len, "
        "which counts all tokens after the first prompt"
    )
