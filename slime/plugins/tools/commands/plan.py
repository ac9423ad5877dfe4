"""``slime plan <flags of train.py>``: will the run fit, how long is a step, and which layout is best; without a GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slime.cli.errors import CommandError

_ROWS = 200
"""So many rows of the data give the mean length of a prompt."""


@dataclass(frozen=True)
class PlanOptions:
    """The options of ``slime plan`` beside the flags of a run.

    Attributes:
        gpus: GPUs of all nodes; None for those that the flags name.
        prompt_tokens: The mean; None for that of the data.
        median_response: Instead of ``response_tokens``, the mean.
        search: Number of layouts to show; 0 to plan only the run of the flags.
        lengths_from: Folder of a run whose lengths are taken.
    """

    kind: str = "h200"
    gpus: int | None = None
    asynchronous: bool = False
    prompt_tokens: float | None = None
    response_tokens: float | None = None
    median_response: float | None = None
    sigma: float = 0.0
    lengths_from: str | None = None
    search: int = 5
    json: bool = False


def plan(words: Sequence[str], options: PlanOptions) -> int:
    """Print the plan.

    Returns:
        1 if the run does not fit, otherwise 0.

    Raises:
        CommandError: The flags or options are wrong, config.json of the model is not on this machine, or the run to
            take lengths from has no samples.
    """
    from slime.backends.needs import TrainNeeds
    from slime.config.machine import Machine
    from slime.config.parser import ConfigError, read_command_line
    from slime.config.resolve import resolve_defaults
    from slime.plugins.tools.dry_run import mean_prompt_tokens
    from slime.plugins.tools.plan.gpus import KINDS
    from slime.plugins.tools.plan.layouts import best
    from slime.plugins.tools.plan.modes import ways
    from slime.plugins.tools.plan.page import as_json, page
    from slime.plugins.tools.plan.plan import make_plan
    from slime.plugins.tools.plan.read import ASSUMED_PROMPT, read_run

    args, problems = read_command_line(words, prog="slime plan")
    if args.hf_checkpoint is None:
        problems.insert(0, "--hf-checkpoint is needed: a local folder with the config.json of the model")
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
        args = args.with_values(compile_layers=args.lora_base_quantization is None)
    response_tokens, lengths = _lengths(options)
    kind = KINDS[options.kind]
    # A plan needs neither data nor a tokenizer.
    prompt_tokens = options.prompt_tokens or mean_prompt_tokens(args, _ROWS, _tell_assumed) or ASSUMED_PROMPT
    run = read_run(args, kind, options.asynchronous, prompt_tokens, response_tokens, options.sigma, lengths)
    if run is None:
        raise CommandError(
            f"config.json of --hf-checkpoint {args.hf_checkpoint} is not on this machine, or lacks the model's size: "
            "give a local folder with that file; weights are not needed"
        )
    passes = TrainNeeds.from_args(args).log_prob_passes(args.num_steps_per_rollout or 1)
    run = replace(run, work=replace(run.work, log_prob_passes=passes))
    made = make_plan(run)
    both = run.train is not None and run.engine is not None
    others = best(run, options.gpus or made.gpus, options.search) if both and options.search else []
    # Without a distribution of lengths there is no tail, which decides how far the modes differ.
    found = ways(made, options.gpus or made.gpus) if others and (options.sigma or lengths) else []
    if options.json:
        print(json.dumps(as_json(made, others, found, words), indent=2))
    else:
        print("\n".join(page(made, others, found, words)))
    return int(not made.fits)


def _tell_assumed(why: str) -> None:
    from slime.plugins.tools.plan.read import ASSUMED_PROMPT

    print(f"slime plan: prompts of {ASSUMED_PROMPT:g} tokens are assumed (--mean-prompt): {why}", file=sys.stderr)


def _lengths(options: PlanOptions) -> tuple[float | None, tuple[int, ...]]:
    """Return the mean tokens of a response, and the measured lengths."""
    from math import exp
    from pathlib import Path

    from slime.plugins.tools.plan.lengths import measured_lengths

    if options.lengths_from is not None:
        if options.sigma:
            raise CommandError("--sigma has no effect on the lengths of --lengths-from: give one of them")
        try:
            return None, measured_lengths(Path(options.lengths_from).expanduser())
        except ValueError as error:
            raise CommandError(f"--lengths-from: {error}") from error
    if options.median_response is not None:
        return options.median_response * exp(options.sigma**2 / 2), ()
    return options.response_tokens, ()
