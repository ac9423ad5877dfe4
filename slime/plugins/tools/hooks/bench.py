"""The test environment of hooks: the first prompts of the user's data, responses to them, and a real engine."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from slime.cli.errors import CommandError
from slime.config.args import Args
from slime.config.files import file_of
from slime.config.rollout import is_fully_async
from slime.data.eval_config import resolve_eval_datasets
from slime.data.sample import Group, Sample, flatten
from slime.data.tokenizers import load_tokenizer

if TYPE_CHECKING:
    from slime.data.convert import TrainData
    from slime.data.source import RolloutDataSourceWithBuffer
    from slime.engines.process import EngineProcess
    from slime.types import Tokenizer

PROMPTS = 2
SAMPLES = 4
NEW_TOKENS = 24
ENGINE_SECONDS = 90.0


class Bench:
    """Small versions of a run's arguments and data. It is a context manager, which stops its engine at the end.

    The engine is the embedded one with a tiny random model and the user's vocabulary. Its responses make no sense, but
    all their fields are real.

    Args:
        limit: Deadline of each call in seconds.
        tool_answer: An answer of the model after which generate functions must continue with a tool turn.
    """

    def __init__(self, args: Args, limit: float, tool_answer: str | None = None) -> None:
        self.limit, self.tool_answer = limit, tool_answer
        self.resumes = bool(args.partial_rollout) or is_fully_async(args)  # whether aborted samples are continued
        self.notes: list[str] = []
        self.entries: dict[str, object] = {}  # an answer of the user's reward function, if it returns dicts
        self.generated: list[Group] | None = None  # the result of the user's generate function
        self._folder = tempfile.TemporaryDirectory(prefix="slime-check-hooks-")
        self._engine: EngineProcess | None = None
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

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        if not self.args.hf_checkpoint:
            raise CommandError("--hf-checkpoint is missing: hooks are tested on samples, which need its tokenizer")
        try:
            tokenizer: Tokenizer = load_tokenizer(self.args.hf_checkpoint)
            return tokenizer
        except (OSError, ValueError) as error:
            raise CommandError(f"--hf-checkpoint {self.args.hf_checkpoint} has no tokenizer ({error})") from error

    @functools.cached_property
    def source(self) -> RolloutDataSourceWithBuffer:
        """The built-in data source with the first prompts of ``--prompt-data``, or with artificial ones."""
        from slime.data.source import RolloutDataSourceWithBuffer

        spec = self.args.prompt_data
        if spec and self.args.rollout_global_dataset and file_of(spec).is_file():
            if "@[" not in spec:
                self.args = self.args.with_values(prompt_data=f"{spec}@[:{PROMPTS}]")
            return RolloutDataSourceWithBuffer(self.args)
        self.notes.append("there is no readable --prompt-data, so an artificial prompt is used")
        return RolloutDataSourceWithBuffer(self.args, _MadeUp(bool(self.args.apply_chat_template)))

    @property
    def evaluates(self) -> bool:
        """Whether the reward function is that of an evaluation set, which replaces that of the run in ``args``."""
        return self.args.custom_rm_path != self._reward_of_run

    def evaluation(self) -> Args:
        """Return the arguments with the first prompts of every evaluation set only, and with short responses."""
        datasets = []
        for one in resolve_eval_datasets(self.args):
            path = one.path if "@[" in one.path else f"{one.path}@[:{PROMPTS}]"
            few = min(one.n_samples_per_eval_prompt or 1, SAMPLES)
            short = min(one.max_response_len or NEW_TOKENS, NEW_TOKENS)
            datasets.append({**asdict(one), "path": path, "n_samples_per_eval_prompt": few, "max_response_len": short})
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
        """Return groups with responses: those of the user's generate function if it was tested, otherwise fixed ones.

        Of the fixed responses, the first one of each group is correct (the label in a box), and the others are wrong or
        truncated. The reward is 1 for the first response and 0 for the others.
        """
        groups = copy.deepcopy(self.generated) if self.generated is not None else self.prompts()
        for group in groups:
            for place, sample in enumerate(flatten(group)):
                if self.generated is None:
                    self._answer(sample, place)
                if rewards and sample.reward is None:
                    value, key = (1.0 if place == 0 else 0.0), self.args.reward_key
                    sample.reward = {**self.entries, key: value} if key else value
        return groups

    def _answer(self, sample: Sample, place: int) -> None:
        label = sample.label[0] if isinstance(sample.label, list) and sample.label else sample.label
        texts = [f"</think>The answer is \\boxed{{{label}}}.\nAnswer: {label}", "I do not know.", "So 1 + 1 = 3 and"]
        text = texts[min(place, 2)] + " then" * max(place - 2, 0)
        prompt = self.encode_prompt(sample)
        response = self.encode(text) or [0]
        sample.tokens, sample.response, sample.response_length = prompt + response, text, len(response)
        sample.rollout_log_probs = [-0.5] * len(response)
        sample.loss_mask = [1] * len(response)
        sample.weight_versions = ["0.0"]
        sample.status = Sample.Status.TRUNCATED if place >= 2 else Sample.Status.COMPLETED

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def encode_prompt(self, sample: Sample) -> list[int]:
        if isinstance(sample.prompt, str):
            return self.encode(sample.prompt) or [0]
        if self.tokenizer.chat_template:
            return self.encode(self.tokenizer.apply_chat_template(sample.prompt, tokenize=False))
        return self.encode("\n".join(str(message.get("content")) for message in sample.prompt)) or [0]

    def start_engine(self) -> None:
        """Start the engine, if it is not running, and set ``args.sglang_router_ip`` and ``args.sglang_router_port``."""
        if self._engine is not None:
            return
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.utils import logging

        from slime.engines.launch import EngineSettings
        from slime.plugins.embedded.launch import start_embedded_engine

        logging.disable_progress_bar()
        folder = Path(self._folder.name) / "model"
        tokenizer = load_tokenizer(self.args.hf_checkpoint)
        tokenizer.save_pretrained(folder)
        shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        torch.manual_seed(0)
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                **shape,  # type: ignore[arg-type]
                num_key_value_heads=1,
                max_position_embeddings=1 << 15,
                tie_word_embeddings=True,
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
        ).save_pretrained(folder)
        settings = EngineSettings(
            str(folder), dtype="float32", device="cpu", max_running_requests=16, max_total_tokens=1 << 16, threads=1
        )
        self._engine = start_embedded_engine(settings, 0, log_path=Path(self._folder.name) / "engine.log")
        self._engine.wait_ready(ENGINE_SECONDS)
        host, port = self._engine.url.removeprefix("http://").split(":")
        self.args = self.args.with_values(
            sglang_router_ip=host, sglang_router_port=int(port), rollout_backend="embedded"
        )


def one_step(args: Args, data: TrainData) -> Args:
    """Return ``args`` with which all samples of ``data`` form one step, with one sample per micro-batch."""
    count = len(set(data["rollout_ids"]))
    return args.with_values(global_batch_size=count, micro_batch_size=1, use_dynamic_batch_size=False)


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
        prompt: str | list[dict[str, str]] = [{"role": "user", "content": text}] if self.messages else text
        return Sample(prompt=prompt, label=str(i + 4))
