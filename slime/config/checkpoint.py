"""Which checkpoint a run starts from, and how it is found in a folder that Megatron-LM wrote with
``--ckpt-format torch_dist``. Imports no torch.

Such a folder has a tracker file and a folder per iteration::

    X/latest_checkpointed_iteration.txt      "100", or "release" for converted weights
    X/iter_0000100/.metadata, *.distcp, common.pt, metadata.json
    X/release/...

:func:`slime.weights.torch_dist.open_megatron_lm` reads its weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slime.config.hf_config import megatron_folder

if TYPE_CHECKING:
    from slime.config.args import Args

TRACKER = "latest_checkpointed_iteration.txt"
_OF_SLIME = ("manifest.json", "trainer.json", "actor")


def megatron_lm_folder(path: str | None, step: int | None = None) -> Path | None:
    """Return the folder of a checkpoint of Megatron-LM whose weights can be read; None if there is
    none.

    Args:
        path: The folder with the tracker file, or the folder of one iteration (``.metadata`` and
            ``*.distcp``).
        step: The iteration to select. Default: that of the tracker file, or the newest one if there
            is no such file.
    """
    folder = Path(path).expanduser() if path is not None else None
    if folder is None or not folder.is_dir() or (folder / "config.json").is_file():
        return None
    if _is_readable(folder):
        return folder
    return next((chosen for chosen in _candidates(folder, step) if _is_readable(chosen)), None)


def is_foreign_megatron(folder: Path) -> bool:
    """Whether Megatron-LM wrote a folder, in any of its formats: a tracker file, or tensors of
    ``torch_dist``.
    """
    return (folder / TRACKER).is_file() or any(
        next(place.glob("*.distcp"), None) is not None
        for place in (folder, *folder.glob("iter_*"), folder / "release")
    )


def weights_path(path: str | None, step: int | None = None) -> str | None:
    """Return the folder of an iteration (:func:`megatron_lm_folder`), or ``path`` if it is
    something else.
    """
    found = megatron_lm_folder(path, step)
    return path if found is None else str(found)


def _candidates(folder: Path, step: int | None) -> list[Path]:
    if step is not None:
        return [folder / f"iter_{step:07d}"]
    tracker = folder / TRACKER
    named = tracker.read_text(errors="replace").strip() if tracker.is_file() else None
    if named is None:
        return [*sorted(folder.glob("iter_*"), reverse=True), folder / "release"]
    return [folder / (f"iter_{int(named):07d}" if named.isdecimal() else "release")]


def _is_readable(folder: Path) -> bool:
    """Whether a folder has an index and tensors of ``torch_dist``, and slime did not write it."""
    if any((folder / name).exists() for name in _OF_SLIME) or not (folder / ".metadata").is_file():
        return False
    return next(folder.glob("*.distcp"), None) is not None


@dataclass(frozen=True)
class InitialWeights:
    """The checkpoints that the flags name. Of a folder that Megatron-LM wrote, it is the folder of
    one iteration.
    """

    load: str | None
    ref_load: str | None
    hf_checkpoint: str

    @classmethod
    def from_args(cls, args: Args) -> InitialWeights:
        assert args.hf_checkpoint is not None, "the checks of the flags require it"
        load = weights_path(args.load, args.ckpt_step)
        ref_load = weights_path(args.ref_load, args.ref_ckpt_step)
        return cls(load, ref_load, args.hf_checkpoint)

    def hf_folder(self) -> str:
        """Return the Hugging Face checkpoint that has the configuration of the initial weights."""
        return (
            self.load
            if self.load and (Path(self.load) / "config.json").is_file()
            else self.hf_checkpoint
        )

    def path(self, megatron: bool) -> str:
        """Return the checkpoint of the initial weights.

        It is ``--load`` if it has weights, otherwise ``--ref-load`` if it is a Megatron checkpoint,
        otherwise ``--hf-checkpoint``. A snapshot is loaded later.

        Args:
            megatron: Whether the backend is Megatron, which also reads slime's own Megatron
                checkpoints.
        """
        # FSDP cannot read the tensors of the Megatron backend.
        names = ("config.json", "trainer.json") if megatron else ("config.json",)
        if self.load and (
            megatron_lm_folder(self.load)
            or any((Path(self.load) / name).is_file() for name in names)
        ):
            return self.load
        if self.ref_load and (
            megatron_lm_folder(self.ref_load) or (megatron and megatron_folder(self.ref_load))
        ):
            return self.ref_load
        return self.hf_checkpoint
