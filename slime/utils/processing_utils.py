"""Documented import path of the tokenizer and processor loaders; the code is in :mod:`slime.data.tokenizers`."""

from slime.data.tokenizers import load_processor, load_tokenizer

__all__ = ["load_processor", "load_tokenizer"]
