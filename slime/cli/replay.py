"""``slime replay RUN --step N``: compute a training step of a run again, and compare it with the run."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slime.cli.errors import CommandError, writing

if TYPE_CHECKING:
    from slime.replay.step import Replayed, Wanted


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


def replay(folder: Path, options: ReplayOptions) -> int:
    """Replay a step and print the comparison.

    Returns:
        0 if the step is the recorded one (within the tolerance), otherwise 1.

    Raises:
        CommandError: The step cannot be replayed, or a training rank failed.
    """
    from slime.cluster.local_ranks import RankError
    from slime.observability.debug_data import DebugDataError
    from slime.replay.recorded import ReplayError, attempt_of, attempts_of, read_run
    from slime.replay.step import Wanted, replay_step

    folder = folder.resolve()
    tensors = options.tensors.absolute() if options.tensors is not None else None
    wanted = Wanted(options.step, options.through, options.sample, tensors, options.tolerance)
    try:
        if (folder / "attempts.jsonl").is_file():
            # The relative paths of the settings refer to the directory in which the run was started.
            started = Path(attempt_of(attempts_of(folder), options.step).settled.working_directory)
            if started.is_dir():
                os.chdir(started)
        run = read_run(folder, options.step, options.flags)
        if tensors is not None:
            with writing(f"--tensors {options.tensors}"):
                tensors.mkdir(parents=True, exist_ok=True)
        result = replay_step(run, wanted)
    except (ReplayError, RankError, DebugDataError) as error:
        raise CommandError(str(error)) from error
    _show(result, wanted, options.as_json, folder)
    return int(not result.equal)


def _show(result: Replayed, wanted: Wanted, as_json: bool, folder: Path) -> None:
    from slime.replay.page import page, sample_page

    if as_json:
        values = asdict(result) | {"equal": result.equal, "first": result.first}
        print(json.dumps(values, indent=2, default=_plain))
        return
    for line in page(result):
        print(line)
    if result.sample is not None:
        tokens = result.sample.tokens[len(result.sample.tokens) - result.sample.response_length :].tolist()
        for line in sample_page(result.sample, _texts(folder, tokens)):
            print(line)
    if wanted.tensors is not None:
        print(f"tensors: {wanted.tensors}")


def _texts(folder: Path, tokens: list[int]) -> list[str]:
    """Return the text of each token, by the tokenizer of the run; empty if it cannot be read."""
    from slime.data.tokenizers import load_tokenizer
    from slime.observability.run_dir import RunDir, read_settings

    try:
        settings = read_settings(RunDir(folder).config)
        remote = bool(settings["trust_remote_code"])
        tokenizer = load_tokenizer(str(settings["hf_checkpoint"]), trust_remote_code=remote)
    except (OSError, ValueError, KeyError):
        return []
    return [str(tokenizer.decode([token])) for token in tokens]


def _plain(value: object) -> object:
    import torch

    return value.tolist() if isinstance(value, torch.Tensor) else str(value)
