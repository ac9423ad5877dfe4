"""The embedded engine: an inference server with SGLang's native HTTP interface, built on torch and
transformers.

``server.py`` is the process. The main thread serves the aiohttp routes, and one other thread runs
the model (``engine.py``). ``scheduler.py`` selects the tokens of the next forward, ``runner.py``
computes them, and ``sampling.py`` samples from the logits. The rest of slime imports nothing from
here; clients use HTTP.
"""

from slime.registry import register


def parts() -> None:
    """Register the engine with its flags."""
    here = "slime.plugins.embedded"
    register("engine", "embedded", f"{here}.launch:start", flags=f"{here}.config:EmbeddedFlags")
