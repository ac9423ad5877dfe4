"""The tokens of a sample with what the engine and the trainer computed for each: read from the
dumps of a run.

A run writes these only with ``--save-debug-train-data`` or ``--save-debug-rollout-data``, which
``--dump-details`` both sets. Each file is read when the first of its samples is shown, and the
newest one is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, Protocol

from ..summary import find_dump

MOST_BYTES = 2 << 30
MOST_TOKENS = 20_000
"""Of one sample; later ones are not shown."""
_CONTEXT = 6
ENGINE_ONLY = (
    "The trainer's side was not recorded: --save-debug-train-data or --dump-details records it."
)
NO_DUMP = (
    "This run did not record its tokens: --dump-details FOLDER records them (ids, log-probs, "
    "mask, advantages)."
)
NO_TRAINER = (
    "The trainer's log-probs are not in the dump: a run that makes one optimizer step per "
    "rollout uses those of the loss and keeps none. With --num-steps-per-rollout 2 or more, or "
    "with --get-mismatch-metrics and a --custom-tis-function-path, it recomputes and records "
    "them."
)


class Decoder(Protocol):
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class TokenDumps:
    """The dumps of one run. It is thread-safe.

    Args:
        folder: The folder of the run.
        settings: Its ``config.yaml``.
    """

    def __init__(self, folder: Path, settings: Mapping[str, object]) -> None:
        self.folder = folder
        self.settings = settings
        self._lock = threading.Lock()
        self._loaded: tuple[Path, int, list[dict[str, Any]]] | None = None
        self._decoder: Decoder | None = None
        self._looked = False

    def sample(self, step: int, index: int) -> dict[str, object]:
        """Return the tokens of the sample with ``Sample.index`` ``index``.

        Returns:
            ``notes`` (what was not recorded, and which flag records it) and, unless nothing was,
            ``ids``, ``texts`` and ``prompt`` (number of prompt tokens), and ``columns``: for each
            recorded quantity one number per token of the response, with its meaning in
            ``meanings``.
        """
        with self._lock:
            try:
                dumped = self._find("save_debug_train_data", "sample_indices", step, index)
                if dumped is not None:
                    notes = [] if "log_probs" in dumped else [NO_TRAINER]
                    notes += (
                        []
                        if "rollout_log_probs" in dumped
                        else ["The engine's log-probs were not recorded."]
                    )
                    return self._shown(dumped, notes)
                dumped = self._find("save_debug_rollout_data", "index", step, index)
                if dumped is not None:
                    # The attributes of a sample, which a batch has under other names.
                    names = {
                        "tokens": "tokens",
                        "response_length": "response_lengths",
                        "loss_mask": "loss_masks",
                    }
                    names |= {name: name for name in ("rollout_log_probs", "teacher_log_probs")}
                    return self._shown(
                        {names[name]: dumped.get(name) for name in names}, [ENGINE_ONLY]
                    )
                return {"notes": [self._reason(step)]}
            except (ValueError, OSError) as error:
                return {"notes": [str(error)]}
            except (LookupError, TypeError, AttributeError, OverflowError) as error:
                return {
                    "notes": [
                        f"The dump of this step is damaged ({type(error).__name__}: {error})."
                    ]
                }

    def recorded(self, step: int) -> bool:
        """Return whether there is a dump of a step."""
        return any(
            self._path(flag, step) for flag in ("save_debug_train_data", "save_debug_rollout_data")
        )

    def _reason(self, step: int) -> str:
        if not self.settings.get("save_debug_train_data") and not self.settings.get(
            "save_debug_rollout_data"
        ):
            return NO_DUMP
        if self.recorded(step):
            return "The dump of this step does not have this sample: it was not trained."
        return (
            f"The dump of step {step} is not where config.yaml names it; it may have been moved "
            "or removed."
        )

    def _path(self, flag: str, step: int) -> Path | None:
        return find_dump(self.settings.get(flag), self.folder, self.settings.get("run_name"), step)

    def _find(self, flag: str, key: str, step: int, index: int) -> dict[str, Any] | None:
        path = self._path(flag, step)
        samples = self._load(path) if path is not None else ()
        return next(
            (one for one in samples if isinstance(one.get(key), int) and one[key] == index), None
        )

    def _load(self, path: Path) -> list[dict[str, Any]]:
        from slime.data.plain_values import load_plain

        # Dumps are large, and a reader goes from sample to sample of one step.
        status = path.stat()
        if self._loaded is not None and self._loaded[:2] == (path, status.st_mtime_ns):
            return self._loaded[2]
        if status.st_size > MOST_BYTES:
            raise ValueError(
                f"{path} has {status.st_size >> 20} MiB; the page reads dumps up to "
                f"{MOST_BYTES >> 20} MiB"
            )
        dump = load_plain(path)
        samples = dump.get("samples") if isinstance(dump, dict) else None
        if not isinstance(samples, list):
            raise ValueError(f"{path} is not a dump of a rollout")
        self._loaded = path, status.st_mtime_ns, samples
        return samples

    def _shown(self, sample: Mapping[str, Any], notes: list[str]) -> dict[str, object]:
        """Return the tokens of a sample, whose entries have the public names of a batch's."""
        from slime.data.fields import FIELDS

        # The tokens with their texts.
        ids = [int(token) for token in _numbers(sample["tokens"])]
        length = int(sample["response_lengths"])
        shown = ids[:MOST_TOKENS]
        decoder = self._tokenizer()
        if decoder is None:
            notes.append(
                "The tokenizer is not on this machine, so that tokens are shown as their ids."
            )
        if len(ids) > MOST_TOKENS:
            notes.append(f"Only the first {MOST_TOKENS} of {len(ids)} tokens are shown.")
        texts = pieces(decoder, shown) if decoder is not None else [f"⟨{token}⟩" for token in shown]
        # What was computed for each token of the response. A damaged dump may have columns of other
        # lengths.
        columns: dict[str, list[float | None]] = {}
        meanings: dict[str, str] = {}
        for field in FIELDS:
            name = field.name
            if field.per == "response token" and sample.get(name) is not None:
                values = _numbers(sample[name])
                if len(values) == length:
                    finite = [
                        float(f"{value:.5g}") if abs(value) < inf else None
                        for value in values[:MOST_TOKENS]
                    ]
                    columns[name] = finite
                    meanings[name] = field.meaning
        prompt = min(len(ids) - length, len(shown))
        return {
            "ids": shown, "texts": texts, "prompt": prompt, "columns": columns, "meanings": meanings, "notes": notes
        }  # fmt: skip

    def _tokenizer(self) -> Decoder | None:
        if not self._looked:
            self._looked = True
            self._decoder = _decoder_in(self._tokenizer_folders())
        return self._decoder

    def _tokenizer_folders(self) -> list[Path]:
        folders = []
        # The dump has a copy of the tokenizer; the model itself may be gone.
        details = self.settings.get("dump_details")
        model = self.settings.get("hf_checkpoint")
        if isinstance(details, str):
            name = Path(details).name
            folders += [Path(details) / "tokenizer", self.folder / name / "tokenizer"]
        if isinstance(model, str):
            folders.append(Path(model).expanduser())
        return folders


def _decoder_in(folders: Sequence[Path]) -> Decoder | None:
    for folder in folders:
        if (folder / "tokenizer.json").is_file():
            from tokenizers import Tokenizer

            decoder: Decoder = Tokenizer.from_file(str(folder / "tokenizer.json"))
            return decoder
    return None


def pieces(decoder: Decoder, ids: Sequence[int]) -> list[str]:
    """Return the text of each token. A character of several tokens stands at the last of them."""
    # A token alone may decode to other text than in its place (spaces, parts of characters).
    texts: list[str] = []
    start = 0  # first token whose text is not yet given out
    for end in range(1, len(ids) + 1):
        context = ids[max(start - _CONTEXT, 0) : start]
        before = decoder.decode(context, skip_special_tokens=False) if context else ""
        text = decoder.decode([*context, *ids[start:end]], skip_special_tokens=False)[len(before) :]
        if text.endswith("\ufffd") and end - start < 4 and end < len(ids):
            texts.append("")  # part of a character
        else:
            texts.append(text)
            start = end
    return texts


def _numbers(column: object) -> list[float]:
    """Return a tensor, an array or a list as numbers."""
    if hasattr(column, "tolist"):
        column = column.tolist()
    return list(column) if isinstance(column, list | tuple) else []
