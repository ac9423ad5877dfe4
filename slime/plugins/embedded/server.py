"""``python -m slime.plugins.embedded.server``: the process of one embedded engine."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import fields

from slime.config.process import end_with_parent
from slime.engines.keys import API_VARIABLE, ServerKeys
from slime.models.cpu_memory import large_imports, set_compute_variables


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. Options that SGLang has too have SGLang's names."""
    key = (
        f"The environment variable {API_VARIABLE} is the key that requests must have; without it, "
        "there is no key."
    )
    parser = argparse.ArgumentParser(
        prog="python -m slime.plugins.embedded.server", description=__doc__, epilog=key
    )
    parser.add_argument("--model-path", required=True, help="Hugging Face folder or hub id")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="default: float32 on CPU, else bfloat16",
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:N; default: cuda where there is one")
    parser.add_argument("--max-running-requests", type=int)
    parser.add_argument(
        "--max-total-tokens", type=int, help="bound of the KV cache; default: by free memory"
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="results do not depend on the rest of the batch",
    )
    parser.add_argument(
        "--threads", type=int, help="CPU threads; default: OMP_NUM_THREADS, else the cores"
    )
    parser.add_argument("--kernels", help="a registered part of the kind `kernels`")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--random-seed", type=int, default=0)
    parser.add_argument("--parent-pid", type=int, help="end when this process, our parent, is gone")
    parser.add_argument("--log-level", default="info")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Load the model, then serve until SIGTERM or SIGINT."""
    started = time.perf_counter()
    keys = ServerKeys.take_from_environment()
    options = build_parser().parse_args(argv)
    if options.parent_pid:
        end_with_parent(options.parent_pid)
    if options.threads:
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(options.threads)
    set_compute_variables()
    logging.basicConfig(
        level=options.log_level.upper(),
        format="[%(asctime)s] %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    _serve(options, keys, started)


def _serve(options: argparse.Namespace, keys: ServerKeys, started: float) -> None:
    with large_imports():
        import torch
        from aiohttp import web

        from slime.plugins.embedded.app import SERVING, make_app
        from slime.plugins.embedded.loading import EngineOptions, load_engine

    if options.threads:
        torch.set_num_threads(options.threads)
    torch.multiprocessing.set_sharing_strategy("file_system")
    # the model thread needs the interpreter lock again after each operator
    sys.setswitchinterval(0.001)
    loaded = load_engine(
        EngineOptions.of(
            **{field.name: getattr(options, field.name) for field in fields(EngineOptions)}
        )
    )
    app = make_app(loaded, options.host, keys)

    async def announce(app: web.Application) -> None:
        logging.getLogger(__name__).info("ready after %.1f s", time.perf_counter() - started)

    app.on_startup.append(announce)
    web.run_app(app, host=options.host, port=options.port, print=None, **SERVING)


if __name__ == "__main__":
    main()
