"""A tiny model with a tokenizer that merges across turns, the run's arguments, and an engine with a
script.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from aiohttp import web
from make_args import make_args

from slime.config.args import Args

CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }}"
    "{% for c in m.tool_calls or [] %} <tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>\n{% endfor %}"
    "{% if tools %}[{% for t in tools %}{{ t.function.name }} {% endfor %}]{% endif %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
_CORPUS = [
    "the user and the assistant say end of turn <|user|> <|assistant|> the answer is a number"
] * 8


def make_tokenizer(template: str = CHAT, specials: tuple[str, ...] = ("<|end|>",)) -> Any:
    """A byte-level BPE with merges. The role headers are plain text, so merges reach from a turn
    into the next.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=alphabet,
        special_tokens=["<pad>", *specials],
        show_progress=False,
    )
    inner.train_from_iterator([word for text in _CORPUS for word in (text, *text.split())], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=specials[0], pad_token="<pad>"
    )
    tokenizer.chat_template = template
    return tokenizer


def save_model(folder: Path) -> Path:
    """A random Llama that ends a turn every dozen tokens or so."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=False, initializer_range=0.2,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def arguments(folder: Path, url: str = "http://127.0.0.1:1", **more: Any) -> Args:
    """The run's arguments, with an engine at ``url``."""
    host, port = url.removeprefix("http://").split(":")
    args = make_args(
        hf_checkpoint=str(folder), rollout_backend="embedded", rollout_max_response_len=200,
        sglang_router_ip=host, sglang_router_port=int(port), **more,
    )  # fmt: skip
    args.rm_type = more.get("rm_type")
    return args


class ScriptedEngine:
    """``POST /generate`` that says what its script says, for outputs that a random model never
    makes.

    A script's entry is a text, or ``(text, finish_reason)``; without a finish the turn ends with
    ``<|end|>``. A number as finish is the status of a refusal; None as an entry never answers.
    """

    def __init__(self, tokenizer: Any, script: list[Any]) -> None:
        self.tokenizer, self.script = tokenizer, list(script)
        self.bodies: list[dict[str, Any]] = []

    async def __aenter__(self) -> ScriptedEngine:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.generate)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.runner.cleanup()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        import orjson

        body = await request.json()
        self.bodies.append(body)
        entry = self.script.pop(0)
        if entry is None:
            await asyncio.Event().wait()
        text, finish = entry if isinstance(entry, tuple) else (entry, None)
        if isinstance(finish, int):
            return web.json_response({"error": {"message": text}}, status=finish)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if finish is None:
            ids, finish = (
                [*ids, self.tokenizer.eos_token_id],
                {"type": "stop", "matched": self.tokenizer.eos_token_id},
            )
        if not body.get("stream"):
            return web.json_response(self.answer(text, ids, finish, body))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for end in range(1, len(ids) + 1):
            last = end == len(ids)
            said = text if last else self.tokenizer.decode(ids[:end]).rstrip("\ufffd")
            part = self.answer(said, ids[:end], finish if last else None, body)
            await response.write(b"data: " + orjson.dumps(part) + b"\n\n")
            await asyncio.sleep(0)
        await response.write(b"data: [DONE]\n\n")
        return response

    def answer(
        self, text: str, ids: list[int], finish: Any, body: dict[str, Any]
    ) -> dict[str, Any]:
        scored = [[-0.5 - i / 64, token, None] for i, token in enumerate(ids)]
        meta = {"output_token_logprobs": scored, "finish_reason": finish, "weight_version": str(len(self.bodies)),
                "prompt_tokens": len(body["input_ids"]), "completion_tokens": len(ids), "cached_tokens": 0}  # fmt: skip
        return {"text": text, "meta_info": meta}
