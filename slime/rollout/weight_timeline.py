"""The schedule of an asynchronous run: recorded as it happens, and repeated with
``--replay-schedule``.

Only one thing in such a run depends on time: which weights generated which token. Everything else
follows from seeds, since groups are trained in the order of admission. The schedule is
``outputs/<run>/schedule.jsonl``, with one JSON object per line. The first line contains the
settings that a replay must share. The others are of three kinds:

* ``started``: a group started; ``step`` is the step whose weights the engines held.
* ``request``: an engine's reply to one request: from which of its tokens on the weights of which
  step were used, whether the KV cache of older weights was kept, and the finish reason.
* ``judged``: a group was accepted (with its rollout), filtered or replaced.

A replay sends each request when the engines hold the weights of its first token. Wherever other
weights took over, the embedded engine holds the request between two tokens until it has those
weights, and a weight update waits until all tokens that were recorded with the previous weights are
generated. If a request occurs twice (a resumed run generates samples again), the later line
replaces the earlier one and all later requests of the sample.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from slime.data.sample import Group, Sample, group_number
from slime.data.staleness import step_of
from slime.rollout.schedule_file import ScheduleError, ScheduleFile, ScheduleLine, read_lines
from slime.types import GenerateBody, GenerateOutput, MetaInfo

SETTINGS = (
    "rollout_function_path", "rollout_batch_size", "n_samples_per_prompt", "num_rollout", "rollout_seed", "seed",
    "async_buffer_size", "update_weights_interval", "max_weight_staleness", "update_weight_pause_mode",
    "rollout_max_response_len", "rollout_temperature", "deterministic",
)  # fmt: skip

Send: TypeAlias = Callable[[GenerateBody], Awaitable[GenerateOutput | None]]
TIMELINE: ContextVar[RequestLog | None] = ContextVar("weight_timeline", default=None)
"""The schedule of the current task. It is set only in tasks that generate training samples of an
asynchronous run; requests of evaluations are not recorded."""


class RequestLog:
    """What requests of training samples go through, such that each leaves a line of the schedule.

    Args:
        keeps_kv: Whether requests keep their KV cache through a weight update.
        write: Called with each line.
    """

    def __init__(self, keeps_kv: bool, write: Callable[[ScheduleLine], object]) -> None:
        self.keeps_kv = keeps_kv
        self.write = write

    async def ask(self, sample: Sample, body: GenerateBody, send: Send) -> GenerateOutput | None:
        """Return the reply of ``send(body)``, or None."""
        turn = len(sample.weight_versions)
        output = await send(body)
        if output is not None and (
            line := request_line(sample, turn, output["meta_info"], self.keeps_kv)
        ):
            self.write(line)
        return output


@dataclass(frozen=True)
class Recorded:
    """One recorded reply of an engine.

    Attributes:
        spans: (first token, step) pairs in the order of tokens: the weights of ``step`` were used
            from that token on.
        tokens: Number of tokens.
        end: Finish reason.
    """

    spans: tuple[tuple[int, int], ...]
    tokens: int
    end: str

    @property
    def first(self) -> int:
        return self.spans[0][1]

    @property
    def last(self) -> int:
        return self.spans[-1][1]


class Recording:
    """The contents of a schedule file.

    Args:
        path: The file.
        settings: The settings of this run, see :func:`settings_to_compare`.

    Raises:
        ScheduleError: The file is not a schedule, or the recorded run had other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, object]) -> None:
        self.path = path
        # The settings that decide what is generated must be the recorded ones.
        lines = read_lines(path)
        first = next(lines, {})
        if "settings" not in first:
            raise ScheduleError(
                f"--replay-schedule {path} is not a schedule: its first line has no settings"
            )
        then = first["settings"]
        wrong = [
            f"{name}: {then[name]} -> {value}"
            for name, value in settings.items()
            if then.get(name) != value
        ]
        if wrong:
            raise ScheduleError(
                f"--replay-schedule {path} was recorded with other settings: {'; '.join(wrong)}"
            )
        # One pass over the file; later lines of a resumed run replace earlier ones.
        self.requests: dict[tuple[int, int], Recorded] = {}
        group_of: dict[int, list[tuple[int, int]]] = {}
        started: dict[int, int] = {}  # by group: the step of the weights with which it started last
        # by rollout: the step of the weights with which its first group began
        self.rollout_step: dict[int, int] = {}
        self.accepted: Counter[int] = Counter()  # by rollout: the number of accepted groups
        for line in lines:
            if "request" in line:
                self._add(line)
                group_of.setdefault(line["group"], []).append((line["request"], line["turn"]))
            elif "started" in line:
                started[line["started"]] = line["step"]
            elif line.get("judged") == "accepted":
                group = line["group"]
                rollout = line["rollout"]
                steps = [
                    self.requests[key].first
                    for key in group_of.get(group, [])
                    if key in self.requests
                ]
                # A generate function that calls the engines itself records no requests.
                steps = steps or [started.get(group, -1)]
                self.rollout_step[rollout] = min([*steps, self.rollout_step.get(rollout, steps[0])])
                self.accepted[rollout] += 1
        self.over = Counter(request.last for request in self.requests.values())

    def check_covers(self, first: int, last: int, groups: int) -> str | None:
        """Check that the rollouts ``first .. last - 1``, each with ``groups`` groups, are recorded.

        Returns:
            None, or a warning if the recording ends earlier, for example because the run was
            killed.

        Raises:
            ScheduleError: The recording begins after rollout ``first``, so nothing would be
                repeated.
        """
        # the rollout function does not report its groups, so nothing can be checked
        if not self.accepted:
            return None
        begin = min(self.accepted)
        if begin > first:
            raise ScheduleError(
                f"--replay-schedule {self.path} begins with rollout {begin}, but this run begins "
                f"with rollout {first}: it records a run that was resumed in another folder, and "
                "only whole runs can be repeated"
            )
        end = next(rollout for rollout in itertools.count(first) if self.accepted[rollout] < groups)
        if end >= last:
            return None
        return (
            f"--replay-schedule {self.path} ends in rollout {end}, but this run continues to "
            f"rollout {last - 1}: the rest is not a repetition"
        )

    def _add(self, line: ScheduleLine) -> None:
        index = line["request"]
        turn = line["turn"]
        # A repeated line means that a resumed run generated the sample again from this turn on, so
        # the later turns that were recorded before belong to a response that no longer exists.
        later = turn + 1
        while self.requests.pop((index, later), None) is not None:
            later += 1
        spans = tuple((int(start), int(step)) for start, step in line["spans"])
        self.requests[index, turn] = Recorded(spans, line["tokens"], line["end"])

    def due(self, step: int) -> int:
        """Number of requests that finish before the engines get newer weights than those of
        ``step``.
        """
        return sum(count for last, count in self.over.items() if last <= step)

    def divided(self, step: int) -> int:
        """Number of requests that are in progress when the engines get newer weights than those of
        ``step``.
        """
        return sum(request.first <= step < request.last for request in self.requests.values())


class WeightTimeline(RequestLog):
    """Records the schedule of this run and, given a recording, repeats the recorded one.

    All methods must be called on the event loop.

    Args:
        path: The file to write.
        settings: The settings of this run, see :func:`settings_to_compare`.
        recording: The schedule to repeat, or None.
        attempt: The first part of this run's weight versions, ``attempt.step``.
        position: Length in bytes of the file when the snapshot was made from which the run is
            resumed. The rest of the file is removed. None: Start a new file.
    """

    def __init__(
        self,
        path: Path,
        settings: dict[str, Any],
        recording: Recording | None,
        attempt: int,
        position: int | None,
    ) -> None:
        self.recording = recording
        self.attempt = attempt
        # the number of steps that have trained the engines' weights; -1 before the first sync
        self.step = -1
        # by the step of their last weights: recorded requests that have a reply
        self.over: Counter[int] = Counter()
        self._newer = asyncio.Condition()
        self.file = ScheduleFile(path, position)
        super().__init__(settings["update_weight_pause_mode"] == "in_place", self.file.append)
        if self.file.is_new:
            self.file.append({"settings": settings})

    def __call__(self, event: str, group: Group, facts: Mapping[str, object]) -> None:
        """Record an event of a group; an :data:`~slime.rollout.state.Observer` of the rollout
        loops.
        """
        number = group_number(group)
        if event == "started":
            self.file.append({"started": number, "step": self.step})
        elif event in ("accepted", "filtered", "replaced"):
            rollout = {"rollout": facts["rollout_id"]} if "rollout_id" in facts else {}
            self.file.append({"judged": event, "group": number, **rollout})

    async def reached(self, step: int) -> None:
        """Record that the engines hold the weights that ``step`` steps have trained, and wake the
        waiting requests.
        """
        async with self._newer:
            self.step = step
            self._newer.notify_all()

    async def may_begin(self, rollout_id: int) -> None:
        """In a replay, wait until the engines hold the weights with which the recorded rollout
        began.
        """
        if self.recording is not None:
            step = self.recording.rollout_step.get(rollout_id, -1)
            async with self._newer:
                await self._newer.wait_for(lambda: self.step >= step)

    async def ask(self, sample: Sample, body: GenerateBody, send: Send) -> GenerateOutput | None:
        """Call ``send(body)`` and record the reply. In a replay, send it when and as the recording
        says.
        """
        recorded = None
        if self.recording is not None and sample.index is not None:
            turn = len(sample.weight_versions)
            recorded = self.recording.requests.get((sample.index, turn))
        if recorded is None:
            return await super().ask(sample, body, send)
        output = await super().ask(sample, body, partial(self._repeat, recorded, send))
        self.over[recorded.last] += 1
        return output

    async def _repeat(
        self, recorded: Recorded, send: Send, body: GenerateBody
    ) -> GenerateOutput | None:
        async with self._newer:
            await self._newer.wait_for(lambda: self.step >= recorded.first)
        if not recorded.tokens and recorded.end == "abort":
            # Aborted before its first token. No request can be limited to 0 tokens, so the reply is
            # made here.
            version = f"{self.attempt}.{recorded.first}"
            ended: MetaInfo = {"weight_version": version, "finish_reason": {"type": "abort"}}
            ended["output_token_logprobs"] = []
            return {"text": "", "meta_info": ended}
        params = body["sampling_params"]
        if recorded.end == "abort":
            # An abort cannot be timed to the token. Limit the length instead, and restore the
            # finish reason below.
            params = {**params, "max_new_tokens": recorded.tokens}
        plan: list[list[int | str]] = [
            [start, f"{self.attempt}.{step}"] for start, step in recorded.spans
        ]
        output = await send({**body, "sampling_params": params, "weight_version_plan": plan})
        if output is not None and recorded.end == "abort":
            output["meta_info"]["finish_reason"] = {"type": "abort"}
        return output

    def missing(self, held: int) -> str | None:
        """In a replay, describe what a weight update must still wait for.

        Args:
            held: Number of requests that the engines hold between two tokens until they get newer
                weights.

        Returns:
            None if the update may take place.
        """
        if self.recording is None:
            return None
        over = sum(n for last, n in self.over.items() if last <= self.step)
        due = self.recording.due(self.step)
        divided = self.recording.divided(self.step)
        if over == due and held == divided:
            return None
        return (
            f"{over} of {due} recorded requests are finished, and {held} of {divided} wait for "
            "newer weights"
        )


def request_line(sample: Sample, turn: int, meta: MetaInfo, keeps_kv: bool) -> ScheduleLine | None:
    """Return the line of one request, or None if the reply or the sample cannot be recorded.

    Args:
        turn: The number of earlier requests of the sample.
        keeps_kv: Whether requests keep their KV cache through a weight update.
    """
    tokens = len(meta.get("output_token_logprobs") or [])
    given = [(part["start"], part["version"]) for part in meta.get("weight_versions") or ()]
    given = given or [(0, meta.get("weight_version") or "")]
    spans = [
        [start, step] for start, version in given if (step := step_of(str(version))) is not None
    ]
    if not spans or sample.index is None:
        return None
    finish = meta.get("finish_reason")
    line = {
        "request": sample.index,
        "group": sample.group_index,
        "turn": turn,
        "spans": spans,
        "tokens": tokens,
    }
    kept = {"kv_kept": keeps_kv} if len(spans) > 1 else {}
    return {**line, **kept, "end": finish["type"] if isinstance(finish, Mapping) else finish}


def settings_to_compare(settings: object) -> dict[str, Any]:
    """The settings that a run and its replay must share."""
    return {name: getattr(settings, name) for name in SETTINGS}
