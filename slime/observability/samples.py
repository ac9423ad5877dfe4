"""Write the texts of every rollout as JSONL, and select a few of them for the terminal."""

from __future__ import annotations

import contextlib
import json
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from slime.config.observability import log_samples_count
from slime.data.sample import Nested, Sample, flatten
from slime.observability.files import MOST_BYTES, best_effort, parse_json, regular, replacing, shown

if TYPE_CHECKING:
    from slime.config.observability import ObservabilityConfig

T = TypeVar("T")
_SPECIAL = re.compile(r"<[|｜][^<>]{1,40}[|｜]>")
_USER_TURN = re.compile(
    r"<[|｜](?:im_start[|｜]>user|user[|｜]>|User[|｜]>)\s*(.*?)(?=<[|｜]|$)", re.DOTALL
)
_NUMBERED = re.compile(r"(?P<kind>.+)_(?P<number>\d+)(?:\.\w+)+")
Reward = float | dict[str, object] | None
COMPRESSED = ".zst"
_ZSTD_LEVEL = 3
_PIECE = 4 * 2**20


@dataclass(frozen=True)
class KeptTexts:
    """Settings for the files of texts.

    Attributes:
        count: Number of samples of each rollout, and of each data set of an evaluation. None: all.
            0: no files.
        last: Number of files of each kind to keep; older ones are deleted. None: all.
        compressed: Whether files are compressed as ``.jsonl.zst``.
    """

    count: int | None = None
    last: int | None = None
    compressed: bool = False

    @classmethod
    def of(cls, flags: ObservabilityConfig) -> KeptTexts:
        return cls(log_samples_count(flags.log_samples), flags.log_keep_last, flags.log_compress)

    def chosen(self, samples: list[T]) -> list[T]:
        """Select ``count`` samples at even distances, so that each run selects the same
        positions.
        """
        if self.count is None or len(samples) <= self.count:
            return samples
        return [samples[i * len(samples) // self.count] for i in range(self.count)]


def write_samples(
    run_dir: Path,
    rollout_id: int,
    samples: Nested,
    kind: str = "rollout",
    kept: KeptTexts | None = None,
) -> Path | None:
    """Write ``<run>/samples/<kind>_<rollout_id>.jsonl`` with one sample per line. It replaces an
    older file.

    If the file cannot be written, this is logged and the run continues.

    Args:
        run_dir: Folder of the run.
        samples: Flat, or nested as groups.
        kind: ``rollout`` or ``eval-<data set>``.
        kept: Which samples and files to keep. Default: all.

    Returns:
        The path of the file; None if no file is to be written.
    """
    # A resumed run may have another --log-compress, so that a file of this name can exist in both
    # forms.
    kept = kept or KeptTexts()
    if kept.count == 0:
        return None
    name = f"{kind.replace('/', '-')}_{rollout_id:06d}.jsonl"
    plain = Path(run_dir) / "samples" / name
    packed = plain.with_name(name + COMPRESSED)
    path, other = (packed, plain) if kept.compressed else (plain, packed)
    with best_effort("the texts of samples"):
        with replacing(path) as temporary, _writer(temporary, kept.compressed) as write:
            for sample in kept.chosen(flatten(samples)):
                # UTF-8 cannot encode a lone surrogate. backslashreplace writes it as \udXXX, which
                # is valid JSON.
                write(
                    (_line(sample_record(sample, rollout_id)) + "\n").encode(
                        "utf-8", "backslashreplace"
                    )
                )
        other.unlink(missing_ok=True)  # written by an interrupted run with another --log-compress
        if kept.last is not None:
            remove_older(path, kept.last)
    return path


@contextlib.contextmanager
def _writer(path: Path, compressed: bool) -> Iterator[Callable[[bytes], int]]:
    with path.open("wb") as file:
        if not compressed:
            yield file.write
            return
        import zstandard

        compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True)
        with compressor.stream_writer(file, closefd=False) as stream:
            yield stream.write


def unpacked(path: Path) -> bytes:
    """Return the content of a compressed file.

    Raises:
        ValueError: The file is damaged, or its content is larger than :data:`MOST_BYTES`.
    """
    import zstandard

    content = bytearray()
    try:
        # The size before compression is not known, and the file may come from somebody else: read
        # it piece by piece.
        with (
            regular(path).open("rb") as raw,
            zstandard.ZstdDecompressor().stream_reader(raw) as packed,
        ):
            while piece := packed.read(_PIECE):
                content += piece
                if len(content) > MOST_BYTES:
                    raise ValueError(
                        f"{path} has more than {MOST_BYTES / 2**30:g} GiB of text: it is not read"
                    )
    except zstandard.ZstdError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return bytes(content)


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a file that :func:`write_samples` wrote, compressed or not.

    Raises:
        ValueError: The file is damaged or too large.
    """
    text = (
        regular(path).read_text(encoding="utf-8")
        if path.suffix != COMPRESSED
        else unpacked(path).decode("utf-8")
    )
    # Not splitlines(): it also splits at separators such as U+2028, which texts can contain.
    return [parse_json(line) for line in text.split("\n") if line]


def sample_files(run_dir: Path, kind: str = "*") -> dict[str, Path]:
    """Return the files of ``<run>/samples/`` by their name without suffix, in alphabetical order.

    Args:
        kind: A glob pattern, such as ``rollout`` or ``eval-*``.
    """
    found = {}
    for path in Path(run_dir, "samples").glob(f"{kind}_*.jsonl*"):
        if path.name.endswith((".jsonl", ".jsonl" + COMPRESSED)) and not path.name.startswith("."):
            found[path.name.partition(".jsonl")[0]] = path
    return dict(sorted(found.items()))


def remove_older(path: Path, last: int) -> None:
    """Delete old files ``<kind>_<number>.<suffix>`` of the same kind as ``path`` in its folder.

    Of the files with a number up to that of ``path``, the newest ``last`` are kept. Files with
    larger numbers, which an interrupted run wrote, are not touched."""
    name = _NUMBERED.fullmatch(path.name)
    assert name is not None, path
    # Numbers decide and not the times of files: a resumed run writes older numbers again.
    found = []
    for other in path.parent.iterdir():
        match = _NUMBERED.fullmatch(other.name)
        if match and match["kind"] == name["kind"] and int(match["number"]) <= int(name["number"]):
            found.append((int(match["number"]), other))
    for _, old in sorted(found)[:-last]:
        old.unlink(missing_ok=True)


def _line(record: Mapping[str, object]) -> str:
    """Encode a record as JSON. Values of users' functions that JSON cannot represent are written as
    their ``repr``.
    """
    # The quick way first: nearly all records can be written as they are.
    try:
        return json.dumps(record, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(
            {name: _plain(value) for name, value in record.items()}, ensure_ascii=False, default=str
        )


def _plain(value: object) -> object:
    try:
        json.dumps(value, default=str)
    except (TypeError, ValueError, RecursionError):
        return reprlib.repr(value)
    return value


def sample_record(sample: Sample, rollout_id: int) -> dict[str, object]:
    """Return the readable part of a sample, without token ids, log-probs and media."""
    return {
        "rollout": rollout_id,
        "group_index": sample.group_index,
        "index": sample.index,
        "prompt": sample.prompt,
        "response": sample.response,
        "label": sample.label,
        "reward": sample.reward,
        "status": sample.status.value,
        "response_length": sample.response_length,
        "weight_versions": list(sample.weight_versions),
        "version_spans": list(sample.version_spans),
        "metadata": sample.metadata or {},
    }


def preview(samples: Nested, count: int = 2, width: int = 160) -> list[str]:
    """Return one line for each of a few samples, half of them with the best and half with the worst
    rewards.
    """
    # Both ends of the ranking: a mean reward hides what the best and the worst answers look like.
    ranked = sorted(flatten(samples), key=lambda sample: _number(sample.reward), reverse=True)
    chosen = (
        ranked[: (count + 1) // 2] + ranked[len(ranked) - count // 2 :]
        if len(ranked) > count
        else ranked
    )
    return [
        f"reward {_reward(sample.reward)} │ {_short(last_user_text(sample.prompt), width // 2)} → "
        f"{_short(sample.response, width // 2)} │ label {_short(str(sample.label), width // 2)}"
        for sample in chosen
    ]


def _number(reward: Reward) -> float:
    if isinstance(reward, dict):
        # Rewards as dicts have no order of their own, so their first number stands for them.
        numbers = [value for value in reward.values() if isinstance(value, int | float)]
        return float(numbers[0]) if numbers else 0.0
    return float(reward) if isinstance(reward, int | float) else 0.0


def _reward(reward: Reward) -> str:
    return f"{reward:g}" if isinstance(reward, int | float) else _short(str(reward), 80)


def last_user_text(prompt: str | Sequence[Mapping[str, object]]) -> str:
    """Return the last text of the user, from a list of messages or from a rendered chat
    template.
    """
    if isinstance(prompt, str):
        # A rendered prompt: the marks of the common templates show where a user's turn begins and
        # ends.
        turns = _USER_TURN.findall(prompt)
        return str(turns[-1]) if turns else prompt
    texts = [message.get("content") for message in prompt if message.get("role") == "user"]
    return str(texts[-1]) if texts else ""


def _short(text: str, width: int) -> str:
    """Return a text as one line without special tokens. If it is too long, the middle is cut,
    because answers are at the end. Control characters are replaced: the escape codes of a response
    must not reach the terminal."""
    # The longest part of a prompt is often its template, and answers are at the end, so the middle
    # is cut.
    line = " ".join(_SPECIAL.sub(" ", text).split())
    head = (width - 1) // 2
    short = (
        line if len(line) <= width else f"{line[:head]}…{line[len(line) - (width - 1 - head) :]}"
    )
    return shown(short)
