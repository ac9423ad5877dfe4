"""The waits of a run: for results from actors, and for conditions that are polled.

Every wait has a name, a deadline and a report; one for actors also has a live status, and ends if
one rank fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from slime.cluster.actors import ActorHandle, Ref, door
from slime.cluster.stop_signals import StopSignals
from slime.observability.progress import DEBUGGER, Progress
from slime.observability.run_state import StateFile

if TYPE_CHECKING:
    from slime.cluster.rollout_manager import RolloutManager

P = ParamSpec("P")
T = TypeVar("T")
POLL_SECONDS = 0.25
# actors that are asked for their status in one round; bounds the work of a round with many ranks
POLLED_ACTORS = 16


class WaitExpired(TimeoutError):
    """A wait exceeded its deadline; the message says who waited for what, how long, and which
    processes are alive.
    """


def wait_for(
    what: str,
    done: Callable[[], T],
    deadline: float,
    *,
    poll: float = 0.1,
    report: Callable[[], str] | None = None,
) -> T:
    """Call ``done`` until it returns a true value, and return that value.

    Args:
        what: Names the wait in the error, e.g. ``"engine 0 (pid 123) to become healthy"``.
        done: Called every ``poll`` seconds; an exception that it raises ends the wait and
            propagates.
        deadline: Seconds from now.
        report: Returns a text to add to the error, such as living processes or last log lines.

    Raises:
        WaitExpired: ``done`` returned no true value within ``deadline`` seconds.
    """
    start = time.monotonic()
    while not (result := done()):
        waited = time.monotonic() - start
        if waited >= deadline:
            detail = f"\n{report()}" if report else ""
            raise WaitExpired(
                f"waited {waited:.0f} s (deadline {deadline:.0f} s) for {what}{detail}"
            )
        time.sleep(min(poll, max(deadline - waited, 0.0)))
    return result


class NoStatus(WaitExpired):
    """A process that is waited for has not answered ``status()`` for too long: it is frozen or
    unreachable.
    """


@dataclass
class Waiter:
    """Waits for results in the driver's main thread.

    Attributes:
        stop: Checked during the wait, unless the wait must not be interrupted.
        on_status: Called with what the processes report, about twice a second.
        silence: Seconds without an answer to ``status()`` after which an actor that has answered
            before counts as lost. None: It is waited for until the deadline.
        state: Where the wait is recorded while it goes on, for ``slime ui``.
    """

    stop: StopSignals
    on_status: Callable[[Progress], None] | None = None
    silence: float | None = None
    state: StateFile | None = None
    # By name of the actor. They outlive a wait: an actor that fell silent in one wait is known in
    # the next.
    _polls: dict[str, _Poll] = field(default_factory=dict)

    def get(
        self,
        refs: Sequence[Ref[T]],
        what: str,
        deadline: float,
        *,
        actors: Mapping[str, ActorHandle] | None = None,
        meanwhile: Callable[[], None] | None = None,
        flag: str = "--phase-timeout",
    ) -> list[T]:
        """Wait for ``refs`` and return their results in order.

        The number of calls to Ray in each round does not grow with the number of refs or actors.

        Args:
            what: Names the wait, e.g. ``"rollout 3 to be generated"``.
            deadline: Seconds from now.
            actors: Actors with a ``status()`` method, by name. They are asked during the wait, and
                their answers are part of the report.
            meanwhile: Called about four times a second; an exception that it raises ends the wait.
            flag: The flag of the deadline, for the message.

        Raises:
            WaitExpired: The deadline has passed; the message tells what each actor is doing.
            NoStatus: An actor has not answered for ``silence`` seconds.
            StopRequested: The user asked to stop, and the stop is not deferred.
            ActorError: One of the refs has no result; others may still be running.
            Exception: What one of the calls has raised.
        """
        state = self.state
        start = DEBUGGER.clock()
        began = time.time()
        status = _StatusPoll(actors or {}, self._polls)
        pending = list(refs)
        while pending:
            ready, pending = door().wait(pending, POLL_SECONDS)
            # Ranks that wait in a collective for one that failed would never return, so its failure
            # ends the wait.
            if ready:
                door().get(ready)
            self.stop.check()
            if not pending:
                break
            if status.poll() and self.on_status:
                self.on_status(next(iter(status.latest.values())))
            if state is not None:
                state.wait(what, began, deadline, status.latest)
            if meanwhile is not None:
                meanwhile()
            waited = DEBUGGER.clock() - start
            if waited > deadline:
                raise WaitExpired(
                    f"waited {waited:.0f} s (deadline {deadline:.0f} s, {flag}) for {what}\n"
                    f"{status.report()}"
                )
            if self.silence is not None:
                status.check_answers(self.silence, what)
        if state is not None:  # after an error, the state keeps what was waited for
            state.wait_over()
        return door().get(refs)


@dataclass
class _Poll:
    """Whether one actor answers."""

    actor: ActorHandle
    asked: Ref[Progress] | None = None  # the answer that has not come yet
    asked_at: float = 0.0  # time.monotonic()
    # whether it ever did: an actor that is still starting is silent, but not lost
    answered: bool = False


class _StatusPoll:
    """Asks actors what they are doing, :data:`POLLED_ACTORS` at a time, and never blocks on an
    answer.

    Args:
        known: Polls by name, kept from earlier waits.
    """

    def __init__(self, actors: Mapping[str, ActorHandle], known: dict[str, _Poll]) -> None:
        # A restarted actor has the name of its predecessor, but not its unanswered question.
        for name, actor in actors.items():
            if name not in known or known[name].actor is not actor:
                known[name] = _Poll(actor)
        self.polls = {name: known[name] for name in actors}
        self.latest: dict[str, Progress] = {}
        self._turn = list(self.polls)

    def poll(self) -> bool:
        """Collect answers, and ask those actors again; returns whether an answer came."""
        names = self._turn[:POLLED_ACTORS]
        self._turn = [*self._turn[POLLED_ACTORS:], *names]
        asked = {poll.asked: name for name in names if (poll := self.polls[name]).asked is not None}
        done = door().wait(list(asked), 0)[0] if asked else []
        for ref in done:
            name = asked[ref]
            poll = self.polls[name]
            poll.asked = None
            try:
                self.latest[name] = door().get([ref])[0]
                poll.answered = True
            except Exception as error:
                self.latest[name] = {"phase": f"does not answer: {type(error).__name__}"}
        # At most one question per actor is open, so calls do not pile up at an actor that is
        # frozen.
        for name in names:
            poll = self.polls[name]
            if poll.asked is None:
                poll.asked = poll.actor.status.remote()
                poll.asked_at = time.monotonic()
        return bool(done)

    def check_answers(self, seconds: float, what: str) -> None:
        """Raise :class:`NoStatus` if actors have not answered a question for ``seconds``; ``what``
        names the wait.
        """
        before = time.monotonic() - seconds
        late = {
            poll.asked: name
            for name, poll in self.polls.items()
            if poll.answered and poll.asked is not None and poll.asked_at < before
        }
        # With many actors, the last poll of one may be a while ago: its answer may have come since.
        came = door().wait(list(late), 0)[0] if late else []
        silent = [name for ref, name in late.items() if ref not in came]
        if silent:
            raise NoStatus(
                f"{', '.join(silent)} did not answer for {seconds:.0f} s (--status-timeout); "
                f"waited for {what}\n{self.report()}"
            )

    def report(self) -> str:
        lines = []
        for name in self.polls:
            status = self.latest.get(name)
            if not status:
                lines.append(f"  {name}: has not answered")
                continue
            age = time.time() - status.get("since", time.time())
            progress = f"{status.get('done', '')}/{status.get('total', '')}"
            lines.append(f"  {name}: {status.get('phase')} {progress} for {age:.0f} s")
        return "what the processes say:\n" + "\n".join(lines) if lines else ""


@dataclass
class ManagerClient:
    """Calls :class:`~slime.cluster.rollout_manager.RolloutManager`; every wait has a deadline.

    Attributes:
        handle: The handle of the manager's actor.
        timeout: Default deadline of a wait, in seconds (``--phase-timeout``).
    """

    handle: ActorHandle
    waiter: Waiter
    timeout: float

    def start(
        self,
        method: Callable[Concatenate[RolloutManager, P], T],
        *arguments: P.args,
        **keywords: P.kwargs,
    ) -> Ref[T]:
        """Start a call, e.g. ``manager.start(RolloutManager.generate, 3)``, and return a reference
        to its result.
        """
        return getattr(self.handle, method.__name__).remote(*arguments, **keywords)

    def call(
        self,
        what: str,
        method: Callable[Concatenate[RolloutManager, P], T],
        *arguments: P.args,
        **keywords: P.kwargs,
    ) -> T:
        """Start a call and wait for its result; ``what`` names the wait in an error."""
        return self.wait(self.start(method, *arguments, **keywords), what)

    def wait(
        self,
        ref: Ref[T],
        what: str,
        deadline: float | None = None,
        meanwhile: Callable[[], None] | None = None,
        flag: str = "--phase-timeout",
    ) -> T:
        """Wait for the result of a call that :meth:`start` began.

        See :meth:`Waiter.get <slime.cluster.ray_wait.Waiter.get>` for the arguments and errors.
        """
        return self.waiter.get(
            [ref],
            what,
            deadline or self.timeout,
            actors={"rollout manager": self.handle},
            meanwhile=meanwhile,
            flag=flag,
        )[0]
