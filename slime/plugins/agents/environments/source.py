"""The data source of ``--environment``: its tasks in the place of the rows of a file. And the check
of the flag.

The order of an epoch depends only on ``--rollout-seed`` and the epoch, as with a file, so the state
that is saved for a file is all that an exact resume needs.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.config.seeds import derive_seed
from slime.data.chunks import shuffled
from slime.data.sample import Sample
from slime.data.source import RolloutDataSourceWithBuffer, SourceState
from slime.data.tokenizers import load_tokenizer
from slime.rollout.prompts import encode, render_first
from slime.types import Tokenizer

from ..config import template_problem
from . import (
    SPEC,
    EnvironmentProblem,
    environment,
    own_seed,
    task_sample,
)
from .played import Played

if TYPE_CHECKING:
    from slime.config.args import Args


logger = logging.getLogger(__name__)


@dataclass(eq=False)
class EnvironmentTasks:
    """The tasks of an environment as a data set, see :class:`slime.data.dataset.PromptDataset`.

    Args:
        spec: The environment in its full form.
        seed: Seed of the order of each epoch.
        template_kwargs: Additional arguments of the chat template.
        tokenizer, longest: Leave out prompts of more than ``longest`` tokens; None: keep all.
    """

    spec: str
    seed: int
    template_kwargs: dict[str, object]
    tokenizer: Tokenizer | None = None
    longest: int | None = None

    def __post_init__(self) -> None:
        self._count = len(environment(self.spec))
        self._epoch: int | None = None

    def __len__(self) -> int:
        return self._count

    def shuffle(self, epoch_id: int) -> None:
        self._epoch = epoch_id

    def __getitem__(self, position: int) -> Sample | None:
        number = position
        if self._epoch is not None:
            (number,) = shuffled(
                [position], self._count, derive_seed(self.seed, "shuffle", self._epoch)
            )
        sample = task_sample(self.spec, number)
        sample.apply_chat_template_kwargs = dict(self.template_kwargs)
        return None if self._too_long(sample) else sample

    def _too_long(self, sample: Sample) -> bool:
        if self.tokenizer is None or self.longest is None:
            return False
        text = (
            sample.prompt
            if isinstance(sample.prompt, str)
            else render_first(self.tokenizer, sample)
        )
        return len(encode(self.tokenizer, text)) > self.longest


class EnvironmentSource(RolloutDataSourceWithBuffer):
    """Returns groups of the tasks of ``--environment``, with the buffer and the state of other data
    sources.
    """

    def __init__(self, args: Args) -> None:
        self.spec = own_seed(args.environment or "", args.rollout_seed)
        tokenizer = None
        if args.rollout_max_prompt_len is not None:
            tokenizer = load_tokenizer(args.hf_checkpoint, args.trust_remote_code)
        tasks = EnvironmentTasks(
            self.spec,
            args.rollout_seed,
            args.apply_chat_template_kwargs,
            tokenizer,
            args.rollout_max_prompt_len,
        )
        super().__init__(args, tasks)

    def state_dict(self) -> SourceState:
        return {**super().state_dict(), "environment": self.spec}

    def load_state_dict(self, state: SourceState) -> None:
        before = state.get("environment")
        if before != self.spec:
            logger.warning(
                "the run was saved with %s and continues with --environment %s", before, self.spec
            )
        super().load_state_dict(state)


# --- the check of --environment and --mcp-server before any process starts ---


def check_environment(args: Args) -> list[str]:
    """Create the environment, so that a missing package or a wrong option is reported before any
    process starts.
    """
    if args.mcp_server:
        return _check_mcp(args.mcp_server)
    if args.environment is None:
        return []
    try:
        first = task_sample(own_seed(args.environment, args.rollout_seed), 0)
    except EnvironmentProblem as error:
        return [f"--environment {args.environment}: {error}"]
    # The endpoint of an episode that is an agent program reads the model's calls of tools.
    played = isinstance(environment(first.metadata[SPEC]), Played)
    parser = args.agent_tool_parser if played else "none"
    if isinstance(first.prompt, str) and not played:
        return []
    problem = template_problem(args.hf_checkpoint, parser)
    return [problem] if problem else []


def _check_mcp(servers: list[str]) -> list[str]:
    from .mcp import check_servers

    try:
        check_servers(servers)
    except EnvironmentProblem as error:
        return [f"--mcp-server: {error}"]
    return []
