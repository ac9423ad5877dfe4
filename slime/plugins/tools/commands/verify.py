"""``slime verify`` and ``slime check-algo``: compute again what plain transformers or a run computed,
or an estimator beside the exact gradient of the expected reward, and compare.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from slime.cli.command import CommandError, whole
from slime.observability.files import shown

from . import Subparsers, print_report
from .replay import reading, tell_code

if TYPE_CHECKING:
    from ..verify import Target


PARALLEL = {
    "dp": ("data", ""),
    "tp": ("tensor", "tensor_model_parallel_size"),
    "pp": ("pipeline", "pipeline_model_parallel_size"),
    "cp": ("context", "context_parallel_size"),
    "ep": ("expert", "expert_model_parallel_size"),
    "etp": ("expert tensor", "expert_tensor_parallel_size"),
}
"""The flags of parallel sizes of ``slime verify``: the word in their help, and Megatron's name of
the size.
"""


def add_verify(commands: Subparsers) -> None:
    verify = commands.add_parser(
        "verify",
        help="compare a cut-down model on a backend, a layout and an engine with plain "
        "transformers on one rank",
        description="Compares weights, log-probs, loss and the gradient of each parameter; exit code 1 "
        "if they differ.",
    )
    verify.add_argument(
        "model",
        help="Hugging Face folder or hub id, of which only config.json is read; with --steps, the "
        "folder of a run",
    )
    verify.add_argument(
        "--steps",
        type=_steps,
        metavar="N,N",
        help="verify a run instead: its files beside its certificate (--certificate), and these "
        "steps computed again",
    )
    verify.add_argument(
        "--backend", choices=["fsdp", "megatron"], default="fsdp", help="default: fsdp"
    )
    for name, (what, _) in PARALLEL.items():
        usual = ("as --tp", None) if name == "etp" else ("1", 1)
        verify.add_argument(
            f"--{name}",
            type=whole(1, 64),
            default=usual[1],
            metavar="N",
            help=f"{what} parallel size (default: {usual[0]})",
        )
    verify.add_argument("--sp", action="store_true", help="sequence parallelism (with --tp)")
    verify.add_argument(
        "--vpp",
        type=whole(1, 64),
        default=1,
        metavar="N",
        help="model chunks of a pipeline rank (default: 1)",
    )
    engines = ["embedded", "sglang", "none"]
    verify.add_argument("--engine", choices=engines, default="embedded", help="default: embedded")
    verify.add_argument(
        "--attn-implementation",
        metavar="NAME",
        help="as that of train.py, such as sdpa (FSDP; default: as in a run)",
    )
    verify.add_argument(
        "--layers", type=whole(1, 1000), default=4, help="layers of the cut-down model (default: 4)"
    )
    verify.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run code of the model's folder, or that a run names",
    )
    verify.add_argument("--json", action="store_true", help="print the result as JSON instead")
    verify.set_defaults(run=_verify)


def _steps(text: str) -> list[int]:
    return [int(step) for step in text.split(",")]


def _verify(args: argparse.Namespace) -> int:
    from ..verify import Target

    if args.steps:
        from ..replay.certificate import verify_run

        with reading():
            allowed = tell_code if args.trust_remote_code else None
            lines = list(verify_run(Path(args.model).resolve(), args.steps, allowed))
        print(*(shown(line) for line, _ in lines), sep="\n")
        return int(not all(good for _, good in lines))

    # Sizes of 1 are left out, so that FSDP, which has few of them, is not told of Megatron's.
    sizes: dict[str, int | bool] = {
        name: size
        for flag, (_, name) in PARALLEL.items()
        if name and (size := vars(args)[flag]) is not None and (size != 1 or flag == "etp")
    }
    if args.vpp != 1:
        sizes["virtual_pipeline_model_parallel_size"] = args.vpp
    if args.sp:
        sizes["sequence_parallel"] = True
    target = Target(
        args.model,
        args.backend,
        sizes,
        args.dp,
        flags={"attn_implementation": args.attn_implementation} if args.attn_implementation else {},
        engine=None if args.engine == "none" else args.engine,
        layers=args.layers,
        trust_remote_code=args.trust_remote_code,
    )
    return verify_model(target, args.json)


def verify_model(target: Target, as_json: bool = False) -> int:
    """Verify a model and print the table.

    Returns:
        0 if everything is within the tolerances, otherwise 1.

    Raises:
        CommandError: The model or the layout cannot be verified, or a rank failed.
    """
    from transformers.utils import logging as transformers_logging

    from slime.engines.process import ServerFailed

    from ..verify import table, verify

    transformers_logging.disable_progress_bar()
    try:
        result = verify(target)
    except ServerFailed as error:
        raise CommandError(str(error)) from error
    facts = asdict(result) | {"good": result.good}
    for check in facts["checks"]:
        if not math.isfinite(check["largest"]):  # JSON has no infinity
            check["largest"] = None
    print_report(as_json, facts, table(target, result))
    return int(not result.good)


def add_check_algo(commands: Subparsers) -> None:
    check = commands.add_parser(
        "check-algo",
        help="compare an estimator with the exact policy gradient of a tiny world; exit code 1 if "
        "a check fails that its design does not say",
        usage="slime check-algo NAME|FILE.py:CLASS [options] [flags of train.py]",
        description="Bias, variance, and whether the gradient depends on what must not matter: "
        "micro-batches, ranks, order, masked tokens, other groups. Flags of train.py, such as "
        "--calculate-per-token-loss or --use-tis, are part of what is checked.",
        allow_abbrev=False,
    )
    check.add_argument("algorithm", help="a name of --advantage-estimator, or FILE.py:CLASS")
    check.add_argument("--json", action="store_true", help="print the result as JSON instead")
    check.set_defaults(run=_check, takes_flags=True)


def _check(options: argparse.Namespace) -> int:
    from ..check_algo import as_dict, check_algorithm, page
    from ..check_algo.lab import make_args

    report = check_algorithm(make_args(options.algorithm, options.rest))
    print_report(options.json, as_dict(report), page(report))
    return int(bool(report.failing))
