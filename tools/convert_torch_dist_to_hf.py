#!/usr/bin/env python3
"""Megatron weights (torch_dist) → Hugging Face folder, on any machine; Megatron itself is not
needed.

    python tools/convert_torch_dist_to_hf.py --input-dir outputs/run/checkpoints/iter_0000099 \
        --output-dir Qwen3-4B-iter99 --origin-hf-dir Qwen3-4B

``--input-dir`` is a snapshot, a folder of snapshots (the newest is taken), what
convert_hf_to_torch_dist.py wrote, or a checkpoint of Megatron-LM (a folder with a tracker file, or
one iteration in it), which also needs ``--origin-hf-dir``. All other files are copied from
``--origin-hf-dir``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


class Found(NamedTuple):
    folder: Path
    origin: Path
    family: str
    named: Iterator[tuple[str, Tensor]]


def _find(options: argparse.Namespace) -> Found:
    """Find the weights of ``--input-dir``.

    Raises:
        FileNotFoundError, ValueError: There are none, or they cannot be converted.
    """
    from slime.config.run import other_folder
    from slime.plugins.megatron import torch_dist
    from slime.plugins.megatron.maps.family import family_of, get_family, text_config
    from slime.plugins.megatron.megatron_lm import MegatronLmWeights
    from slime.weights.hf_folder import HfFolder, resolve_folder

    if foreign := other_folder(options.input_dir):
        if options.origin_hf_dir is None:
            raise ValueError(
                f"--origin-hf-dir is missing: {foreign} was written by Megatron-LM and does not "
                "name it"
            )
        origin = resolve_folder(options.origin_hf_dir)
        config = text_config(origin)
        family = family_of(config, options.model_name)
        settings = family.settings_of(config.to_dict())
        if options.vocab_size:
            settings["vocab_size"] = options.vocab_size
        named = MegatronLmWeights(foreign, family, settings).named()
        vision = family.vision_part(settings, HfFolder(origin))
        return Found(foreign, origin, family.name, chain(named, vision))
    folder = torch_dist.find(options.input_dir)
    meta = torch_dist.read_meta(folder)
    if meta["role"] != "actor":
        raise ValueError(f"{folder} holds a critic, which is not a language model")
    if problem := torch_dist.adapter_only(folder, meta):
        raise ValueError(problem)
    origin = resolve_folder(options.origin_hf_dir or meta["hf_checkpoint"])
    family = get_family(options.model_name or meta["model_type"])
    named = torch_dist.hf_tensors(folder, family, meta["settings"], options.vocab_size)
    vision = family.vision_part(meta["settings"], HfFolder(origin))
    return Found(folder, origin, family.name, chain(named, vision))


def main() -> None:
    from slime.models.stored import write_tensors
    from slime.weights.hf_folder import MtpLayers, write_side_files

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input-dir", required=True)
    parser.add_argument("--output-dir", required=True, type=Path)
    parser.add_argument(
        "--origin-hf-dir", help="default: the checkpoint that the weights came from"
    )
    parser.add_argument(
        "--vocab-size", type=int, help="rows of the embeddings; default: config.json's"
    )
    parser.add_argument("--model-name", help="model family, if not the one that is stored")
    parser.add_argument("--force", action="store_true", help="write into a folder that exists")
    options = parser.parse_args()
    if options.output_dir.exists() and any(options.output_dir.iterdir()) and not options.force:
        parser.error(
            f"--output-dir {options.output_dir} is not empty; --force writes into it all the same"
        )
    try:
        weights = _find(options)
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    origin, named, mtp = weights.origin, weights.named, MtpLayers(weights.origin)
    try:
        write_tensors(chain(named, mtp.tensors()), options.output_dir, writer=True)
    except (KeyError, ValueError) as error:
        parser.error(str(error.args[0]))
    changes = {"vocab_size": options.vocab_size} if options.vocab_size else {}
    write_side_files(origin, options.output_dir, mtp, changes)
    if mtp.notice:
        print(mtp.notice, file=sys.stderr)
    print(f"{options.output_dir}: {weights.family} from {weights.folder}")


if __name__ == "__main__":
    main()
