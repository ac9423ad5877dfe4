"""An engine whose answers are written here. It speaks the part of SGLang's native HTTP that a run
needs.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from slime.engines.launch import EngineSettings, EngineSpec
from slime.engines.process import EngineProcess, free_port

WORDS = ("a frog jumps into", "the sound of water", "rhythm")


def start(
    settings: EngineSettings,
    spec: EngineSpec,
    host: str,
    log_path: str | Path | None,
    gpu_ids: Sequence[int] | None,
    node: tuple[int, int, str | None],
) -> EngineProcess:
    port = free_port(host)
    command = [sys.executable, "-m", "haiku_for_slime.engine", settings.model, host, str(port)]
    return EngineProcess(
        f"scripted engine {spec.index}", command, f"http://{host}:{port}", log_path, {}
    )


class Scripted:
    def __init__(self, model: str) -> None:
        from transformers import AutoTokenizer

        self.model, self.version = model, "default"
        self.tokenizer = AutoTokenizer.from_pretrained(model)

    async def server_info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"version": "0.5.15", "tp_size": 1, "device": "cpu", "dtype": "float32"}
        )

    async def model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": self.model, "weight_version": self.version})

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        seed = body["sampling_params"].get("sampling_seed")
        text = random.Random(json.dumps([body.get("input_ids"), seed])).choice(WORDS)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        meta = {
            "finish_reason": {"type": "stop", "matched": None},
            "prompt_tokens": len(body.get("input_ids") or ()),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": self.version,
            "output_token_logprobs": [[-1.0, token, None] for token in ids],
        }
        return web.json_response({"text": text, "output_ids": ids, "meta_info": meta})

    async def load(self, request: web.Request) -> web.Response:
        body = await request.json()
        print(
            "read",
            Path(body["model_path"]).read_text(),
            "tensors of",
            body["weight_version"],
            flush=True,
        )
        self.version = body["weight_version"]
        return web.json_response({"success": True, "message": ""})

    async def name_version(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["new_version"]
        return web.json_response({"success": True})

    async def anything(self, _: web.Request) -> web.Response:
        return web.json_response({"success": True, "loads": []})


def main(model: str, host: str, port: str) -> None:
    engine = Scripted(model)
    app = web.Application()
    app.router.add_get("/server_info", engine.server_info)
    app.router.add_get("/model_info", engine.model_info)
    app.router.add_post("/generate", engine.generate)
    app.router.add_post("/update_weights_from_disk", engine.load)
    app.router.add_post("/update_weight_version", engine.name_version)
    app.router.add_route("*", "/{path:.*}", engine.anything)
    web.run_app(app, host=host, port=int(port), print=None)


if __name__ == "__main__":
    main(*sys.argv[1:])
