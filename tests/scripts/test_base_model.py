"""The quickstart of a base model: prompts that begin with its first token, and what that is worth."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture
def quickstart() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "base_quickstart", CHECKOUT / "scripts" / "quickstart" / "run.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_base_model(folder: Path) -> Path:
    """A tokenizer of single letters, as without a chat template, and a configuration."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    letters = {chr(code): code - 29 for code in range(32, 127)} | {"\n": 2}
    words = Tokenizer(WordLevel({"<unk>": 0, "<bos>": 1, **letters}, unk_token="<unk>"))
    words.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<bos>", unk_token="<unk>", eos_token="\n"
    )
    tokenizer.save_pretrained(folder)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_prompts_begin_with_the_models_first_token(quickstart: ModuleType, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from slime.rollout.prompts import encode

    model = write_base_model(tmp_path / "model")
    rows, _ = quickstart.make_products(tmp_path, seed=1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    for line in quickstart.few_shot(rows, model).read_text().splitlines():
        row = json.loads(line)
        ids = encode(tokenizer, row["prompt"])  # as a rollout does it
        assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1
        assert tokenizer.unk_token_id not in ids
        solved, _, question = row["prompt"].rpartition("Q: ")
        a, b = row["metadata"].values()
        assert question == f"What is {a} times {b}?\nA:" and row["label"] == str(a * b)
        assert f"What is {a} times {b}?" not in solved


def test_a_base_model_gets_texts_and_no_template(quickstart: ModuleType, tmp_path: Path) -> None:
    from slime.config.parser import parse_args

    model = write_base_model(tmp_path / "model")
    options = argparse.Namespace(seed=1, num_rollout=12, output_dir=tmp_path)
    data = quickstart.make_products(tmp_path, seed=1)
    args = parse_args(quickstart.base_flags(options, model, *data))
    assert not args.apply_chat_template and args.rollout_stop == ["\n"]
    assert args.lr == float(quickstart.BASE_LR) and args.rollout_max_response_len == 8
    assert Path(args.eval_prompt_data[1]).is_file() and Path(args.prompt_data).is_file()


@pytest.mark.slow
@pytest.mark.long
def test_gemma_is_lost_without_its_first_token(quickstart: ModuleType, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from slime.rollout.prompts import encode

    folder = Path(os.environ.get("SLIME_TEST_GEMMA") or CHECKOUT / "models" / "Gemma-3-270M")
    if not (folder / "config.json").is_file():
        pytest.skip("no Gemma-3-270M: slime fetch-model gemma3-270m --accept-gemma-terms")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = quickstart.few_shot(quickstart.make_products(tmp_path, seed=1)[1], folder)
    texts = ["<bos>Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday"]
    texts += [json.loads(line)["prompt"] for line in rows.read_text().splitlines()[:4]]

    def loss(ids: list[int]) -> float:
        with torch.no_grad():
            scores = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        at = torch.tensor(ids[1:])
        return -float(scores[:-1].gather(1, at[:, None])[1:].mean())

    for text in texts:
        ids = encode(tokenizer, text)
        assert ids[0] == tokenizer.bos_token_id
        assert loss(ids) < loss(ids[1:]) - 0.2, text
