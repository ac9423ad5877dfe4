"""The default rollout and evaluation: generate with the engines, score, filter.

User functions import the names in ``__all__`` from here. Their code is in the other files of this
folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.data.source import DataSource
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.evaluate import eval_rollout
from slime.rollout.generate import generate, get_model_url
from slime.rollout.group import generate_and_rm, generate_and_rm_group
from slime.rollout.loop import RolloutLoop

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.plugins.compat.rollouts import GenerateState, abort

__all__ = [
    "GenerateState", "abort", "eval_rollout", "generate", "generate_and_rm", "generate_and_rm_group",
    "generate_rollout", "generate_rollout_async", "get_model_url",
]  # fmt: skip


def generate_rollout(
    args: Args, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Run one rollout (``--rollout-batch-size`` groups) or one evaluation.

    The call blocks until it is done. The work runs on the shared event loop of the process.
    """
    from slime.engines.background import run

    if evaluation:
        return run(eval_rollout(args, rollout_id))
    return run(generate_rollout_async(args, rollout_id, data_source))


async def generate_rollout_async(
    args: Args, rollout_id: int, data_source: DataSource
) -> RolloutFnTrainOutput:
    """Run one rollout, as :func:`generate_rollout`, on the event loop of the caller."""
    return await RolloutLoop(args, rollout_id, data_source).run()


def __getattr__(name: str) -> object:
    """Import ``GenerateState`` and ``abort`` for rollout functions of older releases only."""
    from slime.plugins.compat import rollouts

    return getattr(rollouts, name)
