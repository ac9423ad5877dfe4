"""Whole runs in processes of their own: a tiny random model, a small data set, and a runner that
leaves nothing behind."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from forked_ranks import forked_ranks
from run_processes import MARK, alive, command_line
from seed_desk import Desk, lay_out

CHECKOUT = Path(__file__).resolve().parents[2]
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 2 layers with a byte-level tokenizer and a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny") / "model"
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.chat_template = CHAT_TEMPLATE
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def save_tiny(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Saves a random model of any class and config, in bfloat16 if asked, with the tokenizer of
    ``tiny_model``.
    """
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

    from slime.models.shards import side_files

    def save(
        architecture: type[PreTrainedModel], config: PretrainedConfig, bfloat16: bool = False
    ) -> Path:
        folder = tmp_path_factory.mktemp(str(config.model_type)) / "model"
        torch.manual_seed(0)
        model = architecture(config)
        (model.to(torch.bfloat16) if bfloat16 else model).save_pretrained(folder)
        for file in side_files(tiny_model):
            if not (folder / file).exists():
                shutil.copy2(tiny_model / file, folder / file)
        return folder

    return save


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """16 rows whose label is one letter; a random model writes it now and then."""
    file = tmp_path / "prompts.jsonl"
    rows = [
        {"prompt": f"Write the letter {'abcd'[i % 4]}.", "label": "abcd"[i % 4]} for i in range(16)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def reward_file(tmp_path: Path) -> Path:
    """A user's reward: the share of the response that is the label's letter."""
    file = tmp_path / "letters.py"
    file.write_text(
        "async def reward(args, sample, **kwargs):\n"
        "    return sum(c == sample.label for c in sample.response) + 0.01 * "
        "(len(sample.response) % 7)\n"
    )
    return file


@dataclass
class Result:
    """What a finished run left."""

    code: int
    output: str
    folder: Path
    marker: str

    def metrics(self, key: str = "rollout/step") -> list[dict]:
        rows = [
            json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()
        ]
        return [row for row in rows if key in row]


@dataclass
class Runner:
    """Starts ``train.py`` or another script of the checkout in ``tmp``, and ends what it
    started.
    """

    tmp: Path
    marker: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: list[subprocess.Popen] = field(default_factory=list)

    def start(
        self, *flags: object, script: str = "train.py", env: dict[str, str] | None = None
    ) -> subprocess.Popen:
        return self.spawn([sys.executable, str(CHECKOUT / script), *map(str, flags)], env)

    def spawn(self, command: list[str], env: dict[str, str] | None = None) -> subprocess.Popen:
        environment = {**os.environ, MARK: self.marker, "PYTHONPATH": str(CHECKOUT), **(env or {})}
        environment.pop("MKL_CBWR", None)  # a user has not set it either
        environment.pop("RAY_ADDRESS", None) if not env or "RAY_ADDRESS" not in env else None
        process = subprocess.Popen(
            command,
            cwd=self.tmp,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def wait_until(
        self, process: subprocess.Popen, reached: Callable[[], object], pause: float = 0.05
    ) -> None:
        """Wait until a run has come so far; if it ends before, or takes longer, show its output."""
        until = time.monotonic() + 300
        while not reached():
            if process.poll() is not None or time.monotonic() > until:
                self.stop()  # its output is complete only then
                pytest.fail(f"not there at its end, or after 300 s:\n{process.communicate()[0]}")
            time.sleep(pause)

    def finish(self, process: subprocess.Popen, name: str, timeout: float = 240) -> Result:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.stop()
            output, _ = process.communicate()
            pytest.fail(f"the run did not end within {timeout} s; it printed:\n{output}")
        return Result(process.returncode, output, self.tmp / "outputs" / name, self.marker)

    def run(
        self, *flags: object, name: str = "run", timeout: float = 240, **more: object
    ) -> Result:
        process = self.start("--run-name", name, *flags, **more)  # type: ignore[arg-type]
        return self.finish(process, name, timeout)

    def inline(self, *flags: object, name: str = "run", script: str = "train.py") -> Result:
        """Run the loop of a script with ``--inline`` in this process: a second instead of half a
        minute.
        """
        return self.here(["--run-name", name, "--inline", *map(str, flags)], name, script)

    def here(self, argv: list[str], name: str, script: str = "train.py") -> Result:
        """Run a command line, which asks for ``--inline``, in this process."""
        from slime.cluster import actors
        from slime.cluster.checks import parse_and_check
        from slime.config.parser import ConfigError

        loop = importlib.import_module(script.removesuffix(".py")).train
        said, code = io.StringIO(), 0
        with (
            contextlib.chdir(self.tmp),
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
        ):
            try:
                loop(parse_and_check(argv, asynchronous=script == "train_async.py"))
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else 1
            except ConfigError as error:
                code, _ = 2, print(error)
            except Exception:
                code, _ = 1, traceback.print_exc()
            finally:
                actors.use(None)  # later tests of this process use Ray
        return Result(code, said.getvalue(), self.tmp / "outputs" / name, self.marker)

    def command(self, *words: object, fork: bool = True) -> Result:
        """Run ``slime WORDS`` in this process, with ranks that are forked, or start as a user's
        do; its output is what it prints on the standard output.
        """
        from slime.cli.main import main

        said = io.StringIO()
        ranks = forked_ranks() if fork else contextlib.nullcontext()
        with contextlib.chdir(self.tmp), contextlib.redirect_stdout(said), ranks:
            code = main([str(word) for word in words])
        return Result(code, said.getvalue(), self.tmp, self.marker)

    def alive(self) -> list[psutil.Process]:
        """Processes that carry this test's mark in their environment."""
        return alive(self.marker)

    def wait_gone(self, seconds: float = 120) -> list[str]:
        """Wait until nothing of the run is alive; returns the command lines of what is left."""
        until = time.monotonic() + seconds
        while (left := self.alive()) and time.monotonic() < until:
            time.sleep(0.25)
        return [" ".join(command_line(process))[:200] for process in left]

    def stop(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
        for process in self.alive():
            process.kill()


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(tmp_path)
    yield runner
    runner.stop()


@pytest.fixture
def flags(tiny_model: Path, prompts: Path, reward_file: Path) -> list[object]:
    """A run of a few seconds: 4 prompts × 4 samples × 8 tokens."""
    return [
        "--hf-checkpoint", tiny_model, "--prompt-data", prompts, "--apply-chat-template",
        "--custom-rm-path", f"{reward_file}:reward", "--rollout-batch-size", 4, "--n-samples-per-prompt", 4,
        "--rollout-max-response-len", 8, "--num-rollout", 3, "--lr", "1e-3", "--train-backend", "fsdp",
        "--rollout-backend", "embedded", "--rollout-shuffle",
    ]  # fmt: skip


@pytest.fixture
def desk(runner: Runner, tiny_model: Path, tmp_path: Path) -> Desk:
    """Where the commands of the original specification are typed."""
    return lay_out(runner, tiny_model, tmp_path)


@pytest.fixture
def long_answers(tmp_path: Path) -> str:
    """A generate function whose answers have their whole length, so that updates meet them on a
    busy machine too.
    """
    file = tmp_path / "long_answers.py"
    file.write_text(
        "from slime.rollout.generate import generate as ask\n"
        "async def generate(args, sample, sampling_params):\n"
        "    return await ask(args, sample, sampling_params | {'ignore_eos': True})\n"
    )
    return f"{file}:generate"
