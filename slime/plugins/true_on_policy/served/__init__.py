"""The package that SGLang's servers load with ``SGLANG_EXTERNAL_MODEL_PACKAGE``.

SGLang goes on with classes of its own if a module of such a package cannot be imported, but not if
the package itself cannot be. So the module is imported here.
"""

from slime.plugins.true_on_policy.served import dense

__all__ = ["dense"]
