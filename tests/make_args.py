"""Settings for tests: ``make_args(rollout_batch_size=4)`` is what parsing makes of
``--rollout-batch-size 4``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from slime.config.args import FLAGS, Args
from slime.config.machine import Machine
from slime.config.resolve import resolve_defaults
from slime.config.rules import Run, check_rules

CPU_MACHINE = Machine(gpus=0, cores=2, in_cluster=False)
DERIVED = {field.name for field in dataclasses.fields(Args)} - set(FLAGS)


def make_args(
    *, asynchronous: bool = False, machine: Machine = CPU_MACHINE, **changes: Any
) -> Args:
    """Args with every default resolved as after parsing, on a machine of two cores without GPUs.

    No file is read unless ``changes`` names one (``hf_checkpoint``, ``prompt_data``,
    ``sglang_config``). The checks of the command line, which look for files and devices, do not
    run. It takes about 0.1 ms.

    Args:
        asynchronous: as by ``train_async.py``.
        machine: whose defaults are taken.
        changes: flags as if they were typed; derived fields (``use_critic``, ``world_size``), which
            are set after the defaults are resolved; and pass-through options as
            ``sglang={"mem_fraction_static": 0.8}``.

    Raises:
        TypeError: a name that is neither a flag nor a field of Args.
        ValueError: flags that contradict each other.
    """
    args = Args()
    after = {
        name: changes.pop(name)
        for name in list(changes)
        if name in DERIVED - {"sglang", "router", "megatron"}
    }
    for name, value in changes.items():
        if name not in vars(args):
            raise TypeError(f"args has no {name!r}")
        setattr(args, name, value)
    args.explicit = frozenset(changes) & FLAGS.keys()
    if problems := resolve_defaults(Run(args, asynchronous, machine)):
        raise ValueError("\n".join(problems))
    return args.with_values(**after)


def rule_problems(
    args: Args, *, asynchronous: bool = False, machine: Machine = CPU_MACHINE
) -> list[str]:
    """What the rules of flags refuse; notices are added to the arguments."""
    return check_rules(Run(args, asynchronous, machine))
