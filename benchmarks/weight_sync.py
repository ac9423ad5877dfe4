"""Seconds of one weight sync to embedded engines, over every transport.

    python benchmarks/weight_sync.py --model models/SmolLM2-135M-Instruct

The whole of it is timed: gathering, copies, the engines' loading, control calls. ``pause`` is the part in which
the engines do not generate; ``audit`` (digests of all tensors on both sides) is apart. Every sync sends other
values than the last. The engines are idle. The last line is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default=str(CHECKOUT / "models" / "SmolLM2-135M-Instruct"), help="Hugging Face folder"
    )
    parser.add_argument("--transports", default="ipc,distributed,disk", help="comma-separated")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu", help="of trainer and engines")
    parser.add_argument("--repeats", type=int, default=5, help="syncs per transport, after one that warms up")
    parser.add_argument("--bucket-mib", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--disk-dir", help="folder for the disk transport; default: a temporary one")
    return parser.parse_args()


def make_args(options: argparse.Namespace, disk_dir: str) -> Any:
    from slime.config.args import Args

    args = Args()
    settings = dict(
        hf_checkpoint=options.model,
        train_dtype=options.dtype,
        rollout_dtype=options.dtype,
        embedded_device=options.device,
        embedded_max_total_tokens=16384,
        threads_per_process=options.threads,
        update_weight_buffer_size=options.bucket_mib * 2**20,
        update_weight_disk_dir=disk_dir,
    )
    for name, value in settings.items():
        setattr(args, name, value)
    return args


def make_transport(args: Any, name: str) -> Any:
    from slime.weights.transports import create_transport

    args.update_weight_transport = "disk" if name == "disk" else "nccl"
    args.colocate = name == "ipc"
    return create_transport(args, colocated_host=name == "ipc")


def changed(weights: dict[str, Any], step: int) -> Iterator[tuple[str, Any]]:
    """The model's weights, other values at each step."""
    for name, tensor in weights.items():
        yield name, tensor * (1.0 + step / 1024)


def measure(args: Any, options: argparse.Namespace, name: str, weights: dict[str, Any], engines: list[Any]) -> Any:
    """Median report of some syncs."""
    from slime.utils.async_utils import run
    from slime.weights.sync import sync_weights

    transport = make_transport(args, name)
    reports = []
    for step in range(options.repeats + 1):
        report = sync_weights(args, changed(weights, step), engines, transport, f"0.{step}", True)
        assert report is not None
        reports.append(dataclasses.asdict(report))
    run(transport.close())
    middle = {
        key: statistics.median(report[key] for report in reports[1:])
        for key in ("seconds", "pause_seconds", "audit_seconds")
    }
    return {**middle, "first_seconds": reports[0]["seconds"], "nbytes": reports[-1]["nbytes"]}


def main() -> None:
    options = parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    import torch

    from slime.engines.http_handle import HttpEngineHandle
    from slime.engines.process import start_embedded_engine
    from slime.models.loading import load_hf_model

    torch.set_num_threads(options.threads)
    model = load_hf_model(options.model, getattr(torch, options.dtype), torch.device(options.device))
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    weights = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        args = make_args(options, options.disk_dir or str(Path(folder) / "disk"))
        processes = [
            start_embedded_engine(args, i, log_path=Path(folder) / f"engine-{i}.log") for i in range(options.engines)
        ]
        try:
            for process in processes:
                process.wait_ready(300)
            engines = [HttpEngineHandle(process.url) for process in processes]
            for name in options.transports.split(","):
                results[name] = measure(args, options, name, weights, engines)
                row = results[name]
                print(
                    f"{name:12} {row['seconds']:.3f} s, pause {row['pause_seconds']:.3f} s, "
                    f"audit {row['audit_seconds']:.3f} s, first {row['first_seconds']:.3f} s, "
                    f"{row['nbytes'] / 2**20:.0f} MiB",
                    flush=True,
                )
        finally:
            for process in processes:
                process.stop()
    shape = {"engines": options.engines, "dtype": options.dtype, "device": options.device, "threads": options.threads}
    print(json.dumps({"benchmark": "weight_sync", **shape, "model": Path(options.model).name, "transports": results}))


if __name__ == "__main__":
    main()
