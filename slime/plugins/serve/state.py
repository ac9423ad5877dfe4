"""Who has which models, samplers and commands; commands are done once, in the order of their
numbers."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from slime.cluster.actors import door
from slime.config.seeds import derive_seed
from slime.engines import http
from slime.observability.run_dir import RunDir
from slime.plugins.http.server import BadRequest, Refused
from slime.plugins.serve.engine import EngineWeights
from slime.plugins.serve.limits import Limits, Meter, check_disk
from slime.plugins.serve.log import Answer, Log, Record
from slime.plugins.serve.messages import sample_answer, sampling_body
from slime.plugins.serve.trainer import Trainer

if TYPE_CHECKING:
    from slime.api.session import Session

log = logging.getLogger(__name__)
SAMPLE_SECONDS = 3600.0
_DONE_AGAIN = ("create_model", "forward_backward", "optim_step")
"""What changes only memory. What the others have changed is on disk."""
KEPT_ANSWERS = 10_000
"""How many answers are kept in memory for clients that ask again."""


class Unknown(Refused):
    """There is nothing of this name, or it is another tenant's."""

    status = 404


@dataclass
class Model:
    """A model that is trained: an adapter, or with rank 0 all weights.

    Attributes:
        next: The number of the command that is done next. The first, 0, makes the model.
        waiting: Commands that have arrived, by number.
    """

    id: str
    tenant: str
    rank: int
    metadata: Mapping[str, Any] | None = None
    next: int = 0
    waiting: dict[int, Record] = field(default_factory=dict)
    working: asyncio.Task[None] | None = None


@dataclass
class Sampler:
    """Weights that are sampled: those of ``path``, of the base model, or of the model of another
    server, which is named ``teacher``.
    """

    id: str
    tenant: str
    path: str | None
    place: int
    teacher: str | None = None
    joined: int = 0


class State:
    """Everything that the server knows. Its methods run on the server's event loop.

    Args:
        root: The folder of the log and of all models.
        limits: Those of the tenants that have any.
        teachers: The addresses of the servers of other models, by the names of these.
    """

    def __init__(
        self,
        session: Session,
        root: Path,
        limits: Mapping[str, Limits],
        teachers: Mapping[str, str],
    ) -> None:
        self.session = session
        self.args = session.args
        self.limits = limits
        self.teachers = teachers
        self.meters = {
            name: Meter(one.tokens_per_minute)
            for name, one in limits.items()
            if one.tokens_per_minute is not None
        }
        self.trainer = Trainer(session, root / "models")
        self.log = Log(root / "log.jsonl")
        self.sessions: dict[str, Record] = {}
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, Sampler] = {}
        self.commands: dict[str, Record] = {}
        self.answers: dict[str, asyncio.Future[Answer]] = {}
        self.weights = EngineWeights(session, self.trainer, teachers)
        self._tasks: set[asyncio.Task[None]] = set()
        self._answered: deque[str] = deque()
        self._began = time.monotonic()
        self._heard: dict[str, float] = {}

    # --- commands ----------------------------------------------------------------------------

    def submit(self, record: Record, tokens: int = 0) -> str:
        """Accept a command, and return its id. A command that was accepted before has no further
        effect.

        Args:
            tokens: How many it takes of the tenant's.

        Raises:
            BadRequest: The same id stands for another kind of command.
            OverLimit: The tenant has used what it may.
        """
        known = self.commands.get(record["id"])
        if known is not None:
            if known["do"] != record["do"]:
                raise BadRequest(f"the command {record['id']} was another one: {known['do']}")
            return str(record["id"])
        tenant = record["tenant"]
        if tenant in self.meters:
            self.meters[tenant].take(tokens)
        disk = self.limits_of(tenant).disk_mb
        if disk is not None and record["do"].startswith("save_weights"):
            runs = self.runs_of(tenant)
            check_disk(disk, [self.trainer.model_folder(run["model"]) for run in runs])
        # Before anything is done: what was told to a client is never forgotten.
        self.log.append(record)
        self._accept(record)
        self._begin(record)
        return str(record["id"])

    def _accept(self, record: Record) -> None:
        """Note what a command says, also when it is read from the log."""
        self.commands[record["id"]] = record
        self.answers[record["id"]] = asyncio.get_running_loop().create_future()
        tenant = record["tenant"]
        if record["do"] == "create_session":
            self.sessions[record["id"]] = record
            self.heard(record["id"])
        elif record["do"] == "create_sampler":
            self.samplers[record["id"]] = Sampler(
                record["id"], tenant, record["path"], record["place"], record.get("teacher")
            )
        elif "model" in record:
            if record["number"] == 0:
                self.models[record["model"]] = Model(
                    record["model"], tenant, record["rank"], record.get("metadata")
                )
            model = self.models[record["model"]]
            model.waiting[record["number"]] = record
            if record.get("sampler"):
                path = f"tinker://{model.id}/sampler_weights/passing-{record['number']:06d}"
                sampler = Sampler(record["sampler"], tenant, path, record["place"])
                self.samplers[sampler.id] = sampler

    def _begin(self, record: Record) -> None:
        if "model" in record:
            self._work(self.models[record["model"]])
        elif record["do"] == "sample":
            task = asyncio.create_task(self._sample(record))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._answer(record, Answer({"id": record["id"]}))

    def _answer(self, record: Record, answer: Answer) -> None:
        if self.answers[record["id"]].done():
            return
        self.log.append(answer.line(record["id"]))
        self.answers[record["id"]].set_result(answer)
        # The log has what a restart needs.
        record.pop("body", None)
        record.pop("request", None)
        self._answered.append(record["id"])
        if len(self._answered) > KEPT_ANSWERS:
            del self.answers[self._answered.popleft()]

    def _work(self, model: Model) -> None:
        if model.working is None or model.working.done():
            model.working = asyncio.create_task(self._do_waiting(model))

    async def _do_waiting(self, model: Model) -> None:
        """Do the commands of a model in their order, as far as they are there."""
        while (record := model.waiting.pop(model.next, None)) is not None:
            answer = await self._done(record)
            model.next += 1
            if record["do"] == "unload_model" or (answer.error and record["number"] == 0):
                self.models.pop(model.id, None)
            self._show()
            self._answer(record, answer)

    async def _done(self, record: Record) -> Answer:
        """Do a command of a model; what goes wrong is its answer."""
        try:
            answer: Answer = await self._on_rank(self.trainer.do, record)
        except (ValueError, FloatingPointError) as error:
            return Answer(error=str(error))
        except Exception as error:
            log.exception("the command %s failed", record["id"])
            return Answer(error=f"{type(error).__name__}: {error}", blame="server")
        return answer

    async def _on_rank(self, call: Any, *arguments: object) -> Any:
        future = self.session.on_backend(call, *arguments)
        return await door().result(future.refs[0])

    async def answer(self, command: str, tenant: str, seconds: float) -> Answer | None:
        """Wait for the answer to a command; None if it takes longer.

        Raises:
            Unknown: There is no such command.
        """
        record = self.commands.get(command)
        if record is None or record["tenant"] != tenant or command not in self.answers:
            raise Unknown(f"there is no request {command}, or its answer is no longer kept")
        done, _ = await asyncio.wait([self.answers[command]], timeout=seconds)
        return self.answers[command].result() if done else None

    # --- what was before ---------------------------------------------------------------------

    async def recover(self) -> None:
        """Go on where earlier processes were: the answers are known, and what was accepted and not
        answered is done.
        """
        known: dict[str, Answer] = {}
        for record in self.log.before:
            if "answer" in record:
                known[record["answer"]] = Answer.of(record)
            else:
                self._accept(record)
        for command, answer in known.items():
            self.answers[command].set_result(answer)
        ended = {
            record["model"]
            for record in self.log.before
            if record.get("do") == "unload_model" and record["id"] in known
        }
        for name in ended | {
            record["model"]
            for record in self.log.before
            if record.get("number") == 0 and record["id"] in known and known[record["id"]].error
        }:
            self.models.pop(name, None)
        for model in self.models.values():
            await self._recover_model(model, known)
        self._show()
        for record in self.commands.values():
            if "model" not in record and record["id"] not in known:
                self._begin(record)

    async def _recover_model(self, model: Model, known: Mapping[str, Answer]) -> None:
        """Load the last state of a model. What came after it and has changed only memory is done
        again.
        """
        facts = await self._on_rank(self.trainer.recover, model.id)
        if facts is not None:
            model.next = facts["number"] + 1
            record = facts["answer"]
            if record["answer"] not in known:  # killed between the state and the answer
                self._answer(self.commands[record["answer"]], Answer.of(record))
        kept = {}
        for number, record in sorted(model.waiting.items()):
            if number >= model.next:
                kept[number] = record
        model.waiting = kept
        while (record := model.waiting.get(model.next)) is not None:
            if record["id"] not in known:
                break
            again = await self._done(record) if record["do"] in _DONE_AGAIN else None
            if again not in (None, known[record["id"]]):
                log.warning("%s has other numbers than before the restart", record["id"])
            del model.waiting[model.next]
            model.next += 1
        self._work(model)

    # --- sampling ----------------------------------------------------------------------------

    async def _sample(self, record: Record) -> None:
        try:
            answer = Answer(data=await self._sampled(record))
        except (BadRequest, http.HttpError) as error:
            answer = Answer(error=str(error))
        except Exception as error:
            log.exception("the samples %s failed", record["id"])
            answer = Answer(error=f"{type(error).__name__}: {error}", blame="server")
        self._answer(record, answer)

    async def _sampled(self, record: Record) -> bytes:
        sampler = self.samplers[record["sampler_id"]]
        seed = derive_seed(
            self.args.rollout_seed, "serve", sampler.place, record["request"].get("seq_id") or 0
        )
        async with self.weights.use(sampler.path, sampler.teacher) as (url, adapter):
            body = sampling_body(record["request"], adapter, seed)
            answer = await http.request("POST", f"{url}/generate", body, SAMPLE_SECONDS)
        answers = answer if isinstance(answer, list) else [answer]
        return sample_answer(answers, bool(record["request"].get("prompt_logprobs")))

    # --- who is there ------------------------------------------------------------------------

    def heard(self, session: str) -> None:
        """Note that a client of a session is there."""
        self._heard[session] = time.monotonic()

    def silent_seconds(self, model: Model) -> float:
        """Return how long no client of the model's session was heard of."""
        return time.monotonic() - self._heard.get(model.id.partition(":")[0], self._began)

    # --- whose it is -------------------------------------------------------------------------

    def _show(self) -> None:
        """Write what ``slime ui`` shows of the models."""
        samplers = Counter(name.partition(":")[0] for name in self.samplers)
        values = [
            {
                "tenant": one.tenant,
                "session": (session := one.id.partition(":")[0]),
                "model": one.id,
                "rank": one.rank,
                "commands": one.next,
                "waiting": len(one.waiting),
                "samplers": samplers[session],
            }
            for one in self.models.values()
        ]
        run = RunDir.parent_of_runs(self.args.output_dir) / self.args.run_name
        part = run / "served.part"
        part.write_bytes(orjson.dumps(values))
        part.replace(run / "served.json")

    def limits_of(self, tenant: str) -> Limits:
        return self.limits.get(tenant, Limits())

    def session_of(self, name: object, tenant: str) -> Record:
        found = self.sessions.get(str(name))
        if found is None or found["tenant"] != tenant:
            raise Unknown(f"there is no session {name}")
        return found

    def model_of(self, name: object, tenant: str) -> Model:
        """Return a model that is trained. Raises Unknown if it is another tenant's."""
        found = self.models.get(str(name))
        if found is None or found.tenant != tenant:
            raise Unknown(f"there is no model {name}, or it was unloaded")
        return found

    def sampler_of(self, name: object, tenant: str) -> Sampler:
        found = self.samplers.get(str(name))
        if found is None or found.tenant != tenant:
            raise Unknown(f"there is no sampling session {name}")
        return found

    def runs_of(self, tenant: str) -> list[Record]:
        """Return the commands that have made the tenant's models, the newest first."""
        made = [
            record
            for record in self.commands.values()
            if record.get("number") == 0 and record["tenant"] == tenant
        ]
        return made[::-1]

    def run_of(self, name: object, tenant: str) -> Record:
        for record in self.runs_of(tenant):
            if record["model"] == name:
                return record
        raise Unknown(f"there is no training run {name}")

    def weights_of(self, path: object, tenant: str) -> Path:
        """Return the folder of a path, if the tenant has it. Raises Unknown or BadRequest."""
        self.run_of(str(path).removeprefix("tinker://").partition("/")[0], tenant)
        return self.trainer.folder_of(str(path))

    def delete(self, folder: Path) -> None:
        shutil.rmtree(folder)

    async def close(self) -> None:
        """Stop; what is not done goes on with the next process."""
        working = [model.working for model in self.models.values() if model.working is not None]
        for task in (*self._tasks, *working):
            task.cancel()
        await asyncio.gather(*self._tasks, *working, return_exceptions=True)
        self.log.close()
