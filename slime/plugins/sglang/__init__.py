"""SGLang as the inference engine: unmodified releases from PyPI, with one server process and its
children per engine.

The processes of slime never import SGLang. Only the server (:mod:`slime.plugins.sglang.server`) and
the check of its options (:mod:`slime.plugins.sglang.check`) do, each in its own process.
"""

from slime.registry import register


def parts() -> None:
    """Register the engine, the options of its servers and of its router, and their checks."""
    register(
        "engine",
        "sglang",
        "slime.plugins.sglang.launch:start",
        package=("sglang", "'slime-rl[sglang]'"),
    )
    register("options", "sglang", "slime.plugins.sglang.options:SGLANG")
    register("options", "router", "slime.plugins.sglang.options:ROUTER")
    register("groups", "sglang", "slime.plugins.sglang.options:read_server_groups")
    register("rules", "sglang", "slime.plugins.sglang.options:RULES")
    register("resolver", "keys of servers", "slime.plugins.sglang.options:check_keys")
    register("check", "options of servers", "slime.plugins.sglang.check:check_server_options")
