"""Which checkpoint a run starts from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slime.config.hf_config import megatron_folder
from slime.config.megatron_checkpoint import megatron_lm_folder, weights_path

if TYPE_CHECKING:
    from slime.config.args import Args


@dataclass(frozen=True)
class InitialWeights:
    """The checkpoints that the flags name. Of a folder that Megatron-LM wrote, it is the folder of one iteration."""

    load: str | None
    ref_load: str | None
    hf_checkpoint: str

    @classmethod
    def from_args(cls, args: Args) -> InitialWeights:
        assert args.hf_checkpoint is not None, "the checks of the flags require it"
        load, ref_load = weights_path(args.load, args.ckpt_step), weights_path(args.ref_load, args.ref_ckpt_step)
        return cls(load, ref_load, args.hf_checkpoint)

    def hf_folder(self) -> str:
        """Return the Hugging Face checkpoint that has the configuration of the initial weights."""
        return self.load if self.load and (Path(self.load) / "config.json").is_file() else self.hf_checkpoint

    def path(self, megatron: bool) -> str:
        """Return the checkpoint of the initial weights.

        It is ``--load`` if it has weights, otherwise ``--ref-load`` if it is a Megatron checkpoint, otherwise
        ``--hf-checkpoint``. A snapshot is loaded later.

        Args:
            megatron: Whether the backend is Megatron, which also reads slime's own Megatron checkpoints.
        """
        names = ("config.json", "trainer.json") if megatron else ("config.json",)
        if self.load and (megatron_lm_folder(self.load) or any((Path(self.load) / name).is_file() for name in names)):
            return self.load
        if self.ref_load and (megatron_lm_folder(self.ref_load) or (megatron and megatron_folder(self.ref_load))):
            return self.ref_load
        return self.hf_checkpoint
