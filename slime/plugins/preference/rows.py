"""Pairs of a data set: a prompt, the response that is preferred, and the other one. For KTO also rows
with one response that is desirable or not. They are a rollout as they are: nothing is generated.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from slime.data.dataset import PromptMaker
from slime.data.prompts import PromptRow, Report, check_messages
from slime.data.rows import RawRow
from slime.data.sample import Group, Sample, flatten
from slime.data.source import DataSource, RolloutDataSource, prompt_maker
from slime.data.tokenizers import render_chat
from slime.plugins.preference.losses import with_mismatched
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.prompts import encode
from slime.rollout.state import GenerateState
from slime.types import Tokenizer

if TYPE_CHECKING:
    from slime.config.args import Args


def prompt_and_answer(
    tokenizer: Tokenizer,
    prompt: str | Sequence[Mapping[str, Any]],
    answer: str | Sequence[Mapping[str, Any]],
    **options: object,
) -> tuple[str, str]:
    """Return prompt and answer as texts.

    Messages are rendered with the chat template, and the answer is what it adds to the prompt,
    without white space after the end token, which no model samples. A text gets the end token of
    the tokenizer.

    Args:
        options: Arguments of the chat template.

    Raises:
        ValueError: The template changes the prompt when the answer follows, or one of the two is a
            text and the other has messages that it does not fit.
    """
    end = tokenizer.eos_token or ""
    if isinstance(prompt, str):
        if not isinstance(answer, str):
            raise ValueError("a prompt that is a text needs texts as responses")
        return prompt, answer + end
    turns = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    start = render_chat(tokenizer, prompt, add_generation_prompt=True, **options)
    whole = render_chat(tokenizer, [*prompt, *turns], **options)
    if not whole.startswith(start):
        raise ValueError(
            "the chat template renders the prompt otherwise when the answer follows, so the answer "
            "cannot be cut out"
        )
    text = whole.removeprefix(start)
    return start, text.rstrip() if end and text.rstrip().endswith(end) else text


@dataclass
class PairMaker(PromptMaker):
    """Makes samples whose label is ``{"chosen": …, "rejected": …}``, texts or messages; with
    ``completion``, of a row with this column ``{"chosen": …}`` or ``{"rejected": …}``. Of a row with
    several ``responses``, the pair is the one with the highest score and the one with the lowest.

    A row without a prompt has messages in both columns that begin alike (the form of many public
    data sets); what they have in common is the prompt.
    """

    chosen: str = "chosen"
    rejected: str = "rejected"
    completion: str | None = None
    responses: str = "responses"
    scores: str = "scores"
    weights: Mapping[str, float] | None = None

    def parse(self, raws: list[RawRow]) -> tuple[list[PromptRow], Report]:
        pairs = []
        wrong: list[tuple[str, ValueError]] = []
        for raw in raws:
            try:
                pairs.append(RawRow(raw.where, self._pair(raw.decode()), raw.filled))
            except ValueError as error:
                wrong.append((raw.where, error))
        rows, report = super().parse(pairs)
        report.rows += len(wrong)
        for where, problem in wrong:
            report.add(where, problem)
        return rows, report

    def problem(self, row: PromptRow) -> str | None:
        """Explain why the rollout could not render a response after its prompt."""
        if self.tokenizer is None:
            return None
        answers: Any = row.label
        try:
            for answer in answers.values():
                prompt_and_answer(self.tokenizer, row.prompt, answer, **self.template_kwargs)
        except ValueError as error:
            return str(error)
        return None

    def _pair(self, row: dict[str, Any]) -> dict[str, Any]:
        assert self.keys.label is not None, "the check of the arguments asks for it"
        if self.completion is not None and row.get(self.completion):
            good = row.get(self.keys.label)
            if good not in (True, False):
                raise ValueError(
                    f"its {self.keys.label} must say whether its {self.completion} is desirable: true "
                    f"or false, not {good!r}"
                )
            kind = "chosen" if good else "rejected"
            answer = _answer(row, self.completion)
            if isinstance(row.get(self.keys.prompt), str) and not isinstance(answer, str):
                raise ValueError(
                    f"its {self.keys.prompt} is a text, but its {self.completion} has messages: both "
                    "must be texts, or messages"
                )
            return {**row, self.keys.label: {kind: answer}}
        if row.get(self.responses):
            row = {**row, **self._best_and_worst(row)}
        missing = [name for name in (self.chosen, self.rejected) if not row.get(name)]
        if missing:
            raise ValueError(
                f"it has no {' and no '.join(missing)} (--chosen-column, --rejected-column); its columns "
                f"are {', '.join(row)}"
            )
        chosen, rejected = (_answer(row, name) for name in (self.chosen, self.rejected))
        if type(chosen) is not type(rejected):
            raise ValueError(f"{self.chosen} and {self.rejected} must both be texts, or messages")
        prompt = row.get(self.keys.prompt)
        # Beside whole conversations, a text only repeats the words of their first message.
        if prompt is None or (isinstance(prompt, str) and not isinstance(chosen, str)):
            prompt, chosen, rejected = _common(chosen, rejected)
        label = {"chosen": chosen, "rejected": rejected}
        return {**row, self.keys.prompt: prompt, self.keys.label: label}

    def _best_and_worst(self, row: Mapping[str, Any]) -> dict[str, Any]:
        responses = row[self.responses]
        scores = row.get(self.scores)
        if not isinstance(scores, Sequence) or len(scores) != len(responses):
            raise ValueError(f"its {self.scores} must be one for each of its {self.responses}")
        totals = [self._total(score) for score in scores]
        if min(totals) == max(totals):
            raise ValueError(f"its {self.scores} are all {totals[0]:g}, so it has no pair")
        best, worst = (responses[totals.index(end)] for end in (max(totals), min(totals)))
        return {self.chosen: best, self.rejected: worst}

    def _total(self, score: object) -> float:
        items: Mapping[str, Any] = score if isinstance(score, Mapping) else {"": score}
        weights = self.weights if isinstance(score, Mapping) else None
        try:
            return sum(
                float(value) * (1.0 if weights is None else weights.get(name, 0.0))
                for name, value in items.items()
            )
        except (TypeError, ValueError):
            raise ValueError(f"its {self.scores} have {score!r}, which is no number") from None


def _answer(row: Mapping[str, Any], name: str) -> Any:
    """The response of a column: a text, or messages, which are checked."""
    return row[name] if isinstance(row[name], str) else check_messages(row[name], repr(name))


def _common(chosen: object, rejected: object) -> tuple[list[Any], list[Any], list[Any]]:
    """Divide two conversations into the messages that they share and the rest of each."""
    if not isinstance(chosen, Sequence) or isinstance(chosen, str):
        raise ValueError(
            "a row without a prompt (--input-key) needs whole conversations as its two responses"
        )
    assert isinstance(rejected, Sequence)
    same = 0
    while same < min(len(chosen), len(rejected)) - 1 and chosen[same] == rejected[same]:
        same += 1
    if not same:
        raise ValueError("its two conversations do not begin alike, and no messages are its prompt")
    return list(chosen[:same]), list(chosen[same:]), list(rejected[same:])


def pair_maker(args: Args) -> PairMaker:
    """What makes pairs of the rows of ``--prompt-data``."""
    plain = prompt_maker(args)
    given = {one.name: getattr(plain, one.name) for one in fields(plain) if one.init}
    return PairMaker(
        **given | {"apply_chat_template": False, "max_length": None},
        chosen=args.chosen_column,
        rejected=args.rejected_column,
        completion=args.completion_column if args.loss_type == "kto" else None,
        responses=args.responses_column,
        scores=args.scores_column,
        weights=args.reward_weights,
    )


class PreferenceSource(RolloutDataSource):
    """The data source of pairs; the order of an epoch, and its state, are those of prompts."""

    maker = staticmethod(pair_maker)


def generate_rollout(
    args: Args, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """Return ``--rollout-batch-size`` rows. A row is one rollout: of two samples for a pair, the
    chosen response and the rejected one, and for KTO (:func:`with_mismatched`) of twice as many as it
    has responses.

    Raises:
        ValueError: ``evaluation`` is True, or a response has no tokens.
    """
    if evaluation:
        raise ValueError(
            "pairs are not evaluated: set --eval-function-path, or do not set --eval-interval"
        )
    state = GenerateState(args)
    groups: list[Group] = []
    for group in data_source.get_samples(args.rollout_batch_size):
        (pair,) = flatten(group)
        assert isinstance(pair.label, dict), "the data source makes pairs"
        groups.append([[filled(state, pair, name) for name in pair.label]])
    if args.loss_type == "kto":
        groups = with_mismatched(groups, args.kto_desirable_weight, args.kto_undesirable_weight)
    return RolloutFnTrainOutput(samples=groups)


def filled(state: GenerateState, pair: Sample, name: str) -> Sample:
    """Return the sample of one response of a pair."""
    assert isinstance(pair.label, dict), "the data source makes pairs"
    options = pair.apply_chat_template_kwargs
    answer: Any = pair.label[name]
    try:
        prompt, response = prompt_and_answer(state.tokenizer, pair.prompt, answer, **options)
    except ValueError as error:
        raise ValueError(f"sample {pair.index}: {error}") from error
    sample = copy.copy(pair)
    ids = encode(state.tokenizer, response)
    if not ids:
        raise ValueError(f"sample {pair.index}: its {name} response has no tokens")
    sample.tokens = encode(state.tokenizer, prompt) + ids
    sample.response = response
    sample.response_length = len(ids)
    if state.args.loss_type == "reward_model":
        # A value is read before each response token. One more token makes the value after the last
        # one, which is the score; it is attended to by none.
        sample.tokens = [*sample.tokens, ids[-1]]
        sample.loss_mask = [0] * len(ids) + [1]
        sample.response_length = len(ids) + 1
    sample.reward = float(name == "chosen")
    sample.status = Sample.Status.COMPLETED
    return sample
