"""Does the commands of models on a session, and writes what must outlive the process. Does those of a
log again, and compares the answers.
"""

from __future__ import annotations

import base64
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from slime.cli.command import CommandError
from slime.config.layout import ParallelLayout
from slime.config.seeds import derive_seed
from slime.data.datum import parts_of_data
from slime.data.schedule import PackingSettings
from slime.plugins.http.server import BadRequest
from slime.plugins.serve.adapters import Adapters, facts_of
from slime.plugins.serve.log import Answer, Record
from slime.plugins.serve.messages import batch_answer, read_batch
from slime.types import AdamSettings

if TYPE_CHECKING:
    from slime.api.session import Session
    from slime.backends.fsdp.backend import FsdpBackend


T = TypeVar("T")
_NAME = re.compile(r"(?!\.+$)[A-Za-z0-9._-]{1,100}")
_KINDS = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
"""The second parts of paths ``tinker://MODEL/KIND/NAME``, and what the API calls them."""
_SAVED = {
    "save_weights": "weights",
    "save_weights_for_sampler": "sampler_weights",
    "save_weights_external": "external_weights",
}
"""The kind of path of each command that saves."""
STATE = "state.safetensors"
_PASSING = "passing-"
_EXPIRES = ".expires"
OWNER = ".command"
"""The file of a checkpoint with the id of the command that wrote it."""
KEPT_PASSING = 8
"""How many unnamed sampler weights of a model are kept; of all weights, two."""
STEPS_OF_STATE = 20
"""After so many steps, the state of a model with all weights is written. It is large; after a kill,
the commands since the last one are done again."""


class Trainer:
    """All methods but :meth:`folder_of` run on the thread of the training rank, one at a time.

    Args:
        root: The folder of all models.
    """

    def __init__(self, session: Session, root: Path) -> None:
        self.args = session.args
        self.all_weights = session.args.lora_rank == 0
        """Whether models have all weights instead of adapters."""
        self.root = root
        self.adapters = Adapters()
        self.packing = PackingSettings.from_args(session.args)
        self.layout = ParallelLayout.from_args(session.args)

    # --- files -------------------------------------------------------------------------------

    def model_folder(self, model: str) -> Path:
        """Return the folder of a model, of which the server has made the name."""
        return self.root / model.replace(":", "_")

    def folder_of(self, path: str) -> Path:
        """Return the folder of a path ``tinker://MODEL/KIND/NAME``.

        Raises:
            BadRequest: It has another form, or there is nothing.
        """
        parts = path.removeprefix("tinker://").split("/")
        right = path.startswith("tinker://") and len(parts) == 3 and parts[1] in _KINDS
        if not right or not all(map(_NAME.fullmatch, (parts[0].replace(":", "_"), parts[2]))):
            raise BadRequest(f"{path!r} is not of the form tinker://MODEL/KIND/NAME")
        folder = self.model_folder(parts[0]) / parts[1] / parts[2]
        if not folder.is_dir() or self._is_over(folder):
            raise BadRequest(f"there are no weights {path}")
        return folder

    def can_be_sampled(self, folder: Path) -> bool:
        """Return whether the folder of a checkpoint has weights for the engine."""
        return (folder / ("config.json" if self.all_weights else "adapter_config.json")).is_file()

    def expiry(self, folder: Path) -> float | None:
        """Return when a checkpoint is removed, in seconds since 1970; None for never."""
        file = folder / _EXPIRES
        return float(file.read_text()) if file.is_file() else None

    def _is_over(self, folder: Path) -> bool:
        """Remove a checkpoint whose time is over; returns whether it was."""
        until = self.expiry(folder)
        if until is None or until > time.time():
            return False
        shutil.rmtree(folder)
        return True

    def checkpoints(self, model: str) -> list[tuple[str, str, Path]]:
        """Return the path, the kind as the API calls it, and the folder of each checkpoint."""
        found = []
        for kind, called in _KINDS.items():
            for folder in sorted((self.model_folder(model) / kind).glob("*")):
                if not folder.name.startswith((_PASSING, ".")) and not self._is_over(folder):
                    found.append((f"tinker://{model}/{kind}/{folder.name}", called, folder))
        return found

    # --- commands ----------------------------------------------------------------------------

    def do(self, backend: FsdpBackend, record: Record) -> Answer:
        """Do a command, and keep the model's state if it has changed."""
        methods: dict[str, Callable[[FsdpBackend, Record], Answer]] = {
            "create_model": self._create,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            **dict.fromkeys(_SAVED, self._save),
            "load_weights": self._load,
            "unload_model": self._unload,
        }
        answer = methods[record["do"]](backend, record)
        every = STEPS_OF_STATE if self.all_weights else 1
        stepped = record["do"] == "optim_step" and backend.optimizer.steps % every == 0
        if stepped or record["do"] == "load_weights":
            facts = {"number": record["number"], "answer": answer.line(record["id"])}
            file = self.model_folder(record["model"]) / STATE
            self.adapters.save(backend, record["model"], file, facts)
        return answer

    def reached(self, model: str) -> int:
        """Return the number of the last command in the saved state of a model; 0 without one."""
        file = self.model_folder(model) / STATE
        return int(facts_of(file)["number"]) if file.is_file() else 0

    def recover(self, backend: FsdpBackend, model: str) -> dict[str, Any] | None:
        """Load the last state of a model; returns its facts, None if there is none."""
        file = self.model_folder(model) / STATE
        if not file.is_file():
            return None
        self.adapters.load(backend, model, file, optimizer=True)
        return facts_of(file)

    def _create(self, backend: FsdpBackend, record: Record) -> Answer:
        seed = record["seed"]
        if seed is None:
            seed = derive_seed(self.args.seed, "adapter", record["place"])
        self.adapters.create(backend, record["model"], record["rank"], seed)
        return Answer({"model_id": record["model"], "type": "create_model"})

    def _forward_backward(self, backend: FsdpBackend, record: Record) -> Answer:
        batch = read_batch(base64.b64decode(record["body"]))
        (wire,) = parts_of_data(self.packing, self.layout, batch.data, masked=False, divisor=1.0)
        loss, log_probs = self.adapters.compute(
            backend, record["model"], wire, batch.loss, batch.options, batch.learns
        )
        return Answer(data=batch_answer({"loss": loss}, log_probs))

    def _optim_step(self, backend: FsdpBackend, record: Record) -> Answer:
        metrics = self.adapters.step(backend, record["model"], AdamSettings(**record["adam"]))
        return Answer({"metrics": metrics})

    def _save(self, backend: FsdpBackend, record: Record) -> Answer:
        model = record["model"]
        passing = False
        kind = _SAVED[record["do"]]
        name = record["name"] or f"{record['number']:06d}"
        if kind == "sampler_weights" and not record["name"]:
            name = _PASSING + name
            passing = True

        def write(folder: Path) -> None:
            if kind == "weights":
                self.adapters.save(backend, model, folder / STATE, {"id": record["id"]})
            else:
                self.adapters.export(backend, model, folder)

        answer = {"path": self._write(record, kind, name, write), "type": record["do"]}
        if passing:
            kept = 2 if self.all_weights else KEPT_PASSING
            for folder in sorted((self.model_folder(model) / kind).glob(_PASSING + "*"))[:-kept]:
                shutil.rmtree(folder)
            answer["sampling_session_id"] = record["sampler"]
        return Answer(answer)

    def _write(self, record: Record, kind: str, name: str, write: Callable[[Path], None]) -> str:
        """Write a checkpoint, which has its name only when it is complete; returns its path."""
        folder = self.model_folder(record["model"]) / kind / name
        owner = folder / OWNER
        if folder.is_dir() and owner.read_text() != record["id"] and not record["overwrite"]:
            raise BadRequest(f"there are weights {name!r} already: save with overwrite=True")
        part = folder.with_name(f".{name}")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        write(part)
        (part / OWNER).write_text(record["id"])
        if record["seconds"] is not None:
            (part / _EXPIRES).write_text(str(time.time() + record["seconds"]))
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
        return f"tinker://{record['model']}/{kind}/{name}"

    def _load(self, backend: FsdpBackend, record: Record) -> Answer:
        file = self.folder_of(record["path"]) / STATE
        if not file.is_file():
            raise BadRequest(f"{record['path']} has no training state: load what save_state wrote")
        self.adapters.load(backend, record["model"], file, record["optimizer"])
        return Answer({"path": record["path"], "type": "load_weights"})

    def _unload(self, backend: FsdpBackend, record: Record) -> Answer:
        self.adapters.drop(backend, record["model"])
        return Answer({"model_id": record["model"], "type": "unload_model"})


def checked_name(name: object) -> str | None:
    """Return the name of a checkpoint.

    Raises:
        BadRequest: It could name another folder.
    """
    if name is None:
        return None
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name.startswith((_PASSING, ".")):
        raise BadRequest(
            f"{name!r:.120} cannot name a checkpoint: use up to 100 letters, digits, '.', '_', '-'"
        )
    return name


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
