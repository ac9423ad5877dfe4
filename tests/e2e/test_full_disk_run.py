"""A run whose disk becomes full while it saves: it pauses, and goes on when there is room."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from needs import MIB, fill, small_disk
from test_train_megatron import on_cpu
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]

HOOK = '''
"""Training waits until the disk is full: otherwise a snapshot could be written before that."""
import time
from pathlib import Path


def wait(args, rollout_id, rollout_data):
    while not Path(__file__).with_name("filled").exists():
        time.sleep(0.05)
'''


@pytest.fixture
def larger_model(save_tiny: Callable[..., Path]) -> Path:
    """A model with matrices of 2 MiB, which no buffer holds: a snapshot takes 22 MiB, an export
    7.
    """
    config = LlamaConfig(
        vocab_size=258, hidden_size=256, intermediate_size=2048, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=1, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    return save_tiny(LlamaForCausalLM, config)


@pytest.mark.parametrize(
    "more",
    [
        ["--save", "disk/saved", "--inline"],
        pytest.param(["--save", "disk/saved", "--async-save"], marks=pytest.mark.long),
        pytest.param(
            ["--save", "saved", "--save-hf", "disk/hf/{rollout_id}"], marks=pytest.mark.long
        ),
        pytest.param(
            ["--save", "disk/saved", *on_cpu()], marks=[pytest.mark.megatron, pytest.mark.long]
        ),
    ],
    ids=["fsdp", "async-save", "save-hf", "megatron"],
)
def test_a_full_disk_pauses_the_run(
    runner, flags, larger_model: Path, tmp_path: Path, more: list[object]
) -> None:
    flags[flags.index("--hf-checkpoint") + 1] = larger_model
    (tmp_path / "hook.py").write_text(HOOK)
    flags += ["--rollout-data-postprocess-path", f"{tmp_path / 'hook.py'}:wait"]
    with small_disk(tmp_path / "disk", mib=40) as disk:
        process = runner.start(
            "--run-name", "run", *flags, *more, "--num-rollout", 1, "--save-interval", 1
        )
        said = ""

        def read_until(words: str) -> None:
            nonlocal said
            while words not in said:
                line = process.stdout.readline()
                assert line, said
                said += line

        read_until("audit weights")  # the start has found room for a snapshot
        small = [disk / f"small-{number}" for number in range(5)]
        for file in small:
            file.write_bytes(bytes(2 * MIB))
        ballast = fill(disk, free=5)
        (tmp_path / "filled").touch()
        read_until("the run is paused")
        ballast.unlink()
        # The run goes on when there is more room than when it began to wait, which may be after
        # this, or else after a minute.
        for file in small:
            time.sleep(1)
            file.unlink()
        said += process.stdout.read()
        assert process.wait() == 0, said
        assert f"the disk of disk/{'hf' if '--save-hf' in more else 'saved'}" in said, said
        assert "there is room again: rollout 0 is being saved" in said
        name = (
            "hf/0/model.safetensors" if "--save-hf" in more else "saved/iter_0000000/manifest.json"
        )
        assert (disk / name).is_file()
    assert runner.wait_gone() == []
