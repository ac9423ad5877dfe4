"""Loss masks of conversations: only the tokens that the assistant wrote are trained.

The token ids are always those of the tokenizer's own template over the whole conversation. The
position of an assistant message in the rendered text is found without knowledge of the template:
the same conversation is rendered again with that message replaced by a mark, and the part that
differs is the message (with its tool calls and reasoning). The end-of-turn marker after it belongs
to the message; the generation header before it does not. Some templates (GLM's) have no such
marker: the marker of the next message ends the turn there, so it is trained, and added after the
last one.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter

from slime.data.reasoning import THINK
from slime.data.tokenizers import TemplateRefusal, joined_text, render_chat
from slime.types import Tokenizer

logger = logging.getLogger(__name__)

_MARK = "\ue000slime\ue001"  # private-use characters, which appear in no text and no template
_R1_ASSISTANT = "<｜Assistant｜>"
_OPENED = (f"{THINK.start}\n", THINK.start)  # what opens the reasoning
# tokens of context before a response, which distinguish equal texts when masks are aligned
_HEADER_TOKENS = 4
TYPES = ("qwen", "qwen3", "qwen3_5", "distill_qwen")

IdsAndMask = tuple[list[int], list[int]]
Messages = Sequence[Mapping[str, object]]
Tools = Sequence[Mapping[str, object]]


def untrained(prompt: object) -> str | None:
    """Explain why nothing of a prompt would be trained as a conversation; None if something is."""
    if not isinstance(prompt, list):
        return (
            f"SFT needs a list of messages, but its prompt is a {type(prompt).__name__}. "
            "Set --input-key messages, and do not set --apply-chat-template"
        )
    answers = [message for message in prompt if message["role"] == "assistant"]
    if not answers:
        return "a conversation without an assistant message has nothing to train on"
    if not any(map(_is_trained, answers)):
        return "no assistant turn of its conversation is to be trained on"
    return None


def _is_trained(message: Mapping[str, object]) -> bool:
    """Also by ``weight``, the same in the files of OpenAI's fine-tuning API."""
    wanted = message.get("step_loss_mask", message.get("weight", 1))
    return message["role"] == "assistant" and bool(wanted)


class MultiTurnLossMaskGenerator:
    """Token ids and loss mask of conversations, for supervised training.

    Args:
        tokenizer: A fast tokenizer with a chat template.
        tokenizer_type: ``qwen`` and ``qwen3``: any template with one block per message (changed to
            ``distill_qwen`` for tokenizers of R1-distilled models). ``qwen3_5``: the same, but the
            ``<think>`` that opens a response is masked out, since the template's generation header
            contains it. ``distill_qwen``: only the last message, which must be the assistant's, is
            trained.
        template_kwargs: Additional arguments of the chat template.
        stop_ids: The ids at which the engine ends a response, if they are known. Otherwise every
            special token counts.

    A message with ``step_loss_mask: 0`` or ``weight: 0`` is not trained.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tokenizer_type: str = "qwen",
        template_kwargs: Mapping[str, object] | None = None,
        stop_ids: Collection[int] = (),
    ) -> None:
        if tokenizer_type not in TYPES:
            raise ValueError(
                f"unknown --loss-mask-type {tokenizer_type!r} (known: {', '.join(TYPES)})"
            )
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                "loss masks need a fast tokenizer, which maps tokens to text; this is "
                f"{type(tokenizer)}"
            )
        if tokenizer_type == "qwen" and _R1_ASSISTANT in tokenizer.get_vocab():
            tokenizer_type = "distill_qwen"
        self.tokenizer = tokenizer
        self.template_kwargs = template_kwargs or {}
        self.tokenizer_type = tokenizer_type
        added = tokenizer.added_tokens_decoder
        # The tokens whose place behind a turn ends it; and those with which a template ends a turn
        # itself.
        self._markers = frozenset(stop_ids or added)
        special = {token: str(entry) for token, entry in added.items() if entry.special}
        self._special_texts = list(special.values())
        self._ends = frozenset({*stop_ids, *special})
        self._warned = False

    def check(self, messages: Messages, tools: Tools | None = None) -> str:
        """Return the rendered conversation after a check, quicker than :meth:`get_loss_mask`, that
        it has a mask.

        Raises:
            ValueError: As :meth:`get_loss_mask`.
        """
        if self.tokenizer_type == "distill_qwen":
            self._last_answer(messages, tools)
            return self._render(messages, tools)
        if problem := untrained(list(messages)):
            raise ValueError(problem)
        text = self._render(messages, tools)
        trained = [i for i, message in enumerate(messages) if _is_trained(message)]
        self._marked(messages, trained, tools)
        return text

    def get_loss_mask(self, messages: Messages, tools: Tools | None = None) -> IdsAndMask:
        """Return the token ids of the whole conversation, and for each 1 if the assistant wrote it,
        otherwise 0.

        Raises:
            ValueError: There is no assistant message, or one cannot be found in the rendered
                template.
        """
        ids, mask, ending = self._masked(messages, tools)
        return [*ids, *ending], [*mask, *[1] * len(ending)]

    def get_loss_mask_with_multimodal_alignment(
        self, messages: Messages, input_ids: Sequence[int], tools: Tools | None = None
    ) -> IdsAndMask:
        """Like :meth:`get_loss_mask`, for ids in which a processor has inserted many tokens for
        each image or video.

        Raises:
            ValueError: An assistant message is not found in ``input_ids``.
        """
        # Each trained run of the text is searched in the processor's ids, with a few tokens before
        # it as context.
        ids, mask, ending = self._masked(messages, tools)
        input_ids = [int(i) for i in input_ids]
        aligned = [0] * len(input_ids)
        cursor = 0
        for begin, end in _runs(mask):
            context = min(_HEADER_TOKENS, begin)
            at = _find(input_ids, ids[begin - context : end], cursor)
            if at < 0:
                raise ValueError(
                    f"the assistant message in tokens {begin} to {end} of the text is not in the "
                    "processor's input_ids"
                )
            cursor = at + context + end - begin
            aligned[at + context : cursor] = [1] * (end - begin)
        return [*input_ids, *ending], [*aligned, *[1] * len(ending)]

    @staticmethod
    def get_response_lengths(loss_masks: Sequence[Sequence[int]]) -> list[int]:
        """For each mask, the number of tokens from the first 1 to the end; 0 without a 1."""
        return [len(mask) - list(mask).index(1) if 1 in mask else 0 for mask in loss_masks]

    def get_text_from_loss_mask(
        self, token_ids: Sequence[int], loss_masks: Sequence[int]
    ) -> list[str]:
        """The text of each run of trained tokens."""
        return [self.tokenizer.decode(list(token_ids[a:b])) for a, b in _runs(loss_masks)]

    def _render(self, messages: Messages, tools: Tools | None, ask: bool = False) -> str:
        clean = [
            {k: v for k, v in message.items() if k not in ("step_loss_mask", "weight")}
            for message in messages
        ]
        return render_chat(
            self.tokenizer, clean, tools=tools, add_generation_prompt=ask, **self.template_kwargs
        )

    def _masked(
        self, messages: Messages, tools: Tools | None
    ) -> tuple[list[int], list[int], list[int]]:
        """The ids of the rendered conversation, their mask, and the ids that end the last turn if
        the template does not end it."""
        if self.tokenizer_type == "distill_qwen":
            return *self._last_answer(messages, tools), []
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError("a conversation without an assistant message has nothing to train on")
        # The offsets connect tokens with characters, in which the messages are found.
        text = self._render(messages, tools)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = list(encoded["input_ids"])
        offsets = list(encoded["offset_mapping"])
        mask = [0] * len(ids)
        ending = list[int]()
        for i, message in enumerate(messages):
            if not _is_trained(message):
                continue
            begin, end, turn_end = self._span(messages, i, text, tools)
            # A token that begins before the message belongs to the header, even if it extends into
            # the message.
            first = bisect_left(offsets, begin, key=itemgetter(0))
            last, ended = self._turn_end(text, ids, offsets, end, turn_end)
            mask[first:last] = [1] * max(last - first, 0)
            if not ended and i == len(messages) - 1:
                ending = self._ending(message, tools)
            elif not ended and not self._warned:
                self._warned = True
                logger.warning(
                    "the chat template ends a turn of the assistant with no token at which the model "
                    "stops (eos_token_id of generation_config.json): only the last turn of each "
                    "conversation trains an end"
                )
        return ids, mask, ending

    def _span(
        self, messages: Messages, i: int, text: str, tools: Tools | None
    ) -> tuple[int, int, str]:
        """Begin and end of the i-th message, an assistant's, in the rendered text, and what the
        template writes after the content of such a message at the end of a conversation."""
        other = self._marked(messages, [i], tools)
        begin = _common_prefix(text, other)
        end = len(text) - _common_prefix(text[::-1], other[::-1])
        last = self._render([*messages[:i], {"role": "assistant", "content": _MARK}], tools)
        turn_end = last.partition(_MARK)[2]
        begin = self._after_header(text, begin, messages[:i], tools, turn_end.strip())
        if self.tokenizer_type == "qwen3_5":
            begin += len(next((opened for opened in _OPENED if text.startswith(opened, begin)), ""))
        return begin, end, turn_end

    def _marked(self, messages: Messages, numbers: Sequence[int], tools: Tools | None) -> str:
        """The rendered conversation with a mark in place of the messages with these numbers, which
        are an assistant's.

        Raises:
            ValueError: The template does not write one of the marks exactly once.
        """
        marks = {i: _MARK.replace("slime", f"slime{i}") for i in numbers}
        other = self._render(
            [
                {"role": "assistant", "content": marks[i]} if i in marks else m
                for i, m in enumerate(messages)
            ],
            tools,
        )
        for i, mark in marks.items():
            if other.count(mark) != 1:
                raise ValueError(
                    f"the chat template does not show the content of message {i} exactly once"
                )
        return other

    def _turn_end(
        self, text: str, ids: list[int], offsets: list[tuple[int, int]], end: int, turn_end: str
    ) -> tuple[int, bool]:
        """The position after the last trained token of a turn whose content ends at the character
        ``end``, and whether that turn has an end at which generation stops."""
        stop = end + _common_prefix(text[end : end + len(turn_end)], turn_end)
        last = bisect_left(offsets, stop, key=itemgetter(0))
        # The template ends a turn at the end of a conversation in another way.
        if stop < end + len(turn_end):
            while last and offsets[last - 1][0] >= end and offsets[last - 1][1] > stop:
                last -= 1
        tail = last
        while tail and offsets[tail - 1][1] > end:
            tail -= 1
        if self._ends.intersection(ids[tail:last]) or (
            stop == end + len(turn_end) and turn_end.strip()
        ):
            return last, True
        following = last
        while following < len(ids) and not text[slice(*offsets[following])].strip():
            following += 1
        if following < len(ids) and ids[following] in self._markers:
            return following + 1, True
        return last, False

    def _ending(self, message: Mapping[str, object], tools: Tools | None) -> list[int]:
        """The tokens that end a last message whose end the template does not write: up to the
        marker of the message that would follow, if generation stops at it, otherwise the
        tokenizer's end of text."""
        # Ask the template what follows such a message: its first marker is where the model has to
        # stop. GLM-4 names a tool in the metadata of the call.
        calls = message.get("tool_calls") or isinstance(message.get("metadata"), str)
        for role in ("tool", "observation") if calls else ("user",):
            turns = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _MARK}]
            try:
                after = self._render([*turns, {"role": role, "content": "-"}], tools).partition(
                    _MARK
                )[2]
            except TemplateRefusal:
                continue
            ids = list(self.tokenizer(after, add_special_tokens=False)["input_ids"])
            marker = next((i for i, token in enumerate(ids) if token in self._markers), len(ids))
            blank = not self.tokenizer.decode(ids[:marker]).strip()
            if marker < len(ids) and blank:
                return ids[: marker + 1]
        return [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]

    def _after_header(
        self, text: str, begin: int, before: Messages, tools: Tools | None, turn_end: str
    ) -> int:
        """The end of the generation header before ``begin``, or ``begin`` itself if there is none.

        The model writes everything after that header, so a part that the template puts between
        header and content (an empty ``<think>`` block) is trained as well.
        """
        try:
            history = self._render(before, tools)
            asked = self._render(before, tools, ask=True)
        except TemplateRefusal:  # of a conversation that ends here, or that has no message yet
            return begin
        if text.startswith(asked) and len(asked) <= begin:
            return len(asked)
        # Some templates drop the reasoning of earlier turns, so the text does not start with the
        # earlier prompt. Then look for the header itself, but not for that of an earlier turn.
        header = asked.removeprefix(history)
        at = text.rfind(header, 0, begin) if header and header != asked else -1
        between = text[at + len(header) : begin]
        ends = [turn_end] if turn_end else self._special_texts
        is_an_earlier_turns = any(end in between for end in ends) if ends else bool(between)
        return begin if at < 0 or is_an_earlier_turns else at + len(header)

    def _last_answer(self, messages: Messages, tools: Tools | None) -> IdsAndMask:
        if not messages or messages[-1]["role"] != "assistant":
            raise ValueError(
                "distill_qwen trains on the last message, which must be the assistant's"
            )
        # Text before and after are encoded separately, as the engine does when it generates the
        # answer.
        prompt = self._render(messages[:-1], tools, ask=True)
        answer = joined_text(messages[-1].get("content"))
        if answer is None or messages[-1].get("tool_calls"):
            raise ValueError(
                "distill_qwen trains on the text of the last message, not on its tool calls"
            )
        # Newer templates open the reasoning in their generation header.
        answer = answer.removeprefix(
            next((opened for opened in _OPENED if prompt.endswith(opened)), "")
        )
        prompt_ids = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        answer_ids = self.tokenizer(
            answer + str(self.tokenizer.eos_token or ""), add_special_tokens=False
        )["input_ids"]
        if self.tokenizer.eos_token is None:
            answer_ids = [*answer_ids, *self._ending(messages[-1], tools)]
        trained = int(_is_trained(messages[-1]))
        return [*prompt_ids, *answer_ids], [0] * len(prompt_ids) + [trained] * len(answer_ids)


def _common_prefix(a: str, b: str) -> int:
    """Length of the common prefix of two texts, by binary search."""
    low = 0
    high = min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _runs(mask: Sequence[int]) -> list[tuple[int, int]]:
    """Begin and end of each run of ones."""
    padded = [0, *mask, 0]
    edges = [i for i in range(len(mask) + 1) if padded[i] != padded[i + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _find(values: list[int], wanted: list[int], start: int) -> int:
    """First position of ``wanted`` in ``values`` from ``start`` on, or -1."""
    for at in range(start, len(values) - len(wanted) + 1):
        if values[at] == wanted[0] and values[at : at + len(wanted)] == wanted:
            return at
    return -1
