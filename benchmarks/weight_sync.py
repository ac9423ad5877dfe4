"""Seconds of one weight sync to a running engine, over every transport.

    python benchmarks/weight_sync.py                                   # Qwen3-4B shape in bf16, SGLang, on GPUs
    python benchmarks/weight_sync.py --device cpu --tiny               # a trial of the script, with SGLang on the CPU
    python benchmarks/weight_sync.py --engine embedded --device cpu --tiny --dtype float32    # the same, without SGLang
    python benchmarks/weight_sync.py --engine embedded --device cpu --model models/SmolLM2-135M-Instruct --dtype float32

The whole of a sync is timed: gathering, copies, the engine's loading, control calls. ``pause`` is
the part in which the engine does not generate. Every sync sends other values than the last, the
engine is idle. Over NCCL the engine is on another GPU. ``delta`` changes 2% of the bytes, spread
evenly over all tensors. Each transport runs in a process of its own with a deadline, so one that
fails costs no other figure. At the end of each, the same weights are sent and the engine's
checksums of all tensors compared: all transports must have brought the same bytes; and once more
with every tensor overwritten in between. The last line is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "benchmarks")]
START_SECONDS = 300.0
TARGETS = {"ipc": (0.35, 0.25), "distributed": (0.5, None)}
"""Seconds of a sync and of its pause, for the Qwen3-4B shape in bf16 on H200."""
DELTA_TARGET = 0.2  # of the full disk sync


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-4b", help="of benchmarks/random_model.py")
    parser.add_argument(
        "--model", type=Path, help="a Hugging Face folder instead of random weights in a shape"
    )
    parser.add_argument("--engine", choices=("sglang", "embedded"), default="sglang")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="of trainer and engine"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, for a trial")
    parser.add_argument(
        "--transports", default="ipc,distributed,disk,delta", help="comma-separated"
    )
    parser.add_argument(
        "--bucket-mib",
        default="512,1024,2048",
        help="of ipc and distributed; disk, delta: the first",
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="syncs per figure, after one that warms up"
    )
    parser.add_argument("--seconds", type=float, default=200.0, help="deadline of each transport")
    parser.add_argument("--threads", type=int, default=1, help="of each process on the CPU")
    parser.add_argument(
        "--disk-dir", type=Path, help="folder for disk and delta; default: a temporary one"
    )
    parser.add_argument("--encoding", default="xor", choices=("xor", "overwrite"), help="of deltas")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tiny:
        options.shape, options.bucket_mib, options.repeats = "tiny", "1", min(options.repeats, 2)
    return options


def make_args(options: argparse.Namespace) -> Any:
    from slime.config.args import Args

    args = Args()
    checksum = "xxh3-128" if importlib.util.find_spec("xxhash") else "adler32"
    settings: dict[str, Any] = dict(
        hf_checkpoint=str(options.model or options.work / "model"),
        train_dtype=options.dtype,
        rollout_dtype=options.dtype,
        rollout_backend=options.engine,
        embedded_device=options.device,
        embedded_max_total_tokens=16384,
        threads_per_process=options.threads if options.device == "cpu" else None,
        audit_weights=False,  # it is measured apart
        update_weight_mode="delta",  # lets the engine know the loader of deltas
        update_weight_disk_dir=str(options.disk_dir or options.work / "disk"),
        update_weight_delta_checksum=checksum,
        update_weight_delta_encoding=options.encoding,
        sglang={"load_format": "auto" if options.model else "dummy"},
    )
    if options.device == "cpu":
        settings["sglang"] |= {"device": "cpu", "max_total_tokens": 4096}
    else:  # no figure here needs its CUDA graphs, which take most of its start
        settings["sglang"] |= {
            "attention_backend": "triton",
            "disable_cuda_graph": True,
            "mem_fraction_static": 0.4,
        }
    for name, value in settings.items():
        setattr(args, name, value)
    return args


# --- one transport, in a process of its own
# --------------------------------------------------------


class Weights:
    """The trainer's side: all tensors on one device, other values at each step."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        self.device = torch.device("cuda:0" if options.device == "cuda" else "cpu")
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        self.generator = torch.Generator(self.device)
        self.tensors: dict[str, torch.Tensor] = {}
        if options.model:
            from safetensors.torch import load_file

            for file in sorted(options.model.glob("*.safetensors")):
                self.tensors |= {
                    k: t.to(self.device, self.dtype) for k, t in load_file(file).items()
                }
            return
        import random_model

        for name, shape in random_model.checkpoint_shapes(
            random_model.make_config(options.shape)
        ).items():
            self.tensors[name] = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.fill(0)

    def fill(self, seed: int) -> None:
        """New values everywhere; the same ones in every process of the same device."""
        self.generator.manual_seed(seed)
        for tensor in self.tensors.values():
            tensor.normal_(0.0, 0.02, generator=self.generator)

    def flip(self, share: float) -> None:
        """Change this share of the bytes, evenly over all tensors."""
        import torch

        for tensor in self.tensors.values():
            for part in tensor.view(-1).view(torch.uint8).split(1 << 27):
                chosen = (
                    torch.rand(part.shape, device=part.device, generator=self.generator) < share
                )
                part ^= chosen.to(torch.uint8) * 85

    def named(self) -> Iterator[tuple[str, Any]]:
        yield from self.tensors.items()


def timed_handle(url: str, spent: dict[str, list[float]]) -> Any:
    """A handle that notes the seconds of each call."""
    from slime.engines.handle import EngineHandle

    class Timed(EngineHandle):
        async def _call(
            self, method: str, path: str, body: Any = None, seconds: float | None = None
        ) -> Any:
            start = time.perf_counter()
            try:
                return await super()._call(method, path, body, seconds)
            finally:
                spent.setdefault(path.strip("/"), []).append(time.perf_counter() - start)

    return Timed(url)


def run_part(options: argparse.Namespace) -> None:
    """Prints one JSON object."""
    import torch

    from slime.utils.async_utils import run
    from slime.weights.settings import WeightSyncSettings
    from slime.weights.sync import sync_weights
    from slime.weights.transports import create_transport

    if options.device == "cpu":
        torch.set_num_threads(options.threads)
    args, weights, name = make_args(options), Weights(options), options.part
    args.update_weight_transport = "disk" if name in ("disk", "delta") else "nccl"
    args.update_weight_mode = "delta" if name == "delta" else "full"
    args.colocate = name == "ipc"
    spent: dict[str, list[float]] = {}
    engine = timed_handle(options.url, spent)
    settings = WeightSyncSettings.from_args(args)
    transport = create_transport(settings, colocated_host=name == "ipc")
    assert transport.name == name, transport.name
    attempt = ("ipc", "distributed", "disk", "delta").index(name)
    step = 0

    def sync(**more: Any) -> dict[str, Any]:
        nonlocal step
        if weights.device.type == "cuda":
            torch.cuda.synchronize()
        spent.clear()
        report = sync_weights(
            settings, weights.named(), [engine], transport, f"{attempt}.{step}", True, **more
        )
        step += 1
        assert report is not None
        return dataclasses.asdict(report) | {
            "calls": {path: round(sum(times), 4) for path, times in spent.items()}
        }

    rows = []
    sizes = [int(text) for text in options.bucket_mib.split(",")]
    for mib in sizes if name in ("ipc", "distributed") else sizes[:1]:
        flags = dataclasses.replace(settings.sync, update_weight_buffer_size=mib * 2**20)
        settings = dataclasses.replace(settings, sync=flags)
        reports = []
        for _ in range(options.repeats + 1):
            if name == "delta" and step:
                weights.flip(0.02)
            else:
                weights.fill(step + 1)
            reports.append(sync())
        rows.append(summary(mib, reports))
        print(line(name, rows[-1]), file=sys.stderr, flush=True)
    weights.fill(0)
    sync()
    sums = run(engine.checksum())
    start = time.perf_counter()
    sync(check_equal=True)  # overwrites all tensors first; raises when one was not written
    checked = time.perf_counter() - start
    assert run(engine.checksum()) == sums
    run(transport.close())
    best = min(rows, key=lambda row: row["seconds"])
    print(
        json.dumps(
            {**best, "rows": rows, "check_equal_seconds": checked, "checksums": fingerprint(sums)}
        )
    )


def summary(mib: int, reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of all but the first; calls of the fastest."""
    later = reports[1:]
    middle = {
        key: statistics.median(report[key] for report in later)
        for key in ("seconds", "pause_seconds", "density")
    }
    fastest = min(later, key=lambda report: report["seconds"])
    return {
        "bucket_mib": mib,
        **middle,
        "fastest_seconds": fastest["seconds"],
        "slowest_seconds": max(report["seconds"] for report in later),
        "first_seconds": reports[0]["seconds"],
        "nbytes": later[-1]["nbytes"],
        "calls": fastest["calls"],
    }


def line(name: str, row: dict[str, Any]) -> str:
    calls = ", ".join(f"{path} {seconds:.3f}" for path, seconds in row["calls"].items())
    return (
        f"{name:12} buckets {row['bucket_mib']:5} MiB: {row['seconds']:.3f} s (fastest "
        f"{row['fastest_seconds']:.3f}, slowest {row['slowest_seconds']:.3f}, first "
        f"{row['first_seconds']:.3f}), pause {row['pause_seconds']:.3f} s, "
        f"{row['nbytes'] / 2**20:.0f} MiB, density {row['density']:.3f} [{calls}]"
    )


def fingerprint(sums: dict[str, str]) -> str:
    import hashlib

    return hashlib.sha256(json.dumps(sorted(sums.items())).encode()).hexdigest()[:16]


# --- all of them
# -----------------------------------------------------------------------------------


class Servers:
    """One engine per GPU, started when first asked for, and again when it died."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.args = options, make_args(options)
        self.running: dict[int, Any] = {}

    def url(self, gpu: int) -> str:
        from slime.engines.launch import EngineSettings, EngineSpec, start_engine

        engine = self.running.get(gpu)
        if engine is None or not engine.alive():
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            ids = [int(word) for word in visible.split(",") if word] or range(8)
            gpus = [ids[gpu]] if self.options.device == "cuda" else None
            spec = EngineSpec(gpu, self.args.hf_checkpoint)
            log = self.options.work / f"engine-{gpu}-{time.time():.0f}.log"
            engine = self.running[gpu] = start_engine(
                EngineSettings.from_args(self.args), spec, log_path=log, gpu_ids=gpus
            )
        start = time.perf_counter()
        engine.wait_ready(START_SECONDS)
        print(
            f"engine on {gpu} answers after {time.perf_counter() - start:.0f} s",
            file=sys.stderr,
            flush=True,
        )
        return str(engine.url)

    def log_tail(self, gpu: int) -> str:
        return str(self.running[gpu].log_tail())[-3000:] if gpu in self.running else ""

    def stop(self) -> None:
        for engine in self.running.values():
            engine.stop()


def run_in_process(options: argparse.Namespace, name: str, url: str) -> dict[str, Any]:
    words = [
        sys.executable,
        __file__,
        *sys.argv[1:],
        "--part",
        name,
        "--url",
        url,
        "--work",
        str(options.work),
    ]
    done = subprocess.run(words, stdout=subprocess.PIPE, timeout=options.seconds, text=True)
    if done.returncode:
        raise RuntimeError(f"ended with {done.returncode}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def prepare(options: argparse.Namespace) -> None:
    """Set the environment of all processes, and write the model's folder."""
    paths = [str(CHECKOUT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    if options.device == "cpu":
        os.environ.update(
            OMP_NUM_THREADS=str(options.threads), OMP_WAIT_POLICY="PASSIVE", CUDA_VISIBLE_DEVICES=""
        )
        if options.engine == "sglang":
            from slime.plugins.sglang.kernels import install

            install()
    if not options.model:
        import random_model

        if options.engine == "embedded":  # it has no load format "dummy"
            random_model.write_model(options.shape, options.work / "model")
            return
        (options.work / "model").mkdir()
        random_model.write_config(options.shape, options.work / "model")


def gpu_count(options: argparse.Namespace) -> int:
    if options.device == "cpu":
        return 0
    seen = subprocess.run(
        ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=True
    )
    return len(seen.stdout.splitlines())


def measure(options: argparse.Namespace, servers: Servers) -> dict[str, Any]:
    results: dict[str, Any] = {}
    gpus = gpu_count(options)
    for name in options.transports.split(","):
        gpu = 1 if name == "distributed" and gpus else 0
        if gpu and gpus < 2:
            results[name] = {"skipped": "needs two GPUs"}
            continue
        try:
            results[name] = run_in_process(options, name, servers.url(gpu))
        except Exception as error:
            traceback.print_exc()
            print(servers.log_tail(gpu), file=sys.stderr, flush=True)
            results[name] = {"error": f"{type(error).__name__}: {error}"}
    return results


def judge(results: dict[str, Any]) -> list[str]:
    """One line per figure, with its target."""
    lines = []
    for name, row in results.items():
        if "seconds" not in row:
            lines.append(f"{name:12} {row}")
            continue
        wanted = [f"{limit:.2f}" if limit else "-" for limit in TARGETS.get(name, (None, None))]
        lines.append(
            f"{name:12} {row['seconds']:.3f} s (wanted {wanted[0]}), pause "
            f"{row['pause_seconds']:.3f} s (wanted {wanted[1]}), buckets of {row['bucket_mib']} "
            f"MiB, {row['nbytes'] / 2**20:.0f} MiB sent"
        )
    if "seconds" in results.get("disk", {}) and "seconds" in results.get("delta", {}):
        ratio = results["delta"]["seconds"] / results["disk"]["seconds"]
        lines.append(f"delta / disk {ratio:.3f} (wanted {DELTA_TARGET})")
    prints = {row["checksums"] for row in results.values() if "checksums" in row}
    lines.append(f"all transports brought the same bytes: {len(prints) == 1}")
    return lines


def main() -> None:
    options = parse_options()
    if options.part:
        if options.device == "cpu" and options.engine == "sglang":
            from slime.plugins.sglang.kernels import install

            install()  # transformers imports torchvision, whose kernels such an environment lacks
        run_part(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        options.work = Path(folder)
        prepare(options)
        servers = Servers(options)
        try:
            results = measure(options, servers)
        finally:
            servers.stop()
    print("\n".join(judge(results)))
    shape = options.model.name if options.model else options.shape
    print(json.dumps({"benchmark": "weight_sync", "engine": options.engine, "device": options.device,
                      "dtype": options.dtype, "model": shape, "transports": results}))  # fmt: skip


if __name__ == "__main__":
    main()
