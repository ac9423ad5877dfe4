"""Coming over from other frameworks: ``slime translate``, checkpoints of Megatron-LM, and names of
older releases.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from slime.registry import register

if TYPE_CHECKING:
    from slime.config.args import Args


def parts() -> None:
    """Register the subcommand, the reader with its check, the flags of Megatron-LM, and what older
    releases had.
    """
    register("other flags", "megatron_lm", "slime.plugins.compat.megatron_lm_flags:find")
    register("command", "translate", "slime.plugins.compat:add_translate")
    register("missing flag", "older", "slime.plugins.compat.older:why_missing")
    register("check", "older releases", "slime.plugins.compat.older:tell")
    named = ("load", "ref_load", "opd_teacher_load")
    register("check", "megatron_lm", "slime.plugins.compat:check_megatron_lm", when=named)
    register("checkpoint", "megatron_lm", "slime.plugins.compat.megatron_lm:MegatronLmWeights")


def add_translate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    translate = commands.add_parser(
        "translate",
        help="print the command for a launch script of slime 0.3, verl, OpenRLHF, TRL or prime-rl, "
        "and what changes",
        usage="slime translate SCRIPT.sh | slime translate -- COMMAND ...",
        description="Reads a bash script without running it, or the words of a command.",
        allow_abbrev=False,
    )
    translate.add_argument("words", nargs=argparse.REMAINDER, help="a script, or a command")
    translate.set_defaults(run=_translate, takes_flags=True)


def _translate(args: argparse.Namespace) -> int:
    from slime.plugins.compat.translate import translate

    return translate([*args.words, *args.rest])


def check_megatron_lm(args: Args) -> list[str]:
    """Check that the checkpoints of Megatron-LM have all tensors of the model, in the shapes of
    ``--hf-checkpoint``.
    """
    from slime.config.hf_config import read_config
    from slime.config.run import megatron_lm_folder
    from slime.models.shards import ModelError

    named = {
        "--load": (args.load, args.ckpt_step),
        "--ref-load": (args.ref_load, args.ref_ckpt_step),
    }
    named["--opd-teacher-load"] = (args.opd_teacher_load, None)
    folders = {
        option: str(folder)
        for option, (path, step) in named.items()
        if (folder := megatron_lm_folder(path, step))
    }
    if not folders or args.debug_rollout_only:
        return []
    if args.lora_rank:
        return [
            f"{option} {path}: --lora-rank needs a base with a Hugging Face folder, but "
            "Megatron-LM wrote this one: convert it with tools/convert_torch_dist_to_hf.py and "
            "pass the result as --hf-checkpoint"
            for option, path in folders.items()
        ]
    if "--load" in folders:
        args.notices.append(
            f"--load {folders['--load']}: only the weights are read from this checkpoint of "
            "Megatron-LM. Its optimizer, random states and position in the data are not, so the "
            "run starts with its first rollout"
        )
    if args.hf_checkpoint is None or read_config(args.hf_checkpoint) is None:
        return []  # a hub id that is not here yet: the trainer compares them
    from slime.weights.torch_dist import differing_shapes, open_megatron_lm

    problems = []
    for option, path in folders.items():
        try:
            weights = open_megatron_lm(
                path, args.hf_checkpoint, args.model_name, args.trust_remote_code
            )
            assert weights is not None, "the folder was found above"
            problems += [
                f"{option}: {text}" for text in differing_shapes(weights, args.hf_checkpoint)
            ]
        except ModelError as error:
            problems.append(f"{option}: {error}")
    return problems
