"""The generate function that runs an agent program for each sample.

It is chosen with ``--custom-generate-function-path slime.plugins.agents.rollout.generate``.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from typing import TYPE_CHECKING

from slime.config.flag import section
from slime.data.sample import Sample
from slime.observability.trace_utils import trace_span
from slime.rollout.rm_hub.dispatch import async_rm, scores_whole_groups
from slime.rollout.rm_hub.outcome import FAILURE_KEY, mark_unscored, raised_at
from slime.rollout.state import GenerateState
from slime.types import SamplingParams

from .config import AgentConfig
from .program import Reward, Task, run_program
from .server import agent_server
from .session import Session
from .trajectory import without_response

if TYPE_CHECKING:
    from slime.config.args import Args

logger = logging.getLogger(__name__)
STATISTICS = "session"  # key of sample.metadata
_POLL_SECONDS = 0.5  # interval at which the abort flag is checked while the program runs
_GRACE_SECONDS = 5.0  # time for a cancelled program to end


async def generate(
    args: Args, sample: Sample, sampling_params: SamplingParams, evaluation: bool = False
) -> Sample | list[Sample]:
    """Run the agent program on one row, and convert its conversations with the model to samples.

    Every leaf of the session's tree becomes a sample; the samples of one session share its reward.
    If the program raises, fails, or takes longer than ``--agent-timeout``, its samples have no
    reward. They get the status FAILED (TRUNCATED if the context was full), are left out of
    statistics and training, and are counted in ``rollout/reward_timeout_count`` and
    ``rollout/reward_error_count``. If the rollout is aborted, the sample gets the status ABORTED
    and is generated again from its prompt.

    Raises:
        Exception: An engine failed. Errors of the program, of a request, or in the model's text are
            not raised.
    """
    # A retry begins anew, but keeps the id by which engines find the cached prefix.
    session_id = sample.session_id
    sample.reset_response()
    sample.session_id = session_id
    sample.metadata.pop(FAILURE_KEY, None)
    # The program reaches the model at an address of its own, which identifies its session.
    settings = section(AgentConfig, args)
    server = await agent_server(settings.agent_host)
    session = server.open(GenerateState(args), sample, sampling_params, evaluation)
    url = server.url(session)
    task = Task(
        prompt=copy.deepcopy(sample.prompt),
        label=sample.label,
        metadata=copy.deepcopy(sample.metadata),
        openai_base_url=f"{url}/v1",
        anthropic_base_url=url,
        api_key=session.id,
        evaluation=evaluation,
    )
    # Run the program. The session is closed in any case, so that late requests are refused.
    began = time.monotonic()
    try:
        with trace_span(sample, "agent") as span:
            reward, failure = await _outcome(settings, session, task)
            span.set(**session.counts)
    finally:
        server.close(session)
    seconds = time.monotonic() - began
    # An engine that failed concerns the whole rollout, and an abort leaves the sample for later.
    if session.fault is not None:
        raise session.fault
    if session.aborted:
        sample.status = Sample.Status.ABORTED
        return sample
    # Each leaf of the tree is a sample with the reward of the session.
    samples = _samples(session)
    for leaf in samples:
        leaf.metadata[STATISTICS] = {**session.counts, "leaves": len(samples), "seconds": seconds}
        leaf.reward = copy.copy(reward)
    await _score(session, samples, reward, failure)
    return samples[0] if len(samples) == 1 else samples


async def _score(
    session: Session,
    samples: list[Sample],
    reward: Reward,
    failure: tuple[str, str] | None,
) -> None:
    """Score samples that have no reward of their program. Those of a program that failed are counted
    and left out.
    """
    if not session.tree.turns and failure is None:
        failure = "error", "the agent program ended without any answer from the model"
    if failure is not None:
        status = Sample.Status.TRUNCATED if session.counts["overflows"] else Sample.Status.FAILED
        for leaf in samples:
            mark_unscored(leaf, *failure)
            leaf.status = status
    elif reward is None:
        await _score_once(session, samples)


async def _outcome(
    settings: AgentConfig, session: Session, task: Task
) -> tuple[Reward, tuple[str, str] | None]:
    """Run the program; return its reward and None, or None and a failure (its kind and a message).

    Both are None if the rollout was aborted or an engine failed."""
    # The program runs beside this loop, which watches everything else that may end it.
    program = asyncio.ensure_future(run_program(settings, task))
    deadline = time.monotonic() + settings.agent_timeout
    try:
        while (
            not program.done()
            and not session.aborted
            and session.fault is None
            and session.error is None
        ):
            left = deadline - time.monotonic()
            if left <= 0:
                late = f"the agent program did not end within {settings.agent_timeout:g} s (--agent-timeout)"
                return None, ("timeout", late)
            await asyncio.wait({program}, timeout=min(_POLL_SECONDS, left))
        # The session has ended for a reason of its own: a request failed, an abort, or an engine.
        if session.error is not None:
            return None, (
                "error",
                f"a request failed: {type(session.error).__name__}: {session.error}"[:2000],
            )
        if not program.done():
            return None, None
        # The program has ended by itself.
        error = program.exception()
        if error is None:
            return program.result(), None
        if not session.aborted and session.fault is None:
            logger.warning(
                "agent program of sample %s: %s: %s",
                session.sample.index,
                type(error).__name__,
                error,
            )
        return None, ("error", f"the agent program raised {raised_at(error)}")
    finally:
        # However it ended, no request of it may reach the engines from now on.
        session.close()
        if not program.done():
            program.cancel()
            await asyncio.wait({program}, timeout=_GRACE_SECONDS)


def _samples(session: Session) -> list[Sample]:
    samples = session.tree.samples(session.state, session.sample)
    if samples:
        return samples
    without_response(session.state, session.sample)
    return [session.sample]


async def _score_once(session: Session, samples: list[Sample]) -> None:
    """Score a session with several leaves once, by its newest leaf, and copy the reward to the
    others.

    Without this, ``--rm-type`` would score each leaf separately. A reward function of the user gets
    all leaves itself.
    """
    args = session.state.args
    last = samples[-1]
    own = last.custom_rm_path or args.custom_rm_path
    if len(samples) == 1 or own or scores_whole_groups(args):
        return
    last.reward = await async_rm(args, last)
    for sample in samples[:-1]:
        if last.reward_timed_out:
            mark_unscored(sample, *str(last.metadata[FAILURE_KEY]).split(": ", 1))
        else:
            sample.reward = copy.copy(last.reward)
