"""All checks between flags. Each rule says what is wrong and what to change; all are reported together."""

from __future__ import annotations

from slime.config import passthrough
from slime.config.args import Args
from slime.config.machine import Machine, this_machine
from slime.config.roles import check_roles
from slime.config.validate_agent import AGENT_RULES
from slime.config.validate_algorithm import ALGORITHM_RULES, check_opsm
from slime.config.validate_files import DATA_RULES, FILE_RULES
from slime.config.validate_model import MODEL_RULES
from slime.config.validate_resources import check_machine, check_placement, check_routing_replay
from slime.config.validate_rollout import ROLLOUT_RULES, check_loop


def validate(
    args: Args, *, asynchronous: bool = False, machine: Machine | None = None, data_is_checked: bool = False
) -> list[str]:
    """Problems of resolved args, in the order of the rooms. Notices go to ``args.notices``.

    Args:
        data_is_checked: the data room reads the files itself, so their absence is not told twice.
    """
    problems: list[str] = []
    data_rules = () if data_is_checked else DATA_RULES
    for rule in (*FILE_RULES, *data_rules, *ROLLOUT_RULES, *AGENT_RULES, *ALGORITHM_RULES, *MODEL_RULES):
        problems += rule(args)
    problems += check_loop(args, asynchronous)
    problems += check_opsm(args, asynchronous)
    problems += check_placement(args)
    problems += check_machine(args, machine or this_machine())
    problems += check_routing_replay(args, machine or this_machine())
    problems += passthrough.check(args)
    problems += check_roles(args)
    return problems
