"""Training of Hugging Face models with PyTorch's FSDP2, data parallel."""
