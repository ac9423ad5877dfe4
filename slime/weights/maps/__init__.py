"""Hugging Face ↔ Megatron: one file per model family, shared by loading, weight sync, export and converters."""
