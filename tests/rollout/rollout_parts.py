"""What the rollout tests share: a small real HTTP engine, a data source, arguments, a tokenizer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web
from make_args import make_args

from slime.config.args import Args
from slime.data.sample import Sample
from slime.data.source import RolloutDataSourceWithBuffer

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(folder: Path) -> Path:
    """One token per byte, a chat template that renders turn by turn; saved in Hugging Face's
    format.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)} | {"<eos>": len(alphabet)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", pad_token="<eos>"
    )
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    # with a model type of the table of slime/data/tokenizers.py, no process imports torch for it
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def arguments(folder: Path | str, own: dict[str, Any] | None = None, **more: Any) -> Args:
    """Args of a small rollout; ``own`` are attributes that are no flags, as by
    ``--custom-config-path``.
    """
    values = {
        "hf_checkpoint": str(folder),
        "rollout_backend": "sglang",
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "over_sampling_batch_size": None,
        "rollout_max_response_len": 12,
        "rollout_max_context_len": None,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "rollout_stop": None,
        "rollout_stop_token_ids": None,
        "rollout_skip_special_tokens": False,
        "rollout_seed": 42,
        "rollout_shuffle": False,
        "partial_rollout": False,
        "opd_type": None,
        "mask_offpolicy_in_partial_rollout": False,
        "dynamic_sampling_filter_path": None,
        "rollout_sample_filter_path": None,
        "rollout_all_samples_process_path": None,
        "rollout_sample_hook_path": [],
        "custom_generate_function_path": None,
        "custom_rm_path": None,
        "rm_type": "random",
        "group_rm": False,
        "reward_key": None,
        "reward_timeout": 30.0,
        "reward_workers": 1,
        "rm_url": None,
        "rollout_num_gpus": 1,
        "rollout_num_gpus_per_engine": 1,
        "sglang_server_concurrency": 64,
        "phase_timeout": 120.0,
        "sglang_router_request_timeout_secs": 120,
        "deterministic": False,
        "buffer_filter_path": None,
        "load": None,
        "sglang_router_ip": "127.0.0.1",
        "sglang_router_port": 1,
        "eval_prompt_data": None,
        "eval_config": None,
        "n_samples_per_eval_prompt": 1,
        "input_key": "prompt",
        "label_key": "label",
        "metadata_key": "metadata",
        "tool_key": "tools",
        "multimodal_keys": None,
        "apply_chat_template": False,
        "apply_chat_template_kwargs": {},
        "async_buffer_size": 1,
        "max_turns": 3,
    }
    values |= more
    args = make_args().with_values(**values)
    for name, value in (own or {}).items():
        setattr(args, name, value)
    return args


class Prompts:
    """A data set of numbered prompts."""

    def __init__(self, count: int = 10_000, prompt: Any = None) -> None:
        self.count, self.prompt = count, prompt or (lambda i: f"prompt {i}: ")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Sample:
        return Sample(prompt=self.prompt(i), label=str(i), metadata={"number": i})

    def shuffle(self, epoch_id: int) -> None:
        raise AssertionError("not asked for")


def source_of(args: Any, prompts: Prompts | None = None) -> RolloutDataSourceWithBuffer:
    return RolloutDataSourceWithBuffer(args, prompts or Prompts())


class SmallEngine:
    """Speaks the part of SGLang's HTTP that a rollout needs; one character is one token.

    The answer to a request is fixed by its prompt and seed alone: ``length(number, seed)``
    characters drawn by the seed. The time it takes is drawn anew, so answers arrive in any order.
    """

    def __init__(
        self,
        jitter: float = 0.02,
        length: Any = None,
        slow: Any = None,
        version: str = "1",
        queue: int = 0,
    ) -> None:
        self.queue = queue  # requests that it says to have in its queue
        self.jitter, self.version = jitter, version
        self.length = length or (lambda prompt, seed: 1 + seed % 8)
        self.slow = slow or (lambda prompt: False)  # requests that only an abort ends
        self.refuse: Any = lambda prompt: False  # requests that get a 503
        self.drops = 0  # streams whose connection is cut after three tokens
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.aborts = 0
        self.running = 0
        self.parts_streamed = 0
        self.most_running = 0
        self.workers: list[str] | None = None
        self.aborting = asyncio.Event()
        self._clock = random.Random()

    async def __aenter__(self) -> SmallEngine:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        app.router.add_get("/v1/loads", self.loads)
        if self.workers is not None:
            app.router.add_get("/workers", self.list_workers)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.host, self.port = "127.0.0.1", self.runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.runner.cleanup()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def serve(self, args: Any) -> Any:
        args.sglang_router_ip, args.sglang_router_port = self.host, self.port
        return args

    async def list_workers(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"workers": [{"url": url, "id": url} for url in self.workers or []]}
        )

    async def loads(self, request: web.Request) -> web.Response:
        load = {"num_running_reqs": self.running, "num_waiting_reqs": self.queue}
        return web.json_response({"loads": [load]})

    async def abort(self, request: web.Request) -> web.Response:
        assert (await request.json())["abort_all"] is True
        self.aborts += 1
        self.aborting.set()
        self.aborting = asyncio.Event()
        return web.Response()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self.answer(request, body)
        finally:
            self.running -= 1

    async def answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        params = body["sampling_params"]
        prompt = body.get("text") or bytes(to_byte(i) for i in body["input_ids"]).decode()
        seed = params["sampling_seed"]
        if self.refuse(prompt):
            return web.json_response({"error": "no engine"}, status=503)
        wanted, limit = self.length(prompt, seed), params["max_new_tokens"]
        aborted = self.aborting
        draw = random.Random(seed)
        text = "".join(draw.choice("abcdefgh0123456789") for _ in range(min(wanted, limit)))
        finish = (
            {"type": "length", "length": limit}
            if wanted > limit
            else {"type": "stop", "matched": None}
        )
        if self.slow(prompt):
            await aborted.wait()
            text, finish = text[: len(text) // 2], {"type": "abort"}
        elif self.jitter:
            delay = asyncio.ensure_future(asyncio.sleep(self._clock.random() * self.jitter))
            stop = asyncio.ensure_future(aborted.wait())
            done, _ = await asyncio.wait([delay, stop], return_when=asyncio.FIRST_COMPLETED)
            if stop in done:
                text, finish = text[: len(text) // 2], {"type": "abort"}
            delay.cancel(), stop.cancel()
        if body.get("stream"):
            return await self._stream(request, text, finish, draw)
        return web.json_response({"text": text, "meta_info": self.meta(text, finish, draw)})

    async def _stream(
        self, request: web.Request, text: str, finish: dict[str, Any], draw: Any
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for end in range(1, len(text) + 1):
            meta = self.meta(text[:end], finish if end == len(text) else None, random.Random(0))
            await response.write(
                b"data: " + orjson.dumps({"text": text[:end], "meta_info": meta}) + b"\n\n"
            )
            self.parts_streamed += 1
            if self.drops and end == 3:
                self.drops -= 1
                assert request.transport is not None
                request.transport.abort()
                return response
            await asyncio.sleep(0.002)
        await response.write(b"data: [DONE]\n\n")
        return response

    def meta(self, text: str, finish: Any, draw: Any) -> dict[str, Any]:
        return {
            "output_token_logprobs": [[-draw.random(), to_id(byte), None] for byte in text.encode()],
            "finish_reason": finish, "weight_version": self.version, "prompt_tokens": 10, "cached_tokens": 4,
            "completion_tokens": len(text),
        }  # fmt: skip


async def until(reached: Callable[[], bool]) -> None:
    """A busy machine may take its time."""
    async with asyncio.timeout(60):
        while not reached():
            await asyncio.sleep(0.005)


def _byte_table() -> tuple[dict[int, int], dict[int, int]]:
    """Ids of :func:`make_tokenizer` by byte, and back (the byte-level alphabet's own order)."""
    plain = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    characters = {byte: chr(byte) for byte in plain}
    characters |= {
        byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in plain)
    }
    order = {character: i for i, character in enumerate(sorted(characters.values()))}
    ids = {byte: order[character] for byte, character in characters.items()}
    return ids, {i: byte for byte, i in ids.items()}


_IDS, _BYTES = _byte_table()


def to_id(byte: int) -> int:
    return _IDS[byte]


def to_byte(token: int) -> int:
    return _BYTES[token]
