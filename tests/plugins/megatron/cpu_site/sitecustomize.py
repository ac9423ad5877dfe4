"""First on PYTHONPATH of a training process: megatron-core finds its CPU (``cpu_shim.py``) when
slime imports it.

Not before: Ray wants its workers to answer within a minute, and the imports may take longer on a
busy machine.
"""

import importlib.abc
import importlib.util
import sys
from pathlib import Path

TRIGGER = "slime.plugins.megatron.core"


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != TRIGGER:
            return None
        sys.meta_path.remove(self)
        sys.path.append(str(Path(__file__).resolve().parents[1]))
        import cpu_shim

        cpu_shim.install()
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            prepare = module.prepare

            def prepare_on_cpu():
                version = prepare()
                cpu_shim.install_megatron()
                return version

            module.prepare = prepare_on_cpu

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
