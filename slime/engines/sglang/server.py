"""``python -m slime.engines.sglang.server <SGLang's options>`` runs ``sglang.launch_server``, also on a CPU.

SGLang starts its scheduler and detokenizer with the start method ``spawn``, so each of these processes first runs the
top level of this module. For this reason the stand-ins for the kernels that are absent on a CPU are installed there.
"""

from __future__ import annotations

import os
import runpy

if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    from slime.engines.sglang.cpu_kernels import install

    install()

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
