"""The conversation of an agent with the model, as a tree of turns, and the samples that are made of its leaves.

A turn is one answer of the model. Its parent is the turn that its request went on from: the deepest one whose whole
conversation begins the request. The same request twice, or one that changes what was said, makes a branch.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slime.agent.messages import Ask, Message, Tool, key_of
from slime.data.sample import Sample
from slime.rollout.generate import append_output
from slime.types import GenerateOutput, Tokenizer

if TYPE_CHECKING:
    from slime.config.args import Args

Key = tuple[str, str, str]


@dataclass(eq=False)
class Turn:
    """One answer of the model, and the client's messages before it.

    Attributes:
        messages: the client's, since the parent's answer.
        answer: the model's, as the client got it.
        added_ids: ids between the parent's output and this one; of a first turn its whole prompt.
        outputs: the engine's answers, in order; several where it was interrupted and went on.
        overflowed: the program asked for more after this turn, and no room was left.
        constrained: it was sampled under a constraint, from a part of the vocabulary.
    """

    parent: Turn | None
    messages: list[Message]
    tools: list[Tool]
    answer: Message
    added_ids: list[int]
    outputs: list[GenerateOutput]
    id: str
    created: int = field(default_factory=lambda: int(time.time()))
    overflowed: bool = False
    constrained: bool = False
    children: list[Turn] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.keys: list[Key] = [key_of(message) for message in [*self.messages, self.answer]]
        self.tools_key = json.dumps(self.tools, sort_keys=True)
        self.depth: int = 1 if self.parent is None else self.parent.depth + 1
        self.prompt_tokens: int = (0 if self.parent is None else self.parent.length) + len(self.added_ids)
        self.length: int = self.prompt_tokens + len(self.output_ids)  # ids up to the end of this turn

    @property
    def output_ids(self) -> list[int]:
        """The token ids that the engine sampled."""
        return [int(item[1]) for output in self.outputs for item in output["meta_info"]["output_token_logprobs"]]

    @property
    def cached_tokens(self) -> int:
        return int(self.outputs[0]["meta_info"].get("cached_tokens") or 0)

    @property
    def cut(self) -> bool:
        """Whether the answer was truncated at its length limit."""
        return bool(self.outputs[-1]["meta_info"]["finish_reason"]["type"] == "length")

    def path(self) -> list[Turn]:
        """The turns from the first one to this one."""
        turns = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    def ids(self) -> list[int]:
        """All ids up to the end of this turn: what the engine has seen and sampled."""
        return [token for turn in self.path() for token in (*turn.added_ids, *turn.output_ids)]

    def conversation(self) -> list[Message]:
        return [message for turn in self.path() for message in (*turn.messages, turn.answer)]


class Tree:
    """The turns of one session."""

    def __init__(self) -> None:
        self.turns: dict[str, Turn] = {}  # in the order in which they were completed

    def find(self, ask: Ask) -> Turn | None:
        """The turn that a request continues, the newest of equal ones; None for a new conversation."""
        tools_key = json.dumps(ask.tools, sort_keys=True)
        roots = [turn for turn in self.turns.values() if turn.parent is None and turn.tools_key == tools_key]
        return _deepest(roots, [key_of(message) for message in ask.messages])

    def add(self, turn: Turn) -> None:
        self.turns[turn.id] = turn
        if turn.parent is not None:
            turn.parent.children.append(turn)

    def remove(self, turn: Turn) -> None:
        """Remove an answer that its client never received."""
        if self.turns.pop(turn.id, None) is not None and turn.parent is not None:
            turn.parent.children.remove(turn)

    def leaves(self) -> list[Turn]:
        """Turns that no other turn continues, in the order in which they were completed."""
        return [turn for turn in self.turns.values() if not turn.children]

    def samples(self, args: Args, base: Sample, tokenizer: Tokenizer) -> list[Sample]:
        """One sample per leaf; turns that several share are trained in the first of them alone."""
        trained: set[Turn] = set()
        samples = []
        for leaf in self.leaves():
            sample = _sample(args, base, leaf, trained)
            sample.response = tokenizer.decode(
                sample.tokens[-sample.response_length :],
                skip_special_tokens=args.rollout_skip_special_tokens,
            )
            trained.update(leaf.path())
            samples.append(sample)
        return samples


def _deepest(roots: Sequence[Turn], keys: list[Key]) -> Turn | None:
    """The turn with the longest conversation that begins ``keys`` and ends before they do."""
    best: Turn | None = None
    open_turns = [(turn, 0) for turn in reversed(roots)]  # a turn, and how many keys its ancestors take
    while open_turns:
        turn, start = open_turns.pop()
        end = start + len(turn.keys)
        if len(keys) > end and keys[start:end] == turn.keys:  # the request says something more
            best = turn if best is None or turn.depth >= best.depth else best
            open_turns += [(child, end) for child in reversed(turn.children)]
    return best


def _sample(args: Args, base: Sample, leaf: Turn, trained: set[Turn]) -> Sample:
    sample = copy.copy(base)
    sample.spec_info, sample.prefix_cache_info = copy.copy(base.spec_info), copy.copy(base.prefix_cache_info)
    sample.metadata = {**base.metadata, "messages": leaf.conversation(), "round_number": leaf.depth}
    for turn in leaf.path():
        if turn.parent is None:
            sample.tokens = list(turn.added_ids)
        else:
            sample.append_response_tokens(args, tokens=turn.added_ids, log_probs=None, trainable=False)
        if turn in trained:
            sample.append_response_tokens(args, tokens=turn.output_ids, log_probs=None, trainable=False)
            continue
        for output in turn.outputs:  # the text is decoded in one piece at the end
            if turn.constrained and not args.allow_truncated_sampling:
                meta = output["meta_info"]
                ids = [int(item[1]) for item in meta["output_token_logprobs"]]
                sample.append_response_tokens(args, tokens=ids, log_probs=None, trainable=False, meta_info=meta)
            else:
                append_output(args, sample, {**output, "text": ""})
    sample.status = Sample.Status.TRUNCATED if leaf.cut or leaf.overflowed else Sample.Status.COMPLETED
    return sample
