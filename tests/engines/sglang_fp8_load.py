"""Load and update quantized weights in SGLang's own model classes, in one process on the CPU.
Prints what it found.

    python tests/engines/sglang_fp8_load.py FIRST SECOND PLAIN

FIRST and SECOND are folders of slime.models.fp8.write_fp8, PLAIN is what SECOND was made of. A
model is loaded from FIRST and gets what a weight sync sends of PLAIN; another one is loaded from
SECOND. SGLang's layers for 8-bit floats cannot compute on this CPU, so no forward pass is made, and
the step after loading, which rearranges weights for AMX, is left out; on CUDA it leaves weights in
blocks as they are.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
from slime.plugins.sglang.kernels import install

install()  # before anything imports SGLang

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from slime.engines.process import free_port  # noqa: E402
from slime.models.fp8_format import Fp8Format, layout_of  # noqa: E402
from slime.models.stored import StoredWeights  # noqa: E402
from slime.weights.update import cast_floating, iter_buckets, quantize_fp8  # noqa: E402


def stored(folder: Path) -> list[tuple[str, torch.Tensor]]:
    return [
        pair for file in sorted(folder.glob("*.safetensors")) for pair in load_file(file).items()
    ]


def sent(plain: Path) -> list[tuple[str, torch.Tensor]]:
    """What a weight sync sends, in many buckets."""
    weights = StoredWeights(plain)
    layout = layout_of(str(plain), Fp8Format("block", 1, 2))
    steps = [cast_floating(torch.bfloat16), quantize_fp8(layout)]
    named = ((name, weights.get(name)) for name in weights.shapes())
    return [pair for bucket in iter_buckets(named, 1 << 16, steps) for pair in bucket.tensors]


def new_model(folder: Path, first: bool = False) -> Any:
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    options = dict(
        device="cpu", attention_backend="torch_native", dtype="bfloat16", quantization="fp8"
    )
    args = ServerArgs(model_path=str(folder), disable_cuda_graph=True, **options)
    publish(args, role="scheduler", ranks=SpawnRanks(0))
    if first:
        address = f"tcp://127.0.0.1:{free_port()}"
        init_distributed_environment(1, 0, address, 0, "gloo")
        initialize_model_parallel(backend="gloo")
        initialize_dp_attention(args)
    config = ModelConfig.from_server_args(args)
    return _initialize_model(config, LoadConfig(), _get_quantization_config(config, LoadConfig()))


def main() -> None:
    first, second, plain = map(Path, sys.argv[1:])
    torch.set_default_dtype(torch.bfloat16)
    model = new_model(first, first=True)
    model.load_weights(stored(first))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    other = new_model(second)
    other.load_weights(stored(second))
    model.load_weights(sent(plain))
    want = dict(other.named_parameters())
    raw = lambda tensor: tensor.detach().reshape(-1).view(torch.uint8)  # noqa: E731 - bits, since NaN is not itself
    found = {
        "dtypes": {
            name: str(p.dtype).removeprefix("torch.") for name, p in model.named_parameters()
        },
        "different": [
            name for name, p in model.named_parameters() if not torch.equal(raw(p), raw(want[name]))
        ],
        "unchanged": [
            name for name, p in model.named_parameters() if torch.equal(raw(p), raw(before[name]))
        ],
    }
    print("\n" + json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
