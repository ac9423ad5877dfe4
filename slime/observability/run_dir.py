"""The folder of a run, ``<output-dir>/<run name>/``, and the link ``<output-dir>/latest`` to the
newest run.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slime.config.settings import redacted
from slime.observability.files import MOST_SETTINGS, parse_settings, regular
from slime.types import JsonObject

if TYPE_CHECKING:
    from slime.config.args import Args


class RunDirError(OSError):
    """Raised if the folder of the run cannot be created. The message names the folder."""


class UnreadableRun(ValueError):
    """Raised if ``config.yaml`` of a run cannot be read. The message names the file and the
    reason.
    """


class _Inside:
    """An attribute of :class:`RunDir`: the path of a file or folder in the folder of the run."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: RunDir, kind: type[RunDir]) -> Path:
        return run.path / self.name


@dataclasses.dataclass(frozen=True)
class RunDir:
    """The paths of one run. The driver calls :meth:`create` once; other processes use
    ``RunDir(path)``.
    """

    path: Path

    config = _Inside("config.yaml")
    attempts = _Inside("attempts.jsonl")
    weights = _Inside("weights.jsonl")
    metrics = _Inside("metrics.jsonl")
    tensorboard = _Inside("tensorboard")
    samples = _Inside("samples")
    traces = _Inside("traces")
    checkpoints = _Inside("checkpoints")
    logs = _Inside("logs")
    ledger = _Inside("ledger.jsonl")
    engines = _Inside("engines.jsonl")
    summary = _Inside("summary.json")
    reward_curve = _Inside("reward_curve.png")

    @staticmethod
    def parent_of_runs(output_dir: str | None) -> Path:
        return Path(output_dir or "outputs").expanduser().resolve()

    @classmethod
    def create(cls, args: Args, resume: bool = False) -> RunDir:
        """Create the folder of a run and write the resolved config to it.

        The name is ``--run-name``. If the folder contains an earlier run, that one is renamed to
        ``<name>.1``, ``.2``, and so on, unless this run resumes it or loads from it.

        Raises:
            RunDirError: The folder cannot be written.
        """
        import yaml

        root = cls.parent_of_runs(args.output_dir)
        run = cls(root / args.run_name)
        try:
            # A run that loads from this folder without resuming it still needs its snapshots at
            # their paths.
            if not resume and not _inside(args.load, run.path):
                _move_aside(run.path)
            for folder in (run.tensorboard, run.samples, run.traces, run.logs):
                folder.mkdir(parents=True, exist_ok=True)
            text = yaml.safe_dump(public_settings(vars(args)), sort_keys=True, allow_unicode=True)
            _replace(run.config, text)
            _link(root / "latest", args.run_name)
        except OSError as error:
            raise RunDirError(
                f"cannot write the run folder {run.path}: {error.strerror or error}; use another "
                "--output-dir") from error  # fmt: skip
        return run


def public_settings(values: Mapping[str, object]) -> dict[str, object]:
    """Return arguments by name without secrets, in types that YAML and W&B can store."""
    return {key: plain(redacted(key, value)) for key, value in values.items()}


def plain(value: object) -> object:
    """Convert a value to types that YAML can store. Other objects are converted to text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return str(value)


def read_settings(path: Path) -> JsonObject:
    """Return the settings in the ``config.yaml`` of a run.

    Raises:
        UnreadableRun: The file cannot be read, or is not a mapping in YAML.
    """
    import yaml

    try:
        settings = parse_settings(regular(path, MOST_SETTINGS).read_text(encoding="utf-8"))
    except OSError as error:
        raise UnreadableRun(f"{path} cannot be read: {error.strerror or error}") from error
    # PyYAML raises a ValueError for an impossible date
    except (yaml.YAMLError, ValueError) as error:
        raise UnreadableRun(
            f"{path} is not valid YAML in UTF-8: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(settings, dict):
        raise UnreadableRun(f"{path} is not a mapping of flags to values")
    return {str(name): value for name, value in settings.items()}


def _inside(file: str | None, folder: Path) -> bool:
    return bool(file) and Path(str(file)).expanduser().resolve().is_relative_to(folder)


def _move_aside(path: Path) -> None:
    if not (path / "config.yaml").exists():
        return
    # The oldest run keeps the smallest number, so that names in notes stay right.
    number = 1
    while path.with_name(f"{path.name}.{number}").exists():
        number += 1
    path.rename(path.with_name(f"{path.name}.{number}"))


def _link(link: Path, target: str) -> None:
    """Let the link point to this run. A real folder with the name of the link is not replaced."""
    if link.exists() and not link.is_symlink():
        return
    # A link cannot be changed in place; a rename replaces it at once.
    temporary = link.with_name(f".latest.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target, target_is_directory=True)
    temporary.replace(link)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    # Only this user may read the file: it may contain a secret whose name is_secret does not
    # recognize.
    with open(
        os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
    ) as file:
        file.write(text)
    temporary.replace(path)
