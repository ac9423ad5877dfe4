"""Train on dumped rollouts while the engines run.

Use with ``--rollout-function-path slime.rollout.forge_load.generate_rollout
--load-forge-rollout-data TEMPLATE``. Unlike with ``--load-debug-rollout-data``, weights are synced
and evaluation works.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.data.source import DataSource
from slime.observability.debug_data import load_rollout
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.sglang_rollout import generate_rollout as evaluate_with_engines

if TYPE_CHECKING:
    from slime.config.args import Args


def generate_rollout(
    args: Args, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Load the dump of ``rollout_id``. An evaluation uses the engines.

    Raises:
        ValueError: ``--load-forge-rollout-data`` is not set, or there is no dump of this rollout.
    """
    if evaluation:
        return evaluate_with_engines(args, rollout_id, data_source, evaluation=True)
    if not args.load_forge_rollout_data:
        raise ValueError(
            f"{__name__}.generate_rollout needs --load-forge-rollout-data, a template with "
            f"{{rollout_id}}"
        )
    return RolloutFnTrainOutput(samples=load_rollout(args.load_forge_rollout_data, rollout_id))
