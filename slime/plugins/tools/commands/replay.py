"""``slime replay``, ``slime what-if`` and ``slime verify``: compute again what a run or plain
transformers computed, and compare.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from slime.cli.errors import CommandError, writing
from slime.cli.ranges import finite, whole
from slime.observability.regular import shown
from slime.plugins.tools.commands import Subparsers

if TYPE_CHECKING:
    from slime.plugins.tools.replay.recorded import RecordedRun
    from slime.plugins.tools.replay.step import Replayed, Wanted
    from slime.plugins.tools.verify.run import Target, Verified


def add_replay(commands: Subparsers) -> None:
    replay = commands.add_parser(
        "replay",
        help="compute a training step of a run again and compare it; exit code 1 if it differs",
        usage="slime replay RUN --step N [options] [flags of train.py that replace settings of the "
        "run]",
        description="Needs the dump of the step's samples (--save-debug-rollout-data) and the snapshot "
        "of the step before it (--save-interval). Further flags of train.py replace settings "
        "of the run, for example its layout.",
        allow_abbrev=False,
    )
    replay.add_argument("run_dir", type=Path, help="folder of a run, e.g. outputs/latest")
    replay.add_argument(
        "--step", type=whole(0), required=True, help="the step, as in rollout/step of metrics.jsonl"
    )
    replay.add_argument(
        "--through",
        action="store_true",
        help="without a snapshot right before it, train the steps since the last one",
    )
    replay.add_argument(
        "--sample", type=whole(0), metavar="INDEX", help="show this sample token by token"
    )
    replay.add_argument(
        "--tensors",
        type=Path,
        metavar="DIR",
        help="write weights, gradients, batch and the sample's activations there",
    )
    replay.add_argument(
        "--tolerance",
        type=finite(0),
        help="allowed difference of metrics (default: 0 on the CPU in the layout of the run)",
    )
    replay.add_argument("--json", action="store_true", help="print the result as JSON instead")
    replay.add_argument(
        "--run-its-code",
        action="store_true",
        help="run the functions, model code and environment variables that the folder of the run "
        "names; lists them",
    )
    replay.set_defaults(run=_replay, takes_flags=True)


def _replay(args: argparse.Namespace) -> int:
    from slime.plugins.tools.replay.step import Wanted

    tensors = args.tensors.absolute() if args.tensors is not None else None
    wanted = Wanted(args.step, args.through, args.sample, tensors, args.tolerance)
    return replay(args.run_dir, wanted, args.rest, args.json, args.run_its_code)


def replay(
    folder: Path,
    wanted: Wanted,
    flags: Sequence[str] = (),
    as_json: bool = False,
    run_its_code: bool = False,
) -> int:
    """Replay a step and print the comparison.

    Args:
        flags: Flags of train.py that replace settings of the run.
        run_its_code: Whether code that the folder names may run.

    Returns:
        0 if the step is the recorded one (within the tolerance), otherwise 1.

    Raises:
        CommandError: The step cannot be replayed, or a training rank failed.
    """
    from slime.observability.debug_data import DebugDataError
    from slime.plugins.tools.local_ranks import RankError
    from slime.plugins.tools.replay.recorded import ReplayError, read_run
    from slime.plugins.tools.replay.step import replay_step

    with _safe_path():
        try:
            run = read_run(folder.resolve(), wanted.step, flags, _tell if run_its_code else None)
            if run.unrecorded:
                names = shown(", ".join(run.unrecorded))
                print(
                    f"slime replay: the values of {names} are not recorded: pass --train-env-vars",
                    file=sys.stderr,
                )
            if wanted.tensors is not None:
                with writing(f"--tensors {wanted.tensors}"):
                    wanted.tensors.mkdir(parents=True, exist_ok=True)
            result = replay_step(run, wanted)
            _show(result, wanted, as_json, run)
        except (ReplayError, RankError, DebugDataError) as error:
            raise CommandError(str(error)) from error
    return int(not result.equal)


def add_what_if(commands: Subparsers) -> None:
    what_if = commands.add_parser(
        "what-if",
        help="compute a training step of a run with one thing changed, beside the step as it was",
        usage="slime what-if RUN --step N [options] [flags of train.py to change]",
        description="Prints how loss, gradient and update differ, by layer. It needs what slime "
        "replay needs.",
        allow_abbrev=False,
    )
    what_if.add_argument("run_dir", type=Path, help="folder of a run, e.g. outputs/latest")
    what_if.add_argument("--step", type=whole(0), required=True, help="as in metrics.jsonl")
    for option, what in (
        ("--without-sample", "leave this sample out, as one whose verifier timed out"),
        ("--flip-reward", "mirror the reward of this sample in the range of the step's"),
    ):
        what_if.add_argument(
            option, type=whole(0), action="append", default=[], metavar="INDEX", help=what
        )
    what_if.add_argument("--through", action="store_true", help="as for slime replay")
    what_if.add_argument("--run-its-code", action="store_true", help="as for slime replay")
    what_if.add_argument("--json", action="store_true", help="print the result as JSON instead")
    what_if.set_defaults(run=_what_if, takes_flags=True)


def _what_if(args: argparse.Namespace) -> int:
    from slime.observability.debug_data import DebugDataError
    from slime.plugins.tools.local_ranks import RankError
    from slime.plugins.tools.replay.recorded import ReplayError, read_run
    from slime.plugins.tools.replay.step import Wanted
    from slime.plugins.tools.replay.what_if import ChangedSamples, page, what_if

    change = ChangedSamples(tuple(args.without_sample), tuple(args.flip_reward))
    if not (change.without or change.flipped or args.rest):
        raise CommandError("nothing is changed: --without-sample, --flip-reward, or flags of a run")
    folder = args.run_dir.resolve()
    tell = _tell if args.run_its_code else None
    with _safe_path():
        try:
            run, changed = (read_run(folder, args.step, flags, tell) for flags in ((), args.rest))
            result = what_if(run, changed, Wanted(args.step, args.through, change=change))
        except (ReplayError, RankError, DebugDataError) as error:
            raise CommandError(str(error)) from error
    if args.json:
        print(json.dumps(asdict(result), indent=2, default=_plain))
    else:
        print(*map(shown, page(result)), sep="\n")
    return 0


@contextmanager
def _safe_path() -> Iterator[None]:
    """Let the folder of a run add no modules to the import path of any process."""
    from slime.config.hooks import SAFE_PATH

    added = SAFE_PATH.keys() - os.environ.keys()
    os.environ.update(SAFE_PATH)  # also for the processes that libraries start
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _tell(lines: Sequence[str]) -> None:
    for line in lines:
        print(f"slime replay: runs {shown(line)}", file=sys.stderr)


def _show(result: Replayed, wanted: Wanted, as_json: bool, run: RecordedRun) -> None:
    from slime.plugins.tools.replay.compare import page, sample_page

    if as_json:
        values = asdict(result) | {"equal": result.equal, "first": result.first}
        print(json.dumps(values, indent=2, default=_plain))
        return
    for line in page(result):
        print(shown(line))
    if result.sample is not None:
        # Only those of the response: a prompt is not trained.
        tokens = result.sample.tokens[
            len(result.sample.tokens) - result.sample.response_length :
        ].tolist()
        for line in sample_page(
            result.sample, texts(str(run.args.hf_checkpoint), run.args.trust_remote_code, tokens)
        ):
            print(shown(line))
    if wanted.tensors is not None:
        print(f"tensors: {wanted.tensors}")


def texts(checkpoint: str, trust_remote_code: bool, tokens: list[int]) -> list[str]:
    """Return the text of each token, by the tokenizer of the run; empty if it cannot be read."""
    from slime.data.tokenizers import load_tokenizer

    try:
        tokenizer = load_tokenizer(checkpoint, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError):
        return []
    return [str(tokenizer.decode([token])) for token in tokens]


def _plain(value: object) -> object:
    import torch

    return value.tolist() if isinstance(value, torch.Tensor) else str(value)


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
    verify.add_argument("model", help="Hugging Face folder or hub id; only its config.json is read")
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
    verify.add_argument(
        "--engine",
        choices=["embedded", "sglang", "none"],
        default="embedded",
        help="default: embedded",
    )
    verify.add_argument(
        "--attn-implementation",
        metavar="NAME",
        help="as that of train.py, such as sdpa (FSDP; default: as in a run)",
    )
    verify.add_argument(
        "--layers", type=whole(1, 1000), default=4, help="layers of the cut-down model (default: 4)"
    )
    verify.add_argument(
        "--trust-remote-code", action="store_true", help="run code of the model's folder"
    )
    verify.add_argument("--json", action="store_true", help="print the result as JSON instead")
    verify.set_defaults(run=_verify)


def _verify(args: argparse.Namespace) -> int:
    from slime.plugins.tools.verify.run import Target

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
    from slime.plugins.tools.local_ranks import RankError
    from slime.plugins.tools.verify.run import verify
    from slime.plugins.tools.verify.small import VerifyError

    transformers_logging.disable_progress_bar()
    try:
        result = verify(target)
    except (VerifyError, RankError, ServerFailed) as error:
        raise CommandError(str(error)) from error
    if as_json:
        facts = asdict(result) | {"good": result.good}
        for check in facts["checks"]:
            if not math.isfinite(check["largest"]):  # JSON has no infinity
                check["largest"] = None
        print(json.dumps(facts, indent=2, default=str, allow_nan=False))
    else:
        for line in table(target, result):
            print(line)
    return int(not result.good)


def table(target: Target, result: Verified) -> Iterator[str]:
    """Yield the lines of the table."""
    sizes = {
        name.removesuffix("_parallel_size"): size for name, size in target.sizes.items() if size
    }
    layout = ", ".join(f"{name} {size}" for name, size in [*sizes.items(), ("data", target.data)])
    yield f"model: {result.small.description}"
    yield (
        f"{target.backend} on {result.world_size} rank{'s' * (result.world_size > 1)} ({layout}) "
        "in float32"
    )
    yield f"{'check':<34}{'difference':>12}{'allowed':>12}"
    for check in result.checks:
        row = (
            f"{check.what:<34}{check.largest:>12.2g}{check.allowed:>12.2g}  "
            f"{'ok' if check.good else 'DIFFERS'}"
        )
        yield row + "".join(f"; {text}" for text in (check.first, check.note) if text)
    if result.places:
        yield f"wrong outputs: {', '.join(result.places)}"
        inside = sorted({name.removeprefix(f"{result.places[0]}.") for name in result.parameters})
        yield (
            "parameters of the first: "
            f"{', '.join(inside[:12])}{', ...' if len(inside) > 12 else ''}"
        )
    if result.guess:
        yield f"its outputs are {result.guess}"
    yield "verified" if result.good else "NOT verified"
