"""``slime replay`` and ``slime what-if``: compute a step of a run again, and compare."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from slime.cli.command import CommandError, finite, whole, writing
from slime.observability.files import shown

from . import Subparsers, print_report

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from ..replay import RecordedRun
    from ..replay.step import Replayed, Wanted


def add_of_step(
    commands: Subparsers, name: str, run: Callable[[argparse.Namespace], int], text: str, more: str
) -> argparse.ArgumentParser:
    """Add a command that reads a step of a run."""
    parser = commands.add_parser(
        name,
        help=text,
        usage=f"slime {name} RUN --step N [options] [flags of train.py that replace settings of "
        "the run]",
        description=f"{more} Needs the dump of the step's samples (--save-debug-rollout-data) and "
        "the snapshot of the step before it (--save-interval).",
        allow_abbrev=False,
    )
    parser.add_argument("run_dir", type=Path, help="folder of a run, e.g. outputs/latest")
    parser.add_argument(
        "--step", type=whole(0), required=True, help="the step, as in rollout/step of metrics.jsonl"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead")
    parser.add_argument(
        "--run-its-code",
        action="store_true",
        help="run the functions, model code and environment variables that the folder of the run "
        "names; lists them",
    )
    parser.set_defaults(run=run, takes_flags=True)
    return parser


def _add_through(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--through",
        action="store_true",
        help="without a snapshot right before it, train the steps since the last one",
    )


@contextmanager
def reading() -> Iterator[None]:
    """Let the folder of a run add no modules to the import path of any process, and tell what is
    wrong with it."""
    from slime.config.hooks import SAFE_PATH
    from slime.observability.debug_data import DebugDataError

    added = SAFE_PATH.keys() - os.environ.keys()
    os.environ.update(SAFE_PATH)  # also for the processes that libraries start
    try:
        yield
    except DebugDataError as error:
        raise CommandError(str(error)) from error
    finally:
        for name in added:
            del os.environ[name]


def print_result(
    result: DataclassInstance, as_json: bool, lines: Iterable[str], **more: object
) -> None:
    print_report(as_json, asdict(result) | more, lines)


def add_replay(commands: Subparsers) -> None:
    replay = add_of_step(
        commands,
        "replay",
        _replay,
        "compute a training step of a run again and compare it; exit code 1 if it differs",
        "Further flags of train.py replace settings of the run, for example its layout.",
    )
    _add_through(replay)
    replay.add_argument(
        "--sample", type=whole(0), metavar="INDEX", help="show this sample token by token"
    )
    replay.add_argument(
        "--tensors",
        type=Path,
        metavar="DIR",
        help="write weights, gradients and batch there",
    )
    replay.add_argument(
        "--tolerance",
        type=finite(0),
        help="allowed difference of metrics (default: 0 on the CPU in the layout of the run)",
    )


def _replay(args: argparse.Namespace) -> int:
    """Replay a step and print the comparison.

    Returns:
        0 if the step is the recorded one (within the tolerance), otherwise 1.

    Raises:
        CommandError: The step cannot be replayed, or a training rank failed.
    """
    from ..replay import read_run
    from ..replay.step import Wanted, replay_step

    tensors = args.tensors.absolute() if args.tensors is not None else None
    wanted = Wanted(args.step, args.through, args.sample, tensors, args.tolerance)
    tell = tell_code if args.run_its_code else None
    with reading():
        run = read_run(args.run_dir.resolve(), wanted.step, args.rest, tell)
        if run.unrecorded:
            names = shown(", ".join(run.unrecorded))
            print(
                f"slime replay: the values of {names} are not recorded: pass --train-env-vars",
                file=sys.stderr,
            )
        if tensors is not None:
            with writing(f"--tensors {tensors}"):
                tensors.mkdir(parents=True, exist_ok=True)
        result = replay_step(run, wanted)
    lines = _lines(result, wanted, run)
    print_result(result, args.json, lines, equal=result.equal, first=result.first)
    return int(not result.equal)


def add_what_if(commands: Subparsers) -> None:
    what_if = add_of_step(
        commands,
        "what-if",
        _what_if,
        "compute a training step of a run with one thing changed, beside the step as it was",
        "Prints how loss, gradient and update differ, by layer.",
    )
    _add_through(what_if)
    for option, what in (
        ("--without-sample", "leave this sample out, as one whose verifier timed out"),
        ("--flip-reward", "mirror the reward of this sample in the range of the step's"),
    ):
        what_if.add_argument(
            option, type=whole(0), action="append", default=[], metavar="INDEX", help=what
        )
    what_if.add_argument(
        "--rank-samples",
        action="store_true",
        help="order the samples by their influence on the update instead",
    )
    what_if.add_argument(
        "--evaluate",
        action="store_true",
        help="score the run's evaluation sets with the weights after either step, by the run's own "
        "functions (--run-its-code)",
    )


def _what_if(args: argparse.Namespace) -> int:
    from ..replay import read_run
    from ..replay.step import Wanted
    from ..replay.what_if import (
        ChangedSamples,
        Ranked,
        WhatIf,
        page,
        ranked,
        what_if,
    )

    change = ChangedSamples(tuple(args.without_sample), tuple(args.flip_reward))
    changes = bool(change.without or change.flipped or args.rest)
    if changes == args.rank_samples:
        raise CommandError(
            "either one thing is changed (--without-sample, --flip-reward, or flags of a run), or "
            "--rank-samples orders the samples of the step as it was"
        )
    if args.evaluate and (args.rank_samples or not args.run_its_code):
        raise CommandError(
            "--evaluate needs a change to compare with, and --run-its-code, because it runs the "
            "functions that the run names"
        )
    wanted = Wanted(args.step, args.through, change=change, ranks_samples=args.rank_samples)
    folder = args.run_dir.resolve()
    tell = tell_code if args.run_its_code else None
    with reading():
        run, changed = (read_run(folder, args.step, flags, tell) for flags in ((), args.rest))
        result: Ranked | WhatIf = (
            ranked(run, wanted)
            if args.rank_samples
            else what_if(run, changed, wanted, args.evaluate)
        )
    print_result(result, args.json, page(result))
    return 0


def tell_code(lines: Sequence[str]) -> None:
    for line in lines:
        print(f"slime replay: runs {shown(line)}", file=sys.stderr)


def _lines(result: Replayed, wanted: Wanted, run: RecordedRun) -> Iterator[str]:
    from ..replay.compare import page, sample_page

    yield from page(result)
    if result.sample is not None:
        # Only those of the response: a prompt is not trained.
        tokens = result.sample.tokens[
            len(result.sample.tokens) - result.sample.response_length :
        ].tolist()
        yield from sample_page(result.sample, texts(run, tokens))
    if wanted.tensors is not None:
        yield f"tensors: {wanted.tensors}"


def texts(run: RecordedRun, tokens: list[int]) -> list[str]:
    """Return the text of each token, by the tokenizer of the run; empty if it cannot be read."""
    from slime.data.tokenizers import load_tokenizer

    trusted = bool(run.args.trust_remote_code)
    try:
        tokenizer = load_tokenizer(str(run.args.hf_checkpoint), trust_remote_code=trusted)
    except (OSError, ValueError, KeyError):
        return []
    return [str(tokenizer.decode([token])) for token in tokens]
