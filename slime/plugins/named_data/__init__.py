"""Data sets by name, which the package ``datasets`` provides (``--prompt-data
openai/gsm8k:main:train``).
"""

from slime.registry import register


def parts() -> None:
    """Register the reader of names."""
    register("data name", "datasets", "slime.plugins.named_data.named_data:data_name")
