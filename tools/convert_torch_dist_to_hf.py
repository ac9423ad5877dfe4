#!/usr/bin/env python3
"""Megatron weights (torch_dist) → Hugging Face folder, on any machine; Megatron itself is not needed.

    python tools/convert_torch_dist_to_hf.py --input-dir outputs/run/checkpoints/iter_0000099 \
        --output-dir Qwen3-4B-iter99 --origin-hf-dir Qwen3-4B

``--input-dir`` is a snapshot, a folder of snapshots (the newest is taken) or what convert_hf_to_torch_dist.py wrote.
Config, tokenizer and the like are copied from ``--origin-hf-dir``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    from slime.weights import torch_dist
    from slime.weights.hf_folder import copy_companions, copy_config, resolve_folder, without_mtp_layers, write_tensors
    from slime.weights.maps.registry import get_family

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input-dir", required=True)
    parser.add_argument("--output-dir", required=True, type=Path)
    parser.add_argument("--origin-hf-dir", help="default: the checkpoint that the weights came from")
    parser.add_argument("--vocab-size", type=int, help="rows of the embeddings; default: config.json's")
    parser.add_argument("--model-name", help="model family, if not the one that is stored")
    parser.add_argument("--force", action="store_true", help="write into a folder that exists")
    options = parser.parse_args()
    if options.output_dir.exists() and any(options.output_dir.iterdir()) and not options.force:
        parser.error(f"--output-dir {options.output_dir} is not empty; --force writes into it all the same")
    try:
        folder = torch_dist.find(options.input_dir)
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    meta = torch_dist.read_meta(folder)
    if meta["role"] != "actor":
        parser.error(f"{folder} holds a critic, which is no language model")
    origin = resolve_folder(options.origin_hf_dir or meta["hf_checkpoint"])
    family = get_family(options.model_name or meta["model_type"])
    named = torch_dist.hf_tensors(folder, family, meta["settings"], options.vocab_size)
    try:
        write_tensors(named, options.output_dir, writer=True)
    except (KeyError, ValueError) as error:
        parser.error(str(error.args[0]))
    copy_companions(origin, options.output_dir)
    changes, notice = without_mtp_layers(origin)
    if options.vocab_size:
        changes["vocab_size"] = options.vocab_size
    copy_config(origin, options.output_dir, **changes)
    if notice:
        print(notice, file=sys.stderr)
    print(f"{options.output_dir}: {family.name} from {folder}")


if __name__ == "__main__":
    main()
