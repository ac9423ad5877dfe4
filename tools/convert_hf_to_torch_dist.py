#!/usr/bin/env python3
"""Hugging Face folder → Megatron weights (torch_dist), on CPU or GPU machines; Megatron itself is
not needed.

    source scripts/models/qwen3-4B.sh
    python tools/convert_hf_to_torch_dist.py "${MODEL_ARGS[@]}" --hf-checkpoint Qwen3-4B --save Qwen3-4B_torch_dist

    torchrun --nproc-per-node 8 tools/convert_hf_to_torch_dist.py ...     # large models: ranks share the work

MODEL_ARGS are compared with config.json, and its model with the tensors of the checkpoint.
Quantized checkpoints (FP8, INT4 of compressed-tensors, MXFP4) are dequantized. Any parallel layout
reads the result (``--ref-load``, ``--load``); flags of a layout are accepted and change nothing.
``--override FILE`` is read as by train.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    from slime.config.parser import read_settings
    from slime.models.checked import require_tied
    from slime.models.loading import ModelError, check_checkpoint
    from slime.plugins.megatron import flags, torch_dist
    from slime.plugins.megatron.config import merged_settings
    from slime.plugins.megatron.maps.family import family_of, text_config
    from slime.weights.hf_folder import HfFolder

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hf-checkpoint", required=True, help="Hugging Face folder or hub id")
    parser.add_argument("--save", required=True, type=Path, help="folder to write")
    parser.add_argument("--model-name", help="model family, if not that of config.json")
    parser.add_argument("--trust-remote-code", action="store_true")
    options, rest = parser.parse_known_args()
    args, problems = read_settings([*rest, "--hf-checkpoint", options.hf_checkpoint])
    if problems:
        parser.error("; ".join(problems))
    flags.resolve(args)
    checkpoint = str(args.hf_checkpoint)  # an --override may name another
    config = text_config(checkpoint, options.trust_remote_code)
    family = family_of(config, options.model_name)
    settings = merged_settings(args.megatron, checkpoint, family, config)
    rank, ranks = torch_dist.join_launched_ranks()
    try:
        folder = HfFolder(checkpoint)
        notices = check_checkpoint(folder.folder, options.trust_remote_code)
        require_tied(notices, "Megatron")
    except ModelError as error:
        parser.error(str(error))
    if rank == 0 and notices:
        print("\n".join(f"{checkpoint} {notice}" for notice in notices), file=sys.stderr)
    torch_dist.convert_from_hf(folder, family, settings, options.save)
    if rank == 0:
        print(
            f"{options.save}: {family.name}, {settings['num_layers']} layers, written by {ranks} "
            "process(es)"
        )


if __name__ == "__main__":
    main()
