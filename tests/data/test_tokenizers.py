"""A tokenizer that is loaded without ``AutoTokenizer`` is the one that ``AutoTokenizer`` loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slime.data.tokenizers import DIRECT_CLASSES, load_cached, load_tokenizer, preload_tokenizer

PAIRS = [
    (model, name + end)
    for model, names in DIRECT_CLASSES.items()
    for name in names
    for end in ("", "Fast")
]


def folder_of(folder: Path, model_type: str, tokenizer_class: str, **more: object) -> Path:
    """A byte-level tokenizer of 260 tokens, saved as a checkpoint of ``model_type`` would have
    it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(
            vocab={c: i for i, c in enumerate(["<pad>", "<eos>", *letters, "th"])},
            merges=[("t", "h")],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "chat_template": "{{ messages[0].content }}",
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"tokenizer_class": tokenizer_class} | more)
    )
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


@pytest.mark.parametrize(("model_type", "tokenizer_class"), PAIRS)
def test_the_same_tokenizer_as_autotokenizer(
    tmp_path: Path, model_type: str, tokenizer_class: str
) -> None:
    from transformers import AutoTokenizer

    folder = folder_of(tmp_path / "model", model_type, tokenizer_class)
    ours, theirs = (
        load_tokenizer(folder, trust_remote_code=True),
        AutoTokenizer.from_pretrained(folder),
    )
    assert type(ours) is type(theirs)
    text = "the weather, naïve: 12+3 <eos>"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    chat = [{"role": "user", "content": "the"}]
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert {k: str(v) for k, v in ours.init_kwargs.items()} == {
        k: str(v) for k, v in theirs.init_kwargs.items()
    }


@pytest.mark.parametrize(
    ("model_type", "tokenizer_class", "more"),
    [
        # AutoTokenizer overrides the class that the checkpoint names
        ("qwen2", "PreTrainedTokenizerFast", {}),
        ("llama", "LlamaTokenizerFast", {}),
        ("opt", "GPT2Tokenizer", {}),
        ("llama", "GPT2Tokenizer", {"auto_map": {"AutoTokenizer": [None, "tokenization_x.X"]}}),
    ],
)
def test_whatever_is_not_in_the_table_is_left_to_autotokenizer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model_type: str,
    tokenizer_class: str,
    more: dict[str, object],
) -> None:
    import transformers

    asked: list[str] = []

    class Asked:
        @staticmethod
        def from_pretrained(name: str, **kwargs: object) -> str:
            asked.append(name)
            return "theirs"

    monkeypatch.setattr(transformers, "AutoTokenizer", Asked)
    folder = folder_of(tmp_path / "model", model_type, tokenizer_class, **more)
    assert load_tokenizer(folder) == "theirs" and asked == [str(folder)]


def test_code_of_a_checkpoint_is_refused_and_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where transformers is not told, it asks in the terminal, and only its own call would hear
    the answer.
    """
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "y")
    code = {"auto_map": {"AutoTokenizer": [None, "tokenization_x.X"]}}
    folder = folder_of(tmp_path / "model", "of_its_own", "XTokenizer", **code)
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_tokenizer(folder)
    assert not asked


@pytest.mark.parametrize("name", ["models/techer", "techer", "./techer", "a/b/techer"])
def test_a_mistyped_folder_is_not_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"{name} does not exist"):
        load_tokenizer(name)


@pytest.mark.real
def test_neither_torch_nor_modeling_code_is_imported_for_it(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "llama", "PreTrainedTokenizerFast")
    code = (
        "import sys; from slime.data.tokenizers import load_tokenizer\n"
        f"tokenizer = load_tokenizer({str(folder)!r}, trust_remote_code=False)\n"
        "tokenizer.apply_chat_template([{'role': 'user', 'content': 'the'}])\n"
        "print([name for name in ('torch', 'transformers.modeling_utils') if name in sys.modules])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert printed.strip() == "[]"


@pytest.mark.parametrize("trust", [False, True])
def test_a_tokenizer_that_was_loaded_before_is_the_one_of_the_run(
    smollm2: Path, tmp_path: Path, trust: bool
) -> None:
    """With the arguments of ``GenerateState.tokenizer``; a folder without one is an error of
    whoever needs it.
    """
    preload_tokenizer(smollm2, trust)
    loads = load_cached.cache_info().misses
    load_tokenizer(smollm2, **({"trust_remote_code": True} if trust else {}))
    assert load_cached.cache_info().misses == loads
    preload_tokenizer(tmp_path, trust)
