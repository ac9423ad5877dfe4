"""Does the commands of a log again, and compares the answers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from slime.cli.command import CommandError
from slime.plugins.serve.log import Answer, Record
from slime.plugins.serve.trainer import Trainer

if TYPE_CHECKING:
    from slime.api.session import Session


@dataclass
class Replayed:
    """What a replay has found.

    Attributes:
        equal: The number of commands with the same answer, bit for bit.
        differing: The ids of those with another one.
        unanswered: The ids of those without an answer in the log.
    """

    equal: int = 0
    differing: list[str] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)


def replay(session: Session, records: Sequence[Record]) -> Replayed:
    """Do all commands of models again, from the first on, in a folder of their own. Samples are not
    drawn again: what was trained on them is part of the commands.

    Raises:
        CommandError: The log has not all commands of a model.
    """
    answers = {one["answer"]: one for one in records if "answer" in one}
    found = Replayed()
    with tempfile.TemporaryDirectory(prefix="slime-replay-") as folder:
        trainer = Trainer(session, Path(folder))
        for record in _in_order(records):
            try:
                answer: Answer = session.on_backend(trainer.do, record).result()
            except (ValueError, FloatingPointError) as error:
                answer = Answer(error=str(error))
            recorded = answers.get(record["id"])
            if recorded is None:
                found.unanswered.append(record["id"])
            elif answer == Answer.of(recorded):
                found.equal += 1
            else:
                found.differing.append(record["id"])
    return found


def _in_order(records: Sequence[Record]) -> Iterator[Record]:
    """Yield the commands of models in an order in which the server may have done them: as they
    arrived, but those of a model by their numbers.
    """
    waiting: dict[str, dict[int, Record]] = {}
    following: dict[str, int] = {}
    for record in records:
        if "model" not in record:
            continue
        model = record["model"]
        waiting.setdefault(model, {})[record["number"]] = record
        number = following.setdefault(model, 0)
        while number in waiting[model]:
            yield waiting[model].pop(number)
            number = following[model] = number + 1
    if left := [one["id"] for commands in waiting.values() for one in commands.values()]:
        raise CommandError(
            f"{len(left)} commands cannot be done again, {left[0]} first: the log has none of those "
            "before them (--compact removes them)"
        )
