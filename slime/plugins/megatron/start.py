"""The training backend of the name ``megatron``: megatron-core is prepared before any code that uses
it is imported.
"""

from slime.plugins.megatron.core import prepare

prepare()

from slime.plugins.megatron.backend import MegatronBackend  # noqa: E402

__all__ = ["MegatronBackend"]
