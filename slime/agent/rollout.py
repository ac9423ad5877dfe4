"""The generate function that runs an agent program for each sample.

It is chosen with ``--custom-generate-function-path slime.agent.rollout.generate``.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from typing import TYPE_CHECKING

from slime.agent.program import Reward, Task, run_program
from slime.agent.server import agent_server
from slime.agent.session import Session
from slime.agent.settings import AgentSettings
from slime.data.sample import Sample
from slime.observability.trace_utils import trace_span
from slime.rollout.prompts import prompt_ids
from slime.rollout.rm_hub import async_rm, scores_whole_groups
from slime.rollout.rm_hub.outcome import FAILURE_KEY, mark_unscored
from slime.types import SamplingParams

if TYPE_CHECKING:
    from slime.config.args import Args

logger = logging.getLogger(__name__)
STATISTICS = "session"  # key of sample.metadata
_POLL_SECONDS = 0.5  # between two checks of the abort flag while the program works
_GRACE_SECONDS = 5.0  # for a program that was told to end


async def generate(
    args: Args, sample: Sample, sampling_params: SamplingParams, evaluation: bool = False
) -> Sample | list[Sample]:
    """Run the agent program on one row and make samples of its conversations with the model.

    Every leaf of the session's tree is a sample; those of one session share its reward. A program that raises,
    fails or takes longer than ``--agent-timeout`` leaves its samples without a reward: they are FAILED (TRUNCATED
    where the context was full), in no statistics and not trained on, and counted in ``rollout/reward_timeout_count``
    and ``rollout/reward_error_count``. When the rollout is aborted, the sample is ABORTED and is generated again from
    its prompt.

    Raises:
        Exception: an engine failed. No error of the program, of a request or of the model's text is raised.
    """
    session_id = sample.session_id
    sample.reset_response()
    sample.session_id = session_id
    sample.metadata.pop(FAILURE_KEY, None)
    settings = AgentSettings.from_args(args)
    server = await agent_server(settings.host)
    session = server.open(args, sample, sampling_params, evaluation)
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
    began = time.monotonic()
    try:
        with trace_span(sample, "agent") as span:
            reward, failure = await _outcome(settings, session, task)
            span.set(**session.counts)
    finally:
        server.close(session)
    if session.fault is not None:
        raise session.fault
    if session.aborted:
        sample.status = Sample.Status.ABORTED
        return sample
    samples = _samples(session)
    for leaf in samples:
        leaf.metadata[STATISTICS] = {**session.counts, "leaves": len(samples), "seconds": time.monotonic() - began}
        leaf.reward = copy.copy(reward)
    if not session.tree.turns and failure is None:
        failure = "error", "the agent program got no answer from the model"
    if failure is not None:
        status = Sample.Status.TRUNCATED if session.counts["overflows"] else Sample.Status.FAILED
        for leaf in samples:
            mark_unscored(leaf, *failure)
            leaf.status = status
    elif reward is None:
        await _score_once(args, samples)
    return samples[0] if len(samples) == 1 else samples


async def _outcome(settings: AgentSettings, session: Session, task: Task) -> tuple[Reward, tuple[str, str] | None]:
    """The program's reward; or None, and the kind and the text of the failure."""
    program = asyncio.ensure_future(run_program(settings, task))
    deadline = time.monotonic() + settings.timeout
    try:
        while not program.done() and not session.aborted and session.fault is None and session.error is None:
            left = deadline - time.monotonic()
            if left <= 0:
                late = f"the agent program was not done after {settings.timeout:g} s (--agent-timeout)"
                return None, ("timeout", late)
            await asyncio.wait({program}, timeout=min(_POLL_SECONDS, left))
        if session.error is not None:
            return None, ("error", f"a request failed: {type(session.error).__name__}: {session.error}"[:2000])
        if not program.done():
            return None, None
        error = program.exception()
        if error is None:
            return program.result(), None
        if not session.aborted and session.fault is None:
            logger.warning("agent program, sample %s: %s: %s", session.sample.index, type(error).__name__, error)
        return None, ("error", f"the agent program raised {type(error).__name__}: {error}"[:2000])
    finally:
        session.close()
        if not program.done():
            program.cancel()
            await asyncio.wait({program}, timeout=_GRACE_SECONDS)


def _samples(session: Session) -> list[Sample]:
    tokenizer = session.state.tokenizer
    samples = session.tree.samples(session.state.args, session.sample, tokenizer)
    if samples:
        return samples
    # The program never got an answer. A prompt with one untrained token keeps the sample valid.
    sample = session.sample
    end = tokenizer.eos_token_id
    assert end is not None, "a model that answers in turns ends them with a token"
    sample.tokens = prompt_ids(session.state, sample) or [end]
    sample.append_response_tokens(tokens=[end], log_probs=None, trainable=False)
    sample.response = tokenizer.decode([end])
    return [sample]


async def _score_once(args: Args, samples: list[Sample]) -> None:
    """Score a session with several leaves once, by the newest leaf, and copy the reward.

    A reward function of the user gets all leaves, so this does nothing then.
    """
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
