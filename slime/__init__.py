"""slime: LLM post-training for RL scaling."""

__version__ = "0.1.0"
