"""The test environment of hooks: the first prompts of the user's data, responses to them, a real
engine, and one whose answers are scripted: they call a tool or are interrupted by an abort."""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import ClientSession, web

from slime.cli.command import CommandError
from slime.config.args import Args
from slime.config.files import file_of
from slime.config.rollout import is_fully_async
from slime.data.eval_config import resolve_eval_datasets
from slime.data.sample import Group, Sample, flatten
from slime.data.tokenizers import load_tokenizer
from slime.plugins.http.server import END, event, event_stream, listen
from slime.rollout.prompts import prompt_ids
from slime.rollout.state import GenerateState

from .guard import Hook, guarded

if TYPE_CHECKING:
    from slime.data.convert import TrainData
    from slime.data.source import RolloutDataSourceWithBuffer
    from slime.engines.process import EngineProcess
    from slime.types import JsonObject, Tokenizer

PROMPTS = 2
SAMPLES = 4
NEW_TOKENS = 24
ENGINE_SECONDS = 90.0
_MOST_AFTER_ABORT = 20
_TOO_LONG = "The input is longer than the model's context length"
LAST = "The answer is 4."


class Bench:
    """Small versions of a run's arguments and data. It is a context manager, which stops its engine
    at the end.

    The engine is the embedded one with a tiny random model and the user's vocabulary. Its responses
    make no sense, but all their fields are real.

    Args:
        limit: Deadline of each call in seconds.
        tool_answer: An answer of the model after which generate functions must continue with a tool
            turn.
    """

    def __init__(self, args: Args, limit: float, tool_answer: str | None = None) -> None:
        self.limit = limit
        self.tool_answer = tool_answer
        # whether aborted samples are continued
        self.resumes = bool(args.partial_rollout) or is_fully_async(args)
        self.notes: list[str] = []
        # an answer of the user's reward function, if it returns dicts
        self.entries: dict[str, object] = {}
        self.generated: list[Group] | None = None  # the result of the user's generate function
        self._folder = tempfile.TemporaryDirectory(prefix="slime-check-hooks-")
        self._engine: EngineProcess | None = None
        # As the run, but small and without what takes long or needs other programs.
        small = {
            "rollout_batch_size": PROMPTS,
            "over_sampling_batch_size": PROMPTS,
            "n_samples_per_prompt": min(args.n_samples_per_prompt, SAMPLES),
            "rollout_max_response_len": min(args.rollout_max_response_len, NEW_TOKENS),
            "save": self._folder.name,
            "load": None,
            "partial_rollout": False,
            "phase_timeout": limit,
            "reward_timeout": min(args.reward_timeout, limit),
            "reward_max_error_share": 0.0,
            "streaming_data": False,
            "num_data_workers": 0,
        }
        self.args = args.with_values(**small)
        self._reward_of_run = args.custom_rm_path

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        if self._engine is not None:
            self._engine.stop()
        self._folder.cleanup()

    def call(self, fn: Hook, *words: object) -> Any:
        """Call a plain hook under the deadline, and return its result."""
        return guarded(fn, lambda: fn(*words), self.limit).result

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        if not self.args.hf_checkpoint:
            raise CommandError(
                "--hf-checkpoint is missing: hooks are tested on samples, which need its tokenizer"
            )
        try:
            tokenizer: Tokenizer = load_tokenizer(self.args.hf_checkpoint)
            return tokenizer
        except (OSError, ValueError) as error:
            raise CommandError(
                f"--hf-checkpoint {self.args.hf_checkpoint} has no tokenizer ({error})"
            ) from error

    @functools.cached_property
    def source(self) -> RolloutDataSourceWithBuffer:
        """The built-in data source with the first prompts of ``--prompt-data``, or with artificial
        ones.
        """
        from slime.data.source import RolloutDataSourceWithBuffer

        # Of a large file, only the first rows are read.
        spec = self.args.prompt_data
        if spec and self.args.rollout_global_dataset and file_of(spec).is_file():
            if "@[" not in spec:
                self.args = self.args.with_values(prompt_data=f"{spec}@[:{PROMPTS}]")
            return RolloutDataSourceWithBuffer(self.args)
        self.notes.append("there is no readable --prompt-data, so an artificial prompt is used")
        return RolloutDataSourceWithBuffer(self.args, _MadeUp(bool(self.args.apply_chat_template)))

    @property
    def evaluates(self) -> bool:
        """Whether the reward function is that of an evaluation set, which replaces that of the run
        in ``args``.
        """
        return self.args.custom_rm_path != self._reward_of_run

    def evaluation(self) -> Args:
        """Return the arguments with the first prompts of every evaluation set only, and with short
        responses.
        """
        datasets = [
            {
                **asdict(one),
                "path": one.path if "@[" in one.path else f"{one.path}@[:{PROMPTS}]",
                "n_samples_per_eval_prompt": min(one.n_samples_per_eval_prompt or 1, SAMPLES),
                "max_response_len": min(one.max_response_len or NEW_TOKENS, NEW_TOKENS),
            }
            for one in resolve_eval_datasets(self.args)
        ]
        if not datasets:
            return self.args
        file = Path(self._folder.name) / "evaluation.yaml"
        file.write_text(json.dumps({"eval": {"datasets": datasets}}, default=str), encoding="utf-8")
        pairs = [str(one[key]) for one in datasets for key in ("name", "path")]
        return self.args.with_values(eval_config=str(file), eval_prompt_data=pairs)

    def prompts(self) -> list[Group]:
        """Return copies of the same groups without responses."""
        if not hasattr(self, "_first"):
            self._first = self.source.get_samples(PROMPTS)
        return copy.deepcopy(self._first)

    def answered(self, rewards: bool = True) -> list[Group]:
        """Return groups with responses: those of the user's generate function if it was tested,
        otherwise fixed ones.

        Of the fixed responses, the first one of each group is correct (the label in a box), and the
        others are wrong or truncated. The reward is 1 for the first response and 0 for the others.
        """
        # Each probe gets copies, since hooks change samples.
        groups = copy.deepcopy(self.generated) if self.generated is not None else self.prompts()
        for group in groups:
            for place, sample in enumerate(flatten(group)):
                if self.generated is None:
                    self._answer(sample, place)
                if rewards and sample.reward is None:
                    sample.reward = self.reward(1.0 if place == 0 else 0.0)
        return groups

    def reward(self, value: float) -> float | dict[str, Any]:
        """Return a reward in the form of the user's reward function."""
        key = self.args.reward_key
        return {**self.entries, key: value} if key else value

    def _answer(self, sample: Sample, place: int) -> None:
        label = sample.label[0] if isinstance(sample.label, list) and sample.label else sample.label
        texts = [
            f"</think>The answer is \\boxed{{{label}}}.\nAnswer: {label}",
            "I do not know.",
            "So 1 + 1 = 3 and",
        ]
        text = texts[min(place, 2)] + " then" * max(place - 2, 0)
        response = self.encode(text) or [0]
        prompt = prompt_ids(GenerateState(self.args), sample) or [0]
        sample.tokens = prompt + response
        sample.response = text
        sample.response_length = len(response)
        sample.rollout_log_probs = [-0.5] * len(response)
        sample.loss_mask = [1] * len(response)
        sample.weight_versions = ["0.0"]
        sample.status = Sample.Status.TRUNCATED if place >= 2 else Sample.Status.COMPLETED

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def start_engine(self) -> None:
        """Start the engine, if it is not running, and set ``args.sglang_router_ip`` and
        ``args.sglang_router_port``.
        """
        if self._engine is not None:
            return
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.utils import logging

        from slime.engines.launch import EngineSettings
        from slime.plugins.embedded.server import start_embedded_engine

        logging.disable_progress_bar()
        # A model that is as small as can be, with the vocabulary of the user's tokenizer.
        folder = Path(self._folder.name) / "model"
        tokenizer = load_tokenizer(self.args.hf_checkpoint)
        tokenizer.save_pretrained(folder)
        shape: dict[str, Any] = {
            **dict.fromkeys(("hidden_size", "intermediate_size"), 32),
            **dict.fromkeys(("num_hidden_layers", "num_key_value_heads"), 1),
            "num_attention_heads": 2,
            "max_position_embeddings": 1 << 15,
            "tie_word_embeddings": True,
            "vocab_size": len(tokenizer),
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        }
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(folder)
        # A real engine on the CPU, which the arguments name as the router.
        settings = EngineSettings(
            str(folder),
            dtype="float32",
            device="cpu",
            max_running_requests=16,
            max_total_tokens=1 << 16,
            threads=1,
        )
        self._engine = start_embedded_engine(
            settings, 0, log_path=Path(self._folder.name) / "engine.log"
        )
        self._engine.wait_ready(ENGINE_SECONDS)
        host, port = self._engine.url.removeprefix("http://").split(":")
        self.args = self.args.with_values(
            sglang_router_ip=host, sglang_router_port=int(port), rollout_backend="embedded"
        )


def one_step(data: TrainData) -> dict[str, object]:
    """Return settings with which all samples of ``data`` form one step, with one sample per
    micro-batch.
    """
    count = len(set(data["rollout_ids"]))
    return {"global_batch_size": count, "micro_batch_size": 1, "use_dynamic_batch_size": False}


class _MadeUp:
    """A data set of two artificial prompts, for users without ``--prompt-data``."""

    def __init__(self, messages: bool) -> None:
        self.messages = messages

    def __len__(self) -> int:
        return 2

    def shuffle(self, epoch_id: int) -> None:
        """The order does not matter."""

    def __getitem__(self, i: int) -> Sample:
        text = f"What is {i + 2} + 2?"
        prompt: str | list[dict[str, str]] = (
            [{"role": "user", "content": text}] if self.messages else text
        )
        return Sample(prompt=prompt, label=str(i + 4))


@dataclass
class Request:
    """One ``POST /generate``: the prompt and the answer."""

    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    aborted: bool = False
    cut: bool = False  # at the token limit
    of_text: bool = False  # the prompt was sent as a text


@dataclass
class ScriptedEngine:
    """A proxy of a real engine that replaces the generated text according to the number of the
    request.

    The real engine also answers each request, with one token, so that errors and all other fields
    are real.

    Args:
        url: URL of the real engine.
        answers: Texts of the first answers; all later answers are :data:`LAST`.
        abort_at: Index of the first request that is aborted, together with all later ones; None for
            no abort.
        on_abort: Called before the answer to an aborted request.
        refuses: Whether every request is refused, as one with a prompt that is too long.
    """

    url: str
    tokenizer: Tokenizer
    answers: list[str]
    abort_at: int | None
    on_abort: Callable[[], None]
    refuses: bool = False

    async def __aenter__(self) -> ScriptedEngine:
        self.requests: list[Request] = []
        self.runaway = asyncio.Event()  # set if the function keeps sending requests after the abort
        self._client = ClientSession()
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/generate", self._generate)
        app.router.add_route("*", "/{path:.*}", self._forward)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True
        )
        self.port = await listen(self._runner, "127.0.0.1")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._client.close()

    async def _forward(self, request: web.Request) -> web.Response:
        if request.path == "/abort_request":
            return web.json_response({"success": True})
        return await self._send(request.method, request.path_qs, await request.read())

    async def _send(self, method: str, path: str, body: bytes) -> web.Response:
        headers = {"Content-Type": "application/json"}
        async with self._client.request(
            method, f"{self.url}{path}", data=body or None, headers=headers
        ) as answer:
            return web.Response(
                status=answer.status, body=await answer.read(), content_type=answer.content_type
            )

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        single = isinstance(body, dict) and (
            isinstance(body.get("text"), str) or _flat(body.get("input_ids"))
        )
        # Only requests for a single sequence are scripted. Others get the answer of the real
        # engine.
        if not single or (body.get("sampling_params") or {}).get("n", 1) != 1:
            return await self._send("POST", "/generate", json.dumps(body).encode())
        # The number of the request decides about its answer.
        number = len(self.requests)
        params: dict[str, Any] = dict(body.get("sampling_params") or {})
        asked = Request(
            body.get("input_ids") or self.tokenizer.encode(body["text"]),
            of_text=not body.get("input_ids"),
        )
        self.requests.append(asked)
        if self.refuses:
            return web.json_response({"error": {"message": _TOO_LONG}}, status=400)
        # The real engine answers with one token, which the script replaces.
        one = {
            **body,
            "stream": False,
            "return_logprob": True,
            "sampling_params": {**params, "max_new_tokens": 1},
        }
        one["sampling_params"].pop("min_new_tokens", None)
        sent = await self._send("POST", "/generate", json.dumps(one).encode())
        if sent.status != 200 or not isinstance(sent.body, bytes):
            return sent
        answer = self._write(json.loads(sent.body), number, asked, params)
        if asked.aborted:
            self.on_abort()
            if self.abort_at is not None and number - self.abort_at >= _MOST_AFTER_ABORT:
                self.runaway.set()
        # The answer has what was asked for, and in the form that was asked for.
        if not body.get("return_logprob"):
            answer["meta_info"].pop("output_token_logprobs", None)
        if not body.get("stream"):
            return web.json_response(answer)
        response = event_stream()
        await response.prepare(request)
        await response.write(event(answer) + END)
        return response

    def _write(
        self, answer: dict[str, Any], number: int, asked: Request, params: dict[str, Any]
    ) -> dict[str, Any]:
        """Replace the text of the real engine's answer by the script's."""
        text = self.answers[number] if number < len(self.answers) else LAST
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        asked.aborted = self.abort_at is not None and number >= self.abort_at
        # An aborted answer has a part of its tokens, and later requests none, as in an engine that
        # stops.
        finish: JsonObject
        if asked.aborted:
            ids = ids[: len(ids) // 2] if number == self.abort_at else []
            text = self.tokenizer.decode(ids)
            finish = {"type": "abort", "message": "Abort in waiting queue"}
        else:
            text, ids, finish = self._ended(text, ids, params)
        asked.cut = finish["type"] == "length"
        asked.ids = ids
        asked.log_probs = [-0.5 - (number * 37 + place) % 64 / 64 for place in range(len(ids))]
        scored = [[value, token, None] for value, token in zip(asked.log_probs, ids, strict=True)]
        meta = {
            "finish_reason": finish,
            "completion_tokens": len(ids),
            "output_token_logprobs": scored,
        }
        answer["text"] = text
        answer["meta_info"] = answer["meta_info"] | meta
        if "output_ids" in answer:
            answer["output_ids"] = ids
        return answer

    def _ended(
        self, text: str, ids: list[int], params: dict[str, Any]
    ) -> tuple[str, list[int], JsonObject]:
        """End a text as an engine does: at a stop string, at the token limit, or with the end
        token.
        """
        stops = params.get("stop") or []
        stops = [stops] if isinstance(stops, str) else stops
        at, stop = min(
            ((text.find(stop), stop) for stop in stops if stop in text), default=(-1, "")
        )
        finish: JsonObject = {"type": "stop", "matched": self.tokenizer.eos_token_id}
        # At a stop string, which the answer keeps only if that is asked for.
        if at >= 0:
            count = next(
                n for n in range(1, len(ids) + 1) if stop in self.tokenizer.decode(ids[:n])
            )
            ids = ids[:count]
            finish = {"type": "stop", "matched": stop}
            text = text[: at + len(stop)] if params.get("no_stop_trim") else text[:at]
        elif self.tokenizer.eos_token_id is not None:
            ids = [*ids, self.tokenizer.eos_token_id]
        # At the token limit, after which nothing else of the answer counts.
        most = int(params.get("max_new_tokens") or len(ids))
        if len(ids) > most:
            ids = ids[:most]
            text = self.tokenizer.decode(ids)
            finish = {"type": "length", "length": most}
        return text, ids, finish


def _flat(ids: object) -> bool:
    return isinstance(ids, list) and bool(ids) and isinstance(ids[0], int)
