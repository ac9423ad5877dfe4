"""Hugging Face models as both the trainer and the embedded engine use them."""
