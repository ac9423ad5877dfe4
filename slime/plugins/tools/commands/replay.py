"""``slime replay RUN --step N``: compute a training step of a run again, and compare it with the run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slime.cli.errors import CommandError, writing
from slime.observability.regular import shown

if TYPE_CHECKING:
    from slime.plugins.tools.replay.recorded import RecordedRun
    from slime.plugins.tools.replay.step import Replayed, Wanted


@dataclass(frozen=True)
class ReplayOptions:
    """The options of the command. ``flags`` are flags of train.py that replace settings of the run."""

    step: int
    through: bool
    sample: int | None
    tensors: Path | None
    tolerance: float | None
    as_json: bool
    flags: Sequence[str]
    run_its_code: bool = False


def replay(folder: Path, options: ReplayOptions) -> int:
    """Replay a step and print the comparison.

    Returns:
        0 if the step is the recorded one (within the tolerance), otherwise 1.

    Raises:
        CommandError: The step cannot be replayed, or a training rank failed.
    """
    from slime.config.hooks import SAFE_PATH
    from slime.observability.debug_data import DebugDataError
    from slime.plugins.tools.local_ranks import RankError
    from slime.plugins.tools.replay.recorded import ReplayError, read_run
    from slime.plugins.tools.replay.step import Wanted, replay_step

    folder = folder.resolve()
    tensors = options.tensors.absolute() if options.tensors is not None else None
    wanted = Wanted(options.step, options.through, options.sample, tensors, options.tolerance)
    added = SAFE_PATH.keys() - os.environ.keys()
    os.environ.update(SAFE_PATH)  # also for the processes that libraries start
    try:
        run = read_run(folder, options.step, options.flags, _tell if options.run_its_code else None)
        if run.unrecorded:
            names = shown(", ".join(run.unrecorded))
            print(f"slime replay: the values of {names} are not recorded: pass --train-env-vars", file=sys.stderr)
        if tensors is not None:
            with writing(f"--tensors {options.tensors}"):
                tensors.mkdir(parents=True, exist_ok=True)
        result = replay_step(run, wanted)
        _show(result, wanted, options.as_json, run)
    except (ReplayError, RankError, DebugDataError) as error:
        raise CommandError(str(error)) from error
    finally:
        for name in added:
            del os.environ[name]
    return int(not result.equal)


def _tell(lines: Sequence[str]) -> None:
    for line in lines:
        print(f"slime replay: runs {shown(line)}", file=sys.stderr)


def _show(result: Replayed, wanted: Wanted, as_json: bool, run: RecordedRun) -> None:
    from slime.plugins.tools.replay.page import page, sample_page

    if as_json:
        values = asdict(result) | {"equal": result.equal, "first": result.first}
        print(json.dumps(values, indent=2, default=_plain))
        return
    for line in page(result):
        print(shown(line))
    if result.sample is not None:
        tokens = result.sample.tokens[len(result.sample.tokens) - result.sample.response_length :].tolist()
        for line in sample_page(result.sample, texts(str(run.args.hf_checkpoint), run.args.trust_remote_code, tokens)):
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
