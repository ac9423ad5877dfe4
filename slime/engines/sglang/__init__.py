"""SGLang as the inference engine: stock PyPI releases, one server process (tree) per engine.

slime's own process never imports SGLang; only the server (:mod:`slime.engines.sglang.server`) and the check of
the options (:mod:`slime.engines.sglang.check`) do, in processes of their own.
"""
