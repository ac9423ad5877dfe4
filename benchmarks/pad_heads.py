"""A copy of a Llama-like checkpoint with more attention heads that computes the same function.

    python benchmarks/pad_heads.py --model models/SmolLM2-135M-Instruct --kv-heads 4 --output models/SmolLM2-4-kv-heads

Tensor parallelism divides heads, and SmolLM2-135M has 9 query and 3 key-value heads, which two
ranks cannot share. The copy has more groups of heads, 12 and 4 for instance. All rows and columns
of an added head are zero: its values are zero, and so is its part of the output projection. The
gradients of all of them are zero as well (each has a factor that is zero), so training does not
change them either.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

TOKENIZER = ("*.json", "*.jinja", "*.model", "*.txt")


def pad_heads(model: Path, output: Path, kv_heads: int) -> Path:
    """Write the copy, with ``kv_heads`` key-value heads; query heads grow in proportion.

    Raises:
        ValueError: The model has as many key-value heads or more, or a projection has a bias.
    """
    config: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    heads, old = config["num_attention_heads"], config["num_key_value_heads"]
    if kv_heads <= old:
        raise ValueError(f"{model} has {old} key-value heads: --kv-heads {kv_heads} adds none")
    size = config.get("head_dim") or config["hidden_size"] // heads
    query_heads = heads // old * kv_heads
    rows = {"q_proj": query_heads * size, "k_proj": kv_heads * size, "v_proj": kv_heads * size}
    output.mkdir(parents=True, exist_ok=True)
    for pattern in TOKENIZER:
        for path in model.glob(pattern):
            if not path.name.endswith(".index.json"):
                shutil.copyfile(path, output / path.name)
    config |= {
        "num_attention_heads": query_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
    }
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(model.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            kind = next((kind for kind in (*rows, "o_proj") if f".{kind}." in name), None)
            if kind is not None and name.endswith(".bias"):
                raise ValueError(f"{name}: projections with a bias are not supported")
            if kind == "o_proj":
                tensor = grown(tensor, 1, query_heads * size)
            elif kind is not None:
                tensor = grown(tensor, 0, rows[kind])
            tensors[name] = tensor
    save_file(tensors, str(output / "model.safetensors"), metadata={"format": "pt"})
    return output


def grown(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """The tensor with zeros behind it in one dimension.

    A query head's group is its number divided by the heads of a group, so heads added at the end
    change no other group.
    """
    shape = list(tensor.shape)
    shape[dim] = size - shape[dim]
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="folder of a checkpoint in Hugging Face's format"
    )
    parser.add_argument("--kv-heads", type=int, required=True, help="key-value heads of the copy")
    parser.add_argument("--output", type=Path, required=True, help="folder of the copy")
    options = parser.parse_args()
    print(pad_heads(options.model, options.output, options.kv_heads))


if __name__ == "__main__":
    main()
