"""An engine in this process that says what a test gives it, and a tokenizer of bytes: for
conversations with tools.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from make_args import make_args

from slime.config.args import FLAGS
from slime.data.sample import Sample

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(folder: Path) -> Path:
    """One token per byte, a chat template whose turns end with ``<eos>``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate([*letters, "<eos>"])}, merges=[])
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", pad_token="<eos>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


class Script:
    """Says one text a request, up to and with a stop string. ``abort`` after a text: it was cut
    there.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, **more: Any) -> None:
        from slime.rollout import generate
        from slime.rollout.state import GenerateState

        changes = {
            "hf_checkpoint": str(folder),
            "rollout_max_response_len": 2000,
            "max_turns": 6,
        } | more
        self.args = make_args(**{name: value for name, value in changes.items() if name in FLAGS})
        for name in changes.keys() - FLAGS.keys():  # those of the example's settings file
            setattr(self.args, name, changes[name])
        self.params = GenerateState(self.args).sampling_params
        self.tokenizer = GenerateState(self.args).tokenizer
        self.says: list[str] = []
        self.asked: list[str] = []
        monkeypatch.setattr(generate, "ask_engine", self.answer)

    async def answer(self, state: Any, sample: Sample, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(self.tokenizer.decode(body["input_ids"]))
        text, cut, _ = self.says.pop(0).partition("ABORT")
        for stop in body["sampling_params"]["stop"] or []:
            head, found, _ = text.partition(stop)
            text = head + found
        ids = self.tokenizer(text)["input_ids"]
        kind = "abort" if cut else "stop"
        meta = {
            "output_token_logprobs": [[-0.5, i, None] for i in ids],
            "finish_reason": {"type": kind},
        }
        return {"text": text, "meta_info": meta | {"weight_version": "1"}}

    def trained(self, sample: Sample) -> str:
        """What of the response has a loss."""
        response = sample.tokens[-sample.response_length :]
        assert sample.loss_mask is not None
        return self.tokenizer.decode(
            [i for i, mask in zip(response, sample.loss_mask, strict=True) if mask]
        )
