"""Loss masks of conversations: only the tokens that the assistant wrote are trained.

The token ids are always those of the tokenizer's own template over the whole conversation. The position of an assistant
message in the rendered text is found without knowledge of the template: the same conversation is rendered again with
that message replaced by a mark, and the part that differs is the message (with its tool calls and reasoning). The
end-of-turn marker after it belongs to the message; the generation header before it does not.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

from slime.data.tokenizers import render_chat
from slime.types import Tokenizer

_MARK = "\ue000slime\ue001"  # private-use characters, which appear in no text and no template
_R1_ASSISTANT = "<｜Assistant｜>"
_THINK = "<think>\n"
_HEADER_TOKENS = 4  # tokens of context before a response, which distinguish equal texts when masks are aligned
TYPES = ("qwen", "qwen3", "qwen3_5", "distill_qwen")

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
    if not any(message.get("step_loss_mask", 1) for message in answers):
        return "no assistant turn of its conversation is to be trained on"
    return None


class MultiTurnLossMaskGenerator:
    """Token ids and loss mask of conversations, for supervised training.

    Args:
        tokenizer: A fast tokenizer with a chat template.
        tokenizer_type: ``qwen`` and ``qwen3``: any template with one block per message (changed to ``distill_qwen`` for
            tokenizers of R1-distilled models). ``qwen3_5``: the same, but the ``<think>`` that opens a response is
            masked out, since the template's generation header contains it. ``distill_qwen``: only the last message,
            which must be the assistant's, is trained.
        template_kwargs: Additional arguments of the chat template.

    A message with ``step_loss_mask: 0`` is not trained.
    """

    def __init__(
        self, tokenizer: Tokenizer, tokenizer_type: str = "qwen", template_kwargs: Mapping[str, object] | None = None
    ) -> None:
        if tokenizer_type not in TYPES:
            raise ValueError(f"unknown --loss-mask-type {tokenizer_type!r} (known: {', '.join(TYPES)})")
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(f"loss masks need a fast tokenizer, which maps tokens to text; this is {type(tokenizer)}")
        if tokenizer_type == "qwen" and _R1_ASSISTANT in tokenizer.get_vocab():
            tokenizer_type = "distill_qwen"
        self.tokenizer, self.template_kwargs = tokenizer, template_kwargs or {}
        self.tokenizer_type = tokenizer_type

    def get_loss_mask(self, messages: Messages, tools: Tools | None = None) -> tuple[list[int], list[int]]:
        """Return the token ids of the whole conversation, and for each 1 if the assistant wrote it, otherwise 0.

        Raises:
            ValueError: There is no assistant message, or one cannot be found in the rendered template.
        """
        if self.tokenizer_type == "distill_qwen":
            return self._last_answer(messages, tools)
        text = self._render(messages, tools)
        spans = [
            self._span(messages, i, text, tools)
            for i, message in enumerate(messages)
            if message["role"] == "assistant" and message.get("step_loss_mask", 1)
        ]
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError("a conversation without an assistant message has nothing to train on")
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        # A token that begins before the message belongs to the header, even if it extends into the message.
        mask = [int(any(a <= begin < b for a, b in spans)) for begin, _ in encoded["offset_mapping"]]
        return list(encoded["input_ids"]), mask

    def get_loss_mask_with_multimodal_alignment(
        self, messages: Messages, input_ids: Sequence[int], tools: Tools | None = None
    ) -> tuple[list[int], list[int]]:
        """Like :meth:`get_loss_mask`, for ids in which a processor has inserted many tokens for each image or video.

        Raises:
            ValueError: An assistant message is not found in ``input_ids``.
        """
        ids, mask = self.get_loss_mask(messages, tools)
        input_ids = [int(i) for i in input_ids]
        aligned = [0] * len(input_ids)
        cursor = 0
        for begin, end in _runs(mask):
            context = min(_HEADER_TOKENS, begin)
            at = _find(input_ids, ids[begin - context : end], cursor)
            if at < 0:
                raise ValueError(
                    f"the assistant message in tokens {begin} to {end} of the text is not in the processor's input_ids"
                )
            cursor = at + context + end - begin
            aligned[at + context : cursor] = [1] * (end - begin)
        return input_ids, aligned

    @staticmethod
    def get_response_lengths(loss_masks: Sequence[Sequence[int]]) -> list[int]:
        """For each mask, the number of tokens from the first 1 to the end; 0 without a 1."""
        return [len(mask) - list(mask).index(1) if 1 in mask else 0 for mask in loss_masks]

    def get_text_from_loss_mask(self, token_ids: Sequence[int], loss_masks: Sequence[int]) -> list[str]:
        """The text of each run of trained tokens."""
        return [self.tokenizer.decode(list(token_ids[a:b])) for a, b in _runs(loss_masks)]

    def _render(self, messages: Messages, tools: Tools | None, ask: bool = False) -> str:
        clean = [{k: v for k, v in message.items() if k != "step_loss_mask"} for message in messages]
        return render_chat(
            self.tokenizer, copy.deepcopy(clean), tools=tools, add_generation_prompt=ask, **self.template_kwargs
        )

    def _span(self, messages: Messages, i: int, text: str, tools: Tools | None) -> tuple[int, int]:
        """Begin and end of the i-th message, an assistant's, in the rendered text, with its end-of-turn marker."""
        marked = [*messages[:i], {"role": "assistant", "content": _MARK}, *messages[i + 1 :]]
        other = self._render(marked, tools)
        if other.count(_MARK) != 1:
            raise ValueError(f"the chat template does not show the content of message {i} exactly once")
        begin = _common_prefix(text, other)
        end = len(text) - _common_prefix(text[::-1], other[::-1])
        # The end-of-turn marker: what the template writes after the content of an assistant message at the end.
        last = self._render([*messages[:i], {"role": "assistant", "content": _MARK}], tools)
        turn_end = last.partition(_MARK)[2]
        begin = self._after_header(text, begin, messages[:i], tools, turn_end.strip())
        if self.tokenizer_type == "qwen3_5" and text.startswith(_THINK, begin):
            begin += len(_THINK)
        return begin, end + len(turn_end)

    def _after_header(self, text: str, begin: int, before: Messages, tools: Tools | None, turn_end: str) -> int:
        """The end of the generation header before ``begin``, or ``begin`` itself if there is none.

        The model writes everything after that header, so a part that the template puts between header and content (an
        empty ``<think>`` block) is trained as well.
        """
        from jinja2 import TemplateError

        try:
            history, asked = self._render(before, tools), self._render(before, tools, ask=True)
        except (TemplateError, IndexError):  # Some templates refuse a conversation that ends (or starts) here.
            return begin
        if text.startswith(asked) and len(asked) <= begin:
            return len(asked)
        # Some templates drop the reasoning of earlier turns, so the text does not start with the earlier prompt. Then
        # look for the header itself, but not for that of an earlier turn.
        header = asked.removeprefix(history)
        at = text.rfind(header, 0, begin) if header and header != asked else -1
        between = text[at + len(header) : begin]
        is_an_earlier_turns = turn_end in between if turn_end else bool(between)
        return begin if at < 0 or is_an_earlier_turns else at + len(header)

    def _last_answer(self, messages: Messages, tools: Tools | None) -> tuple[list[int], list[int]]:
        if not messages or messages[-1]["role"] != "assistant":
            raise ValueError("distill_qwen trains on the last message, which must be the assistant's")
        prompt = self._render(messages[:-1], tools, ask=True)
        answer = str(messages[-1]["content"])
        if prompt.endswith(_THINK) and answer.startswith(_THINK):
            answer = answer[len(_THINK) :]  # Newer templates open the reasoning in their generation header.
        prompt_ids = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        answer_ids = self.tokenizer(answer + str(self.tokenizer.eos_token or ""), add_special_tokens=False)["input_ids"]
        trained = int(bool(messages[-1].get("step_loss_mask", 1)))
        return [*prompt_ids, *answer_ids], [0] * len(prompt_ids) + [trained] * len(answer_ids)


def _common_prefix(a: str, b: str) -> int:
    """Length of the common prefix of two texts, by binary search."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _runs(mask: Sequence[int]) -> list[tuple[int, int]]:
    """Begin and end of each run of ones."""
    edges = [i for i in range(len(mask) + 1) if (mask[i - 1] if i else 0) != (mask[i] if i < len(mask) else 0)]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _find(values: list[int], wanted: list[int], start: int) -> int:
    """First position of ``wanted`` in ``values`` from ``start`` on, or -1."""
    for at in range(start, len(values) - len(wanted) + 1):
        if values[at] == wanted[0] and values[at : at + len(wanted)] == wanted:
            return at
    return -1
