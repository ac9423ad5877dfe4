"""``python -m slime.plugins.vllm.server <vLLM's options>``: the process of one vLLM engine.

vLLM's own server does not speak SGLang's HTTP, so this one embeds vLLM's ``AsyncLLM``, whose model
runs in child processes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web
from vllm import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.version import __version__

from slime.engines.keys import ServerKeys
from slime.plugins.embedded import routes_generate, routes_openai
from slime.plugins.embedded.sequence import Detokenizer
from slime.plugins.embedded.served import ENGINES_SERVING, SERVED
from slime.plugins.http.server import MOST_BYTES, errors_as_json, request_guard
from slime.plugins.vllm.engine import Loaded, VllmEngine
from slime.plugins.vllm.options import SUPPORTED
from slime.plugins.vllm.routes import VLLM, routes

WORKER = "slime.plugins.vllm.worker.SlimeWorker"
WATCH_SECONDS = 1.0
STOP_SECONDS = 2.0  # for vLLM's processes to end by themselves; the guard kills this one after five


def main() -> None:
    parser = FlexibleArgumentParser(prog="python -m slime.plugins.vllm.server", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    AsyncEngineArgs.add_cli_args(parser)
    keys = ServerKeys.take_from_environment()
    options = parser.parse_args()
    engine_args = AsyncEngineArgs.from_cli_args(options)
    engine_args.worker_extension_cls = WORKER
    app = make_app(engine_args, options.host, keys)
    web.run_app(app, host=options.host, port=options.port, print=None, **ENGINES_SERVING)


def make_app(engine_args: AsyncEngineArgs, host: str, keys: ServerKeys) -> web.Application:
    """Return an application whose engine is loaded when it starts, and shut down when it ends."""
    app = web.Application(
        middlewares=[errors_as_json(), request_guard(host, keys=keys)], client_max_size=MOST_BYTES
    )
    for table in (routes, routes_generate.routes, routes_openai.routes):
        app.add_routes(table)

    async def life(app: web.Application) -> AsyncIterator[None]:
        llm = AsyncLLM.from_engine_args(engine_args)
        try:
            app[VLLM] = app[SERVED] = await load(llm, engine_args)
            watch = asyncio.create_task(_end_with_engine(llm))
            yield
            watch.cancel()
        finally:
            if VLLM in app:
                app[VLLM].engine.remove_files()
            llm.shutdown(timeout=STOP_SECONDS)

    app.cleanup_ctx.append(life)
    return app


async def _end_with_engine(llm: AsyncLLM) -> None:
    """End the server when one of vLLM's processes has ended, so that slime starts it again."""
    while not llm.errored:
        await asyncio.sleep(WATCH_SECONDS)
    logging.getLogger(__name__).error("vLLM's engine has ended: %s", llm.dead_error)
    os._exit(1)


async def load(llm: AsyncLLM, engine_args: AsyncEngineArgs) -> Loaded:
    """Return the engine with what belongs to its model."""
    model = llm.model_config
    device = llm.vllm_config.device_config.device_type
    engine = VllmEngine(
        llm, int(model.max_model_len), device == "cpu" or bool(engine_args.enable_sleep_mode)
    )
    # What the workers call their tensors shows whether the checksums are those of the checkpoint.
    ranks = await engine.on_workers("slime_names")
    capabilities = dataclasses.replace(
        SUPPORTED,
        named_checksums=len(ranks) == 1 and set(ranks[0]) == checkpoint_names(model.model),
        named_adapters=bool(engine_args.enable_lora),
    )
    tokenizer = llm.get_tokenizer()
    info: dict[str, object] = {
        "engine": "vllm",
        "version": __version__,
        "capabilities": [name for name, value in vars(capabilities).items() if value],
        "model_path": model.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": device,
        "tp_size": len(ranks),
        "context_length": engine.context_len,
    }
    return Loaded(
        engine,
        tokenizer,
        Detokenizer(tokenizer),
        engine.context_len,
        int(model.get_vocab_size()),
        model.model,
        info=info,
    )


def checkpoint_names(model: str) -> set[str]:
    """Return the names of the tensors in the files of a folder; none if it is not a folder."""
    from safetensors import safe_open

    names: set[str] = set()
    for file in Path(model).glob("*.safetensors"):
        with safe_open(file, framework="numpy") as opened:
            names |= set(opened.keys())
    return names


if __name__ == "__main__":
    main()
