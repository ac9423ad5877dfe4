"""The conversations of an agent with the model as a tree of turns, and the conversion of its leaves
to samples.

A turn is one answer of the model. Its parent is the turn that the request continues: the deepest
one whose whole conversation is a prefix of the request. Sending the same request twice, or changing
earlier messages, creates a branch.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from slime.data.sample import Sample
from slime.rollout.ends import text_of
from slime.rollout.generate import append_output
from slime.rollout.prompts import prompt_ids
from slime.rollout.state import GenerateState
from slime.types import GenerateOutput

from .messages import Ask, Message, Tool, key_of

Key = tuple[str, str, str]


def sampled_ids(outputs: Sequence[GenerateOutput]) -> list[int]:
    """Return the token ids of an engine's outputs."""
    scored = [item for one in outputs for item in one["meta_info"]["output_token_logprobs"]]
    return [int(item[1]) for item in scored]


@dataclass(eq=False)
class Turn:
    """One answer of the model, and the client's messages before it.

    Attributes:
        messages: The client's messages since the parent's answer.
        answer: The model's answer, as the client received it.
        added_ids: Token ids between the parent's output and this output; for a first turn, its
            whole prompt.
        outputs: The engine's outputs in order; several if generation was interrupted and continued.
        overflowed: Whether the program tried to continue after this turn, but there was no room for
            another answer.
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
    children: list[Turn] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.keys: list[Key] = [key_of(message) for message in [*self.messages, self.answer]]
        self.tools_key = json.dumps(self.tools, sort_keys=True)
        self.depth: int = 1 if self.parent is None else self.parent.depth + 1
        self.prompt_tokens: int = (0 if self.parent is None else self.parent.length) + len(
            self.added_ids
        )
        # number of ids up to the end of this turn
        self.length: int = self.prompt_tokens + len(self.output_ids)

    @property
    def output_ids(self) -> list[int]:
        """The sampled token ids."""
        return sampled_ids(self.outputs)

    @property
    def cached_tokens(self) -> int:
        return int(self.outputs[0]["meta_info"].get("cached_tokens") or 0)

    @property
    def cut(self) -> bool:
        """Whether the answer was truncated at its length limit."""
        return bool(self.outputs[-1]["meta_info"]["finish_reason"]["type"] == "length")

    def path(self) -> list[Turn]:
        """Return the turns from the first one to this one."""
        turns = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    def ids(self) -> list[int]:
        """Return all token ids up to the end of this turn, exactly as the engine received and
        sampled them.
        """
        return [token for turn in self.path() for token in (*turn.added_ids, *turn.output_ids)]

    def conversation(self) -> list[Message]:
        return [message for turn in self.path() for message in (*turn.messages, turn.answer)]

    def all_keys(self) -> tuple[str, list[Key]]:
        """Return what is compared of the whole conversation: its tools and the key of each
        message.
        """
        return self.tools_key, [key for turn in self.path() for key in turn.keys]


class Tree:
    """The turns of one session."""

    def __init__(self) -> None:
        self.turns: dict[str, Turn] = {}  # by id, in the order of their completion

    def find(self, ask: Ask) -> Turn | None:
        """Return the turn that a request continues, the newest if there are several; None for a new
        conversation.
        """
        tools_key = json.dumps(ask.tools, sort_keys=True)
        roots = [
            turn
            for turn in self.turns.values()
            if turn.parent is None and turn.tools_key == tools_key
        ]
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
        """Return the turns that no other turn continues, in the order of their completion."""
        return [turn for turn in self.turns.values() if not turn.children]

    def samples(self, state: GenerateState, base: Sample) -> list[Sample]:
        """Return one sample per leaf. A turn that several samples share is trained only in the
        first of them.
        """
        trained: set[Turn] = set()
        skip = state.args.rollout_skip_special_tokens
        samples = []
        for leaf in self.leaves():
            sample = _sample(state, base, leaf, trained)
            response = sample.tokens[-sample.response_length :]
            sample.response = text_of(state.tokenizer, state.end_token_ids, response, skip)
            trained.update(leaf.path())
            samples.append(sample)
        return samples


def _deepest(roots: Sequence[Turn], keys: list[Key]) -> Turn | None:
    """Return the turn with the longest conversation that is a proper prefix of ``keys``."""
    best: Turn | None = None
    # a turn, and the number of keys of its ancestors
    open_turns = [(turn, 0) for turn in reversed(roots)]
    while open_turns:
        turn, start = open_turns.pop()
        end = start + len(turn.keys)
        # the request has messages after this turn
        if len(keys) > end and keys[start:end] == turn.keys:
            best = turn if best is None or turn.depth >= best.depth else best
            open_turns += [(child, end) for child in reversed(turn.children)]
    return best


def without_response(state: GenerateState, sample: Sample) -> None:
    """Make a valid sample of one that got no answer of the model: its prompt, and one token that is
    not trained.
    """
    end = state.tokenizer.eos_token_id
    assert end is not None, "a model that answers in turns ends them with a token"
    # Conversations are text only, and the model may have no processor for the media of a prompt.
    sample.tokens = ([] if sample.multimodal_inputs else prompt_ids(state, sample)) or [end]
    sample.append_response_tokens(tokens=[end], log_probs=None, trainable=False)


def _sample(state: GenerateState, base: Sample, leaf: Turn, trained: set[Turn]) -> Sample:
    args = state.args
    sample = copy.copy(base)
    sample.spec_info = copy.copy(base.spec_info)
    sample.prefix_cache_info = copy.copy(base.prefix_cache_info)
    sample.metadata = {**base.metadata, "messages": leaf.conversation(), "round_number": leaf.depth}
    for turn in leaf.path():
        if turn.parent is None:
            sample.tokens = list(turn.added_ids)
        else:
            sample.append_response_tokens(
                args, tokens=turn.added_ids, log_probs=None, trainable=False
            )
        if turn in trained:  # an earlier sample trains this turn; here it is only context
            sample.append_response_tokens(
                args, tokens=turn.output_ids, log_probs=None, trainable=False
            )
            continue
        # without text: Tree.samples decodes all ids of the response together
        for output in turn.outputs:
            append_output(state, sample, {**output, "text": ""})
    sample.status = (
        Sample.Status.TRUNCATED if leaf.cut or leaf.overflowed else Sample.Status.COMPLETED
    )
    return sample
