"""``slime plan <flags of train.py>``: will the run fit, how long is a step, and which layout is best; without a GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from slime.cli.errors import CommandError


@dataclass(frozen=True)
class PlanOptions:
    """The options of ``slime plan`` beside the flags of a run.

    Attributes:
        gpus: GPUs of all nodes; None for those that the flags name.
        search: Number of layouts to show; 0 to plan only the run of the flags.
    """

    kind: str = "h200"
    gpus: int | None = None
    asynchronous: bool = False
    prompt_tokens: float = 256.0
    response_tokens: float | None = None
    sigma: float = 0.0
    search: int = 5
    json: bool = False


def plan(words: Sequence[str], options: PlanOptions) -> int:
    """Print the plan.

    Returns:
        1 if the run does not fit, otherwise 0.

    Raises:
        CommandError: The flags are wrong, or config.json of the model is not on this machine.
    """
    from slime.config.machine import Machine
    from slime.config.parser import ConfigError, read_command_line
    from slime.config.resolve import resolve_defaults
    from slime.plan.gpus import KINDS
    from slime.plan.layouts import best
    from slime.plan.page import as_json, page
    from slime.plan.plan import make_plan
    from slime.plan.read import read_run

    args, problems = read_command_line(words, prog="slime plan")
    machine = Machine(min(options.gpus or 8, 8), 16, False)
    problems += resolve_defaults(args, asynchronous=options.asynchronous, machine=machine)
    if not problems and not args.debug_rollout_only:
        from slime.config.layout import ParallelLayout

        problems += ParallelLayout.from_args(args).problems()
    if problems:
        raise CommandError(str(ConfigError(problems)))
    if "train_dtype" not in args.explicit:
        args = args.with_values(train_dtype="bfloat16", rollout_dtype="bfloat16")
    if "compile_layers" not in args.explicit:  # this machine may lack triton, the one with the GPUs has it
        args = args.with_values(compile_layers=True)
    run = read_run(
        args,
        KINDS[options.kind],
        options.asynchronous,
        options.prompt_tokens,
        options.response_tokens,
        options.sigma,
    )
    if run is None:
        raise CommandError(
            f"config.json of --hf-checkpoint {args.hf_checkpoint} is not on this machine, or lacks the model's size: "
            "give a local folder with that file; weights are not needed"
        )
    made = make_plan(run)
    both = run.train is not None and run.engine is not None
    others = best(run, options.gpus or made.gpus, options.search) if both and options.search else []
    if options.json:
        print(json.dumps({**as_json(made), "best": [as_json(other) for other in others]}, indent=2))
    else:
        print("\n".join(page(made, others)))
    return int(not made.fits)
