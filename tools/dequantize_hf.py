#!/usr/bin/env python3
"""Quantized Hugging Face folder → the same model with plain weights, on any machine.

    python tools/dequantize_hf.py --hf-checkpoint DeepSeek-V3 --save DeepSeek-V3-bf16

It reads block, row and tensor FP8, INT4 and INT8 of compressed-tensors and MXFP4, one tensor at a
time, and writes the dtype of config.json (bfloat16 where it names none). The new config.json has no
quantization_config.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    from slime.models.loading import ModelError
    from slime.models.stored import write_tensors
    from slime.weights.hf_folder import HfFolder, write_side_files

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hf-checkpoint", required=True, help="Hugging Face folder or hub id")
    parser.add_argument(
        "--save", required=True, type=Path, help="folder to write; it must be empty or absent"
    )
    options = parser.parse_args()
    if options.save.exists() and any(options.save.iterdir()):
        parser.error(f"--save {options.save} is not empty")
    try:
        folder = HfFolder(options.hf_checkpoint)
        if not folder.is_quantized:
            parser.error(
                f"--hf-checkpoint {options.hf_checkpoint} is not quantized: there is nothing to do"
            )
        names = sorted(folder.shapes(), key=lambda name: (folder.where(name), name))
        write_tensors(((name, folder.get(name)) for name in names), options.save, writer=True)
    except ModelError as error:
        parser.error(str(error))
    write_side_files(folder.folder, options.save, None, {})
    print(f"{options.save}: {len(names)} tensors, {len(folder.plan.weights)} of them dequantized")


if __name__ == "__main__":
    main()
