"""Where groups are generated and scored: in this process, or in the rollout workers of the run.

The rollout loop, the standing pool and evaluations hand over one group at a time and get it back. Everything else
(data source, order, filters, ledger) stays with them, so it does not depend on where a group is generated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from slime.data.sample import Group
from slime.rollout.group import generate_and_rm_group
from slime.rollout.state import GenerateState
from slime.rollout.weight_timeline import TIMELINE
from slime.types import SamplingParams

if TYPE_CHECKING:
    from slime.config.args import Args


class GroupGenerator(Protocol):
    """Generates and scores groups. It is called on the event loop of the rollout."""

    async def generate(
        self, args: Args, group: Group, params: SamplingParams, evaluation: bool = False, purpose: str = "sampling"
    ) -> Group:
        """Do what :func:`~slime.rollout.group.generate_and_rm_group` does.

        ``group`` itself may or may not have changed afterwards: use the returned one.
        """

    async def abort(self) -> None:
        """Let groups in progress, other than those of evaluations, end without further requests.

        The caller has set ``GenerateState.aborted``, and ends the requests that the engines work on.
        """


class LocalGenerator:
    """Generates in this process."""

    async def generate(
        self, args: Args, group: Group, params: SamplingParams, evaluation: bool = False, purpose: str = "sampling"
    ) -> Group:
        if not evaluation:
            # A task has its own copy of the context, so this reaches the requests of this group and no evaluation.
            TIMELINE.set(GenerateState(args).schedule)
        return await generate_and_rm_group(args, group, params, evaluation, purpose)

    async def abort(self) -> None:
        """Groups of this process read the flag itself."""


_LOCAL = LocalGenerator()


def generator_of(args: Args) -> GroupGenerator:
    """Return what generates the groups of the run in this process."""
    return GenerateState(args).generator or _LOCAL
