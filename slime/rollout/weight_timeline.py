"""The schedule of an asynchronous run: logged as it happens, and repeated by ``--replay-schedule``.

What depends on time in such a run is which weights made which token; all else follows from seeds, since groups train
in the order of their admission. ``outputs/<run>/schedule.jsonl`` says, one JSON object per line, after a first line
with the settings that must agree: ``started`` (a group, and the step whose weights the engines held), ``request`` (one
answer of an engine: at which of its tokens the weights of which step take over, whether the cache of older weights
was kept, and how it ended) and ``judged`` (a group, as what, and in which rollout).

A replay sends each request once the engines hold its first weights, and the embedded engine keeps it at each token
where other weights took over until it has these; an update waits until all recorded tokens of the weights before are
there. A line that comes again (a resumed run makes samples again) replaces the earlier one and the sample's later
requests.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from slime.data.sample import Group, Sample, flatten
from slime.data.staleness import step_of
from slime.rollout.schedule_file import ScheduleError, ScheduleFile, ScheduleLine, read_lines
from slime.types import GenerateBody, GenerateOutput, MetaInfo

if TYPE_CHECKING:
    from slime.config.args import Args

SETTINGS = (
    "rollout_function_path", "rollout_batch_size", "n_samples_per_prompt", "num_rollout", "rollout_seed", "seed",
    "async_buffer_size", "update_weights_interval", "max_weight_staleness", "update_weight_pause_mode",
    "rollout_max_response_len", "rollout_temperature", "deterministic",
)  # fmt: skip

Send: TypeAlias = Callable[[GenerateBody], Awaitable[GenerateOutput | None]]
TIMELINE: ContextVar[WeightTimeline | None] = ContextVar("weight_timeline", default=None)
"""Set in the tasks that generate training samples of an asynchronous run; evaluations are not scheduled."""


@dataclass(frozen=True)
class Recorded:
    """One answer of an engine: ``spans`` are (first token, step) of the weights in order; it had ``tokens``."""

    spans: tuple[tuple[int, int], ...]
    tokens: int
    end: str  # finish reason

    @property
    def first(self) -> int:
        return self.spans[0][1]

    @property
    def last(self) -> int:
        return self.spans[-1][1]


class Recording:
    """A schedule file, read.

    Raises:
        ScheduleError: it is not one, or ``settings`` differ from those of the run that wrote it.
    """

    def __init__(self, path: Path, settings: Mapping[str, object]) -> None:
        self.path = path
        lines = read_lines(path)
        first = next(lines, {})
        if "settings" not in first:
            raise ScheduleError(f"--replay-schedule {path}: its first line has no settings; it is not a schedule")
        then = first["settings"]
        wrong = [f"{name}: {then[name]} -> {value}" for name, value in settings.items() if then.get(name) != value]
        if wrong:
            raise ScheduleError(f"--replay-schedule {path} is of a run with other settings: {'; '.join(wrong)}")
        self.requests: dict[tuple[int, int], Recorded] = {}
        group_of: dict[int, list[int]] = {}
        self.rollout_step: dict[int, int] = {}  # steps that had trained the weights with which a rollout began
        self.accepted: Counter[int] = Counter()  # groups by rollout
        for line in lines:
            if "request" in line:
                self._add(line)
                group_of.setdefault(line["group"], []).append(line["request"])
            elif line.get("judged") == "accepted":
                firsts = [self.requests[index, 0].first for index in group_of.get(line["group"], [])]
                self.rollout_step[line["rollout"]] = min([*firsts, self.rollout_step.get(line["rollout"], 2**62)])
                self.accepted[line["rollout"]] += 1
        self.over = Counter(request.last for request in self.requests.values())

    def check_covers(self, first: int, last: int, groups: int) -> str | None:
        """Whether the rollouts ``first .. last - 1`` of ``groups`` groups each are recorded.

        Returns:
            None, or a warning where the recording ends before them, as that of a run that was killed does.

        Raises:
            ScheduleError: it begins after ``first``, so nothing would be repeated.
        """
        if not self.accepted:  # a rollout function that tells of no groups
            return None
        begin = min(self.accepted)
        if begin > first:
            raise ScheduleError(
                f"--replay-schedule {self.path} begins with rollout {begin}, and this run with rollout {first}: go on "
                "from the snapshot from which the recorded run went on (--load)"
            )
        end = next(rollout for rollout in itertools.count(first) if self.accepted[rollout] < groups)
        if end >= last:
            return None
        return (
            f"--replay-schedule {self.path} ends in rollout {end}, and this run goes on to rollout {last - 1}: from "
            "there on it is not repeated"
        )

    def _add(self, line: ScheduleLine) -> None:
        index, turn = line["request"], line["turn"]
        later = turn + 1
        while self.requests.pop((index, later), None) is not None:
            later += 1
        spans = tuple((int(start), int(step)) for start, step in line["spans"])
        self.requests[index, turn] = Recorded(spans, line["tokens"], line["end"])

    def due(self, step: int) -> int:
        """Requests that are over before the engines get newer weights than those of ``step``."""
        return sum(count for last, count in self.over.items() if last <= step)

    def divided(self, step: int) -> int:
        """Requests that stand between two tokens when the engines get newer weights than those of ``step``."""
        return sum(request.first <= step < request.last for request in self.requests.values())


class WeightTimeline:
    """Logs the schedule of this run and, given a recording, repeats that. Used on the event loop.

    Args:
        position: bytes of the file that a snapshot speaks of; what came after is cut off. None: a new file.
        attempt: first part of this run's weight versions.
    """

    def __init__(self, path: Path, args: Args, recording: Recording | None, attempt: int, position: int | None) -> None:
        self.recording, self.attempt = recording, attempt
        self.keeps_kv = args.update_weight_pause_mode == "in_place"
        self.step = -1  # steps that had trained the weights that the engines hold
        self.over: Counter[int] = Counter()  # recorded requests that were answered, by their last step
        self._newer = asyncio.Condition()
        self.file = ScheduleFile(path, position)
        if self.file.is_new:
            self.file.append({"settings": settings_to_compare(args)})

    def __call__(self, event: str, group: Group, facts: Mapping[str, object]) -> None:
        """The observer of the rollout loops, see :data:`slime.rollout.state.Observer`."""
        number = next((sample.group_index for sample in flatten(group) if sample.group_index is not None), None)
        if event == "started":
            self.file.append({"started": number, "step": self.step})
        elif event in ("accepted", "filtered", "replaced"):
            rollout = {"rollout": facts["rollout_id"]} if "rollout_id" in facts else {}
            self.file.append({"judged": event, "group": number, **rollout})

    async def reached(self, step: int) -> None:
        """The engines hold the weights that ``step`` steps have trained."""
        async with self._newer:
            self.step = step
            self._newer.notify_all()

    async def may_begin(self, rollout_id: int) -> None:
        """Return when the engines hold the weights with which the recorded rollout began."""
        if self.recording is not None:
            step = self.recording.rollout_step.get(rollout_id, -1)
            async with self._newer:
                await self._newer.wait_for(lambda: self.step >= step)

    async def ask(self, sample: Sample, body: GenerateBody, send: Send) -> GenerateOutput | None:
        """``send(body)``, when and as the recording says, and logged."""
        turn = len(sample.weight_versions)
        recorded = None
        if self.recording is not None and sample.index is not None:
            recorded = self.recording.requests.get((sample.index, turn))
        if recorded is None:
            output = await send(body)
        else:
            output = await self._repeat(recorded, body, send)
        if output is not None and sample.index is not None:
            self._log(sample, turn, output["meta_info"])
        if recorded is not None:
            self.over[recorded.last] += 1
        return output

    async def _repeat(self, recorded: Recorded, body: GenerateBody, send: Send) -> GenerateOutput | None:
        async with self._newer:
            await self._newer.wait_for(lambda: self.step >= recorded.first)
        if not recorded.tokens and recorded.end == "abort":
            version = f"{self.attempt}.{recorded.first}"
            ended: MetaInfo = {"weight_version": version, "finish_reason": {"type": "abort"}}
            ended["output_token_logprobs"] = []
            return {"text": "", "meta_info": ended}
        params = body["sampling_params"]
        if recorded.end == "abort":
            params = {**params, "max_new_tokens": recorded.tokens}
        plan: list[list[int | str]] = [[start, f"{self.attempt}.{step}"] for start, step in recorded.spans]
        output = await send({**body, "sampling_params": params, "weight_version_plan": plan})
        if output is not None and recorded.end == "abort":
            output["meta_info"]["finish_reason"] = {"type": "abort"}
        return output

    def _log(self, sample: Sample, turn: int, meta: MetaInfo) -> None:
        tokens = len(meta.get("output_token_logprobs") or [])
        given = [(part["start"], part["version"]) for part in meta.get("weight_versions") or ()]
        given = given or [(0, meta.get("weight_version") or "")]
        spans = [[start, step] for start, version in given if (step := step_of(str(version))) is not None]
        if not spans:
            return
        finish = meta.get("finish_reason")
        line = {"request": sample.index, "group": sample.group_index, "turn": turn, "spans": spans, "tokens": tokens}
        kept = {"kv_kept": self.keeps_kv} if len(spans) > 1 else {}
        self.file.append({**line, **kept, "end": finish["type"] if isinstance(finish, Mapping) else finish})

    def missing(self, held: int) -> str | None:
        """What an update must still wait for in a replay, where the engines keep ``held`` requests between two
        tokens; None when nothing."""
        if self.recording is None:
            return None
        over, due = sum(n for last, n in self.over.items() if last <= self.step), self.recording.due(self.step)
        divided = self.recording.divided(self.step)
        if over == due and held == divided:
            return None
        return f"{over} of {due} recorded requests are over, and {held} of {divided} wait for newer weights"


def settings_to_compare(args: Args) -> dict[str, Any]:
    """What a run and its replay must agree in."""
    return {name: getattr(args, name) for name in SETTINGS}
