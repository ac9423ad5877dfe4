"""Wait for Ray work: with a name, a deadline, a live status, and an end as soon as one rank fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from slime.cluster.polling import WaitExpired
from slime.cluster.stop_signals import StopSignals
from slime.observability.progress import Progress

if TYPE_CHECKING:
    from ray import ObjectRef

    from slime.cluster.ray_actors import ActorHandle

T = TypeVar("T")

POLL_SECONDS = 0.25
POLLED_ACTORS = 16  # asked for their status at a time


class NoStatus(WaitExpired):
    """A process that was waited for has not said for too long what it is doing: it is frozen, or cut off."""


class Waiter:
    """``ray.get`` for the driver.

    Args:
        stop: looked at while waiting, unless a wait must not be cut short.
        on_status: shown what the waited-for processes report, about twice a second.
        silence: seconds after which an actor that answered ``status()`` before and does not any more counts as lost;
            None: it is waited for until the deadline.
    """

    def __init__(
        self, stop: StopSignals, on_status: Callable[[Progress], None] | None = None, silence: float | None = None
    ) -> None:
        self.stop, self.on_status, self.silence = stop, on_status, silence
        self._polls: dict[str, _Poll] = {}  # by the names of actors; they outlive a wait

    def get(
        self,
        refs: Sequence[ObjectRef[T]],
        what: str,
        deadline: float,
        *,
        actors: Mapping[str, ActorHandle] | None = None,
        interruptible: bool = True,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[T]:
        """Results of ``refs`` in order.

        The number of calls to Ray does not grow with the number of refs or actors, except for the call that returns
        the results.

        Args:
            what: names the wait, e.g. ``"rollout 3 to be generated"``.
            deadline: seconds from now.
            actors: name -> actor with a ``status()`` method; asked while waiting and for the report.
            meanwhile: called about four times a second; what it raises ends the wait.

        Raises:
            WaitExpired: with what each actor says it is doing.
            NoStatus: an actor has not answered for ``silence`` seconds.
            StopRequested: the user asked to stop and the wait is ``interruptible``.
            RayError: as soon as one of the refs failed, though others are still running.
        """
        import ray

        start = time.monotonic()
        status = _StatusPoll(actors or {}, self._polls)
        pending = list(refs)
        while pending:
            ready, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_SECONDS)
            if ready:
                ray.get(ready)  # a failure of one rank ends the wait for all
            if pending and status.poll() and self.on_status:
                self.on_status(next(iter(status.latest.values())))
            if interruptible:
                self.stop.check()
            if pending and meanwhile is not None:
                meanwhile()
            waited = time.monotonic() - start
            if pending and waited > deadline:
                raise WaitExpired(
                    f"waited {waited:.0f} s (deadline {deadline:.0f} s, --phase-timeout) for {what}\n{status.report()}"
                )
            silent = status.silent(self.silence) if pending and self.silence is not None else []
            if silent:
                raise NoStatus(
                    f"{', '.join(silent)} said nothing for {self.silence:.0f} s (--status-timeout); waited for {what}\n"
                    f"{status.report()}"
                )
        return list(ray.get(list(refs)))


@dataclass
class _Poll:
    """What is known of one actor."""

    actor: ActorHandle
    asked: ObjectRef[Progress] | None = None  # an answer that has not come yet
    asked_at: float = 0.0  # time.monotonic()
    said: Progress = field(default_factory=Progress)
    answered: bool = False  # ever: one that is still being started says nothing for a while


class _StatusPoll:
    """Ask actors what they are doing without ever waiting for the answer, :data:`POLLED_ACTORS` of them at a time.

    Args:
        known: polls by name, kept from earlier waits.
    """

    def __init__(self, actors: Mapping[str, ActorHandle], known: dict[str, _Poll]) -> None:
        for name, actor in actors.items():
            if name not in known or known[name].actor is not actor:
                known[name] = _Poll(actor)
        self.polls = {name: known[name] for name in actors}
        self.latest: dict[str, Progress] = {}
        self._turn = list(self.polls)

    def poll(self) -> bool:
        """Ask and collect; True when an answer came."""
        import ray

        names, self._turn = self._turn[:POLLED_ACTORS], self._turn[POLLED_ACTORS:] + self._turn[:POLLED_ACTORS]
        asked = {poll.asked: name for name in names if (poll := self.polls[name]).asked is not None}
        done = ray.wait(list(asked), num_returns=len(asked), timeout=0)[0] if asked else []
        for ref in done:
            poll = self.polls[asked[ref]]
            poll.asked = None
            try:
                poll.said, poll.answered = ray.get(ref), True
            except ray.exceptions.RayError as error:
                poll.said = {"phase": f"does not answer: {type(error).__name__}"}
            self.latest[asked[ref]] = poll.said
        for name in names:
            poll = self.polls[name]
            if poll.asked is None:
                poll.asked, poll.asked_at = poll.actor.status.remote(), time.monotonic()
        return bool(done)

    def silent(self, seconds: float) -> list[str]:
        """Names of the actors that have owed an answer for ``seconds``, as of the last :meth:`poll` of each."""
        before = time.monotonic() - seconds
        late = {n: poll for n, poll in self.polls.items() if poll.answered and poll.asked and poll.asked_at < before}
        if not late:
            return []
        import ray

        came = set(ray.wait([poll.asked for poll in late.values()], num_returns=len(late), timeout=0)[0])
        return [name for name, poll in late.items() if poll.asked not in came]

    def report(self) -> str:
        lines = []
        for name in self.polls:
            said = self.latest.get(name)
            if not said:
                lines.append(f"  {name}: has not answered")
                continue
            age = time.time() - said.get("since", time.time())
            progress = f"{said.get('done', '')}/{said.get('total', '')}"
            lines.append(f"  {name}: {said.get('phase')} {progress} for {age:.0f} s")
        return "what the processes say:\n" + "\n".join(lines) if lines else ""
