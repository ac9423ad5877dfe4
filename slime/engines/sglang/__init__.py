"""SGLang as the inference engine: unmodified releases from PyPI, with one server process and its
children per engine.

The processes of slime never import SGLang. Only the server (:mod:`slime.engines.sglang.server`) and
the check of its options (:mod:`slime.engines.sglang.check`) do, each in its own process.
"""
