"""The check of checkpoints that Megatron-LM wrote, before a run starts. torch is imported only if there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.config.hf_config import read_config
from slime.config.megatron_checkpoint import megatron_lm_folder
from slime.models.shards import ModelError

if TYPE_CHECKING:
    from slime.config.args import Args


def check_megatron_lm(args: Args) -> list[str]:
    """Check that the checkpoints of Megatron-LM have all tensors of the model, in the shapes of ``--hf-checkpoint``."""
    named = {"--load": (args.load, args.ckpt_step), "--ref-load": (args.ref_load, args.ref_ckpt_step)}
    named["--opd-teacher-load"] = (args.opd_teacher_load, None)
    found = {
        option: str(folder) for option, (path, step) in named.items() if (folder := megatron_lm_folder(path, step))
    }
    if not found or args.debug_rollout_only:
        return []
    if args.lora_rank:
        return [
            f"{option} {path}: --lora-rank needs a base with a Hugging Face folder, but Megatron-LM wrote this one: "
            "convert it with tools/convert_torch_dist_to_hf.py and pass the result as --hf-checkpoint"
            for option, path in found.items()
        ]
    if "--load" in found:
        args.notices.append(
            f"--load {found['--load']}: only the weights are read from this checkpoint of Megatron-LM. Its optimizer, "
            "random states and position in the data are not, so the run starts with its first rollout"
        )
    if args.hf_checkpoint is None or read_config(args.hf_checkpoint) is None:
        return []  # a hub id that is not here yet: the trainer compares them
    from slime.plugins.compat.megatron.checkpoints import differing_shapes, open_megatron_lm

    problems = []
    for option, path in found.items():
        try:
            weights = open_megatron_lm(path, args.hf_checkpoint, args.model_name, args.trust_remote_code)
            assert weights is not None, "the folder was found above"
            problems += [f"{option}: {text}" for text in differing_shapes(weights, args.hf_checkpoint)]
        except ModelError as error:
            problems.append(f"{option}: {error}")
    return problems
