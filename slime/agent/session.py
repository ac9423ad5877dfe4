"""The session of one agent program: its requests become turns, which engines generate and a tree keeps."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from slime.agent.chat import ChatTemplate
from slime.agent.constraints import structural_tag
from slime.agent.demands import UNMET
from slime.agent.fields import ApiError, Reply, note
from slime.agent.messages import Ask, Message
from slime.agent.reasoning import StreamSplit, parse_answer, reasoning_tags, split_reasoning
from slime.agent.settings import AgentSettings
from slime.agent.tool_formats import KNOWN_MARKS, NoCalls
from slime.agent.tool_parsers import Shown, ToolParser, tool_parser
from slime.agent.trajectory import Tree, Turn
from slime.config.agent import choose_parser
from slime.config.hf_config import read_config
from slime.config.rollout import ENGINES_OWN
from slime.config.seeds import derive_seed
from slime.data.sample import Sample
from slime.engines.http import HttpError, retrying
from slime.rollout.abort import rest_seconds
from slime.rollout.generate import ask_engine, build_generate_body, remaining
from slime.rollout.rm_hub.outcome import says_too_long
from slime.rollout.sglang_streaming_rollout import StreamedAnswer, read_stream
from slime.rollout.state import GenerateState
from slime.types import GenerateBody, GenerateOutput, SamplingParams

if TYPE_CHECKING:
    from slime.config.args import Args

logger = logging.getLogger(__name__)
OnText = Callable[[str], None]
OnPart = Callable[[str, str], None]
"""Called with new reasoning and new text of the answer; one may be empty."""
Place = tuple[Turn | None, list[Message], list[int]]
"""The turn that a request continues (None: a new conversation), its new messages, and the token ids to add there."""


class Session:
    """The conversations of one sample's program.

    Args:
        sample: what the program works on; it is not changed.
        params: sampling parameters of the run. Programs do not choose the temperature and similar
            parameters, because the trainer scores the tokens with those of the run.
        evaluation: the session belongs to an evaluation, which the abort of a training rollout does not end.

    Attributes:
        counts: ``turns``, ``branches`` (turns beside others that go on from the same one), ``cancelled`` (the client
            was gone before the answer), ``overflows``, ``unreadable`` (the parser of tool calls raised; the answer is
            text), ``unread_calls`` (tools were given and no call was read, but the text holds a mark of one), ``unmet``
            (the answer was not what tool_choice or response_format required; the client got an error).
        fault: an error of the engines; the code that waits for the session raises it.
        error: any other error while a request was served; the sample is left out, and the run continues.
    """

    def __init__(
        self, session_id: str, args: Args, sample: Sample, params: SamplingParams, evaluation: bool = False
    ) -> None:
        self.id, self.sample, self.params, self.evaluation = session_id, sample, params, evaluation
        self.settings = AgentSettings.from_args(args)
        self.state = GenerateState(args)
        self.template = ChatTemplate(self.state.tokenizer, sample.apply_chat_template_kwargs)
        model_type = (read_config(args.hf_checkpoint) or {}).get("model_type")
        template = str(self.state.tokenizer.chat_template)
        self.parser_name = choose_parser(self.settings.tool_parser, template, model_type)
        tool_parser(self.parser_name)  # an unknown name is an error before the first request
        self.tags = reasoning_tags(self.settings.reasoning_parser, self.state.tokenizer)
        self.context = self.state.served
        self.tree = Tree()
        self.counts: Counter[str] = Counter()
        self.fault: Exception | None = None
        self.error: Exception | None = None
        self.tasks: set[asyncio.Task[Any]] = set()  # requests under way
        self._asked: Counter[int] = Counter()
        self._open = True

    @property
    def aborted(self) -> bool:
        """Whether the rollout is over, with this session unfinished."""
        return self.state.aborted and not self.evaluation

    def close(self) -> None:
        """Refuse further requests and cancel those that are being served."""
        self._open = False
        for task in self.tasks:
            task.cancel()

    def broken(self, error: Exception) -> None:
        """Keep the first error of a request that neither the client nor an engine caused."""
        if error is not self.fault:
            self.error = self.error or error

    def check_open(self) -> None:
        """Raise an error for a request that arrives after the session has ended."""
        if self.aborted:
            raise ApiError(503, "the rollout is over: this session is not trained on", "session_aborted")
        if not self._open:
            raise ApiError(403, "this session is over: its program has ended or ran out of time", "session_closed")

    def prepare(self, ask: Ask) -> Place:
        """Find the turn that a request continues, its new messages, and the token ids to add there.

        Raises:
            ApiError: it cannot be rendered, or leaves no room for an answer.
        """
        self.check_open()
        parent, messages, added = self._place(ask)
        most_turns = self.settings.max_turns
        if parent is not None and most_turns and parent.depth >= most_turns:
            self._overflow(parent, f"the conversation has its {most_turns} turns (--max-turns)", "max_turns_exceeded")
        self._room(parent, added, ask)
        return parent, messages, added

    def _place(self, ask: Ask) -> Place:
        if ask.after is not None:
            before = self.tree.turns.get(ask.after)
            if before is None:
                raise ApiError(404, f"this session has no response {ask.after!r}", "previous_response_not_found")
            new = ask.messages
            system = [message for message in new if message["role"] == "system"]  # each request brings its instructions
            said = before.conversation()
            if system and said[0]["role"] == "system":
                said = said[1:]
            ask.messages = [*system, *said, *(message for message in new if message["role"] != "system")]
        parent = self.tree.find(ask)
        if parent is not None:
            known = sum(len(turn.keys) for turn in parent.path())
            added = self.template.continuation(ask.messages, ask.tools, known, parent.output_ids[-1])
            if added is not None:
                return parent, ask.messages[known:], added
        return None, ask.messages, self.template.prompt(ask.messages, ask.tools)

    def _room(self, parent: Turn | None, added: list[int], ask: Ask) -> int:
        """The number of new tokens that an answer may have."""
        probe = self._probe(parent, added)
        left = (remaining(self.state, probe, self.params) or {"max_new_tokens": 0})["max_new_tokens"]
        if self.context:
            left = min(left, self.context - ENGINES_OWN - len(probe.tokens))
        if left < 1:
            why = _too_long(self.settings.max_context_len, self.context, len(probe.tokens))
            self._overflow(parent, why, "context_length_exceeded")
        return min(left, ask.max_tokens or left)

    def _overflow(self, parent: Turn | None, message: str, code: str) -> None:
        self.counts["overflows"] += 1
        if parent is not None:
            parent.overflowed = True
        raise ApiError(400, message, code)

    def _probe(self, parent: Turn | None, added: list[int]) -> Sample:
        """The conversation so far as a sample, for the engine client."""
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
            prepared: of :meth:`prepare`.
            on_part: called with what is new of the reasoning and of the text that can be shown.

        Raises:
            ApiError: the rollout was aborted, the engine refused, or the answer is not what the client requires. In
                the last case the turn is recorded all the same: the model wrote it.
        """
        parent, messages, added = prepared
        stops = [*_strings(self.params.get("stop")), *ask.stop]
        params: SamplingParams = {**self.params, "stop": stops or None, "no_stop_trim": False}
        parser: ToolParser = tool_parser(self.parser_name, ask.tools) if ask.tools else NoCalls()
        if ask.tools:
            params["skip_special_tokens"] = False  # many formats of calls begin with special tokens
        probe = self._probe(parent, added)
        seed = params.get("sampling_seed")
        if isinstance(seed, int):
            # Parallel requests arrive in any order, so the seed depends on the conversation and not on their number.
            prompt = _digest(probe.tokens)
            params["sampling_seed"] = derive_seed(seed, "agent", prompt, self._asked[prompt])
            self._asked[prompt] += 1
        most, opened = self._room(parent, added, ask), self._opened(added)
        shown = Shown((*parser.marks, *stops), getattr(parser, "opening", ()))
        constraint = self._constraint(ask, opened)
        if constraint is not None:
            params["structural_tag"] = json.dumps(constraint)
            # A constrained answer starts again after an interruption, and text that was sent cannot be taken back.
            on_part = None
        on_text = None if on_part is None else _parting(on_part, StreamSplit(self.tags, opened, shown))
        try:
            outputs = await self._generate(probe, params, most, on_text)
        except asyncio.CancelledError:
            self.counts["cancelled"] += 1
            raise
        except ApiError:
            raise
        except Exception as error:
            self.fault = self.fault or error
            raise
        answer = self._message(parser, added, opened, outputs, params)
        turn = Turn(
            parent, messages, ask.tools, answer, added, outputs, ask.id if ask.choices == 1 else uuid.uuid4().hex,
            constrained=constraint is not None,
        )  # fmt: skip
        siblings = parent.children if parent else [t for t in self.tree.turns.values() if t.parent is None]
        self.counts["branches"] += bool(siblings)
        self.counts["turns"] += 1
        self.tree.add(turn)
        self._check_demand(ask, turn)
        return turn

    def _constraint(self, ask: Ask, opened: bool) -> Reply | None:
        """The structural tag for the engine, with ``--agent-constrained-decoding``; None where the model is free."""
        if ask.demand is None or not self.settings.constrains:
            return None
        found = structural_tag(ask.demand, self.parser_name, ask.tools, self.tags, opened)
        if found is None:
            what = f"--agent-tool-parser {self.parser_name}"
            note(what, "has no grammar: answers in this form are checked, and not constrained")
        return found

    def _check_demand(self, ask: Ask, turn: Turn) -> None:
        """Raise an error for an answer that does not meet the client's demand, unless it was truncated."""
        if ask.demand is None or turn.cut:
            return
        called = [str(entry["function"]["name"]) for entry in turn.answer.get("tool_calls", [])]
        why = ask.demand.unmet(turn.answer["content"], called)
        if why is not None:
            self.counts["unmet"] += 1
            raise ApiError(422, why, UNMET)

    def _opened(self, added: list[int]) -> bool:
        """Whether the prompt ends with the tag after which the model reasons, as some templates have it."""
        tail = str(self.state.tokenizer.decode(added[-16:])).rstrip() if self.tags is not None else ""
        return self.tags is not None and tail.endswith(self.tags.start)

    def _message(
        self, parser: ToolParser, added: list[int], opened: bool, outputs: list[GenerateOutput], params: SamplingParams
    ) -> Message:
        reasoning, text = split_reasoning(self._text(outputs, params), self.tags, opened)
        try:
            content, calls = parse_answer(parser, text, self.tags)
        except Exception:  # a user's parser may raise anything, and a text may be malformed
            logger.exception("the parser of tool calls failed; the answer is kept as text")
            self.counts["unreadable"] += 1
            content, calls = text, []
        mark = next((mark for mark in KNOWN_MARKS if mark in text), None)
        if mark is not None and not calls and not isinstance(parser, NoCalls):
            self.counts["unread_calls"] += 1
            note(f"--agent-tool-parser {self.parser_name}", f"read no call in an answer that holds {mark!r}")
        ids = [int(item[1]) for output in outputs for item in output["meta_info"]["output_token_logprobs"]]
        for number, entry in enumerate(calls):  # some templates show ids, so they are fixed by what was sampled
            entry["id"] = entry["id"] or f"{_digest([*added, *ids], number):016x}"[:9]
        message: Message = {"role": "assistant", "content": content}
        return (
            message | ({"reasoning_content": reasoning} if reasoning else {}) | ({"tool_calls": calls} if calls else {})
        )

    def _text(self, outputs: list[GenerateOutput], params: SamplingParams) -> str:
        """The text of an answer, without the stop string or token that ended it.

        The ids are decoded in one piece where an engine was interrupted, because a character may be divided between
        two outputs, or where it stopped at a string, whose beginning may have been streamed.
        """
        matched = outputs[-1]["meta_info"]["finish_reason"].get("matched")
        if len(outputs) == 1 and not isinstance(matched, str):
            return str(outputs[0]["text"])
        ids = [int(item[1]) for output in outputs for item in output["meta_info"]["output_token_logprobs"]]
        ids = ids[:-1] if isinstance(matched, int) else ids
        text = str(self.state.tokenizer.decode(ids, skip_special_tokens=bool(params.get("skip_special_tokens"))))
        return text.partition(matched)[0] if isinstance(matched, str) and matched else text

    async def _generate(
        self, probe: Sample, params: SamplingParams, most: int, on_text: OnText | None
    ) -> list[GenerateOutput]:
        """The engine's outputs up to one that is complete: a weight update or a lost engine may interrupt an answer."""
        outputs: list[GenerateOutput] = []
        tries = 0
        while True:
            body = build_generate_body(self.state, probe, {**params, "max_new_tokens": most})
            output = await self._ask(probe, body, on_text)
            self.check_open()  # an answer that the abort truncated is discarded
            new = [int(item[1]) for item in output["meta_info"]["output_token_logprobs"]] if output else []
            if "structural_tag" in params and output and output["meta_info"]["finish_reason"]["type"] == "abort":
                new = []  # the engine would apply the constraint to the rest as if it were the whole answer
            if output and new:
                outputs.append(output)
            if output and output["meta_info"]["finish_reason"]["type"] != "abort":
                return outputs
            probe.tokens, most, tries = probe.tokens + new, most - len(new), 0 if new else tries + 1
            if most < 1:
                outputs[-1]["meta_info"]["finish_reason"] = {"type": "length", "length": len(new)}
                return outputs
            await asyncio.sleep(rest_seconds(f"a request of sample {probe.index}", tries))

    async def _ask(self, probe: Sample, body: GenerateBody, on_text: OnText | None) -> GenerateOutput | None:
        try:
            if on_text is None:
                return await ask_engine(self.state, probe, body)
            answer = StreamedAnswer(on_text)
            stream = lambda: read_stream(self.state, probe, {**body, "stream": True}, answer)  # noqa: E731
            async with asyncio.timeout(self.state.requests.timeout):
                await retrying(stream, give_up=lambda: self.state.aborted)
            return answer.output(aborted=not answer.ended) if answer.meta is not None else None
        except HttpError as error:
            if error.status not in (400, 413, 422):
                raise
            code = "context_length_exceeded" if says_too_long(error) else None
            raise ApiError(400, str(error), code) from error


def _parting(on_part: OnPart, split: StreamSplit) -> OnText:
    """A function that divides the engine's new text into reasoning and answer and passes both to ``on_part``."""

    def show(text: str) -> None:
        parts = split.add(text)
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
            f"This model's maximum context length is {limit} tokens. However, your messages resulted in {tokens} "
            f"tokens (prompt is too long: {tokens} tokens > {limit} maximum). Please reduce the length of the messages."
        )
    return (
        "prompt is too long: the conversation has used up the tokens of a response "
        "(--rollout-max-response-len counts everything after the first prompt)"
    )
