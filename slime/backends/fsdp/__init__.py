"""Data-parallel training of Hugging Face models with PyTorch's FSDP2."""
