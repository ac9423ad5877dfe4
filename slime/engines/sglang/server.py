"""``python -m slime.engines.sglang.server <SGLang's options>``: stock ``sglang.launch_server``, also on the CPU.

SGLang starts its scheduler and detokenizer by spawning, and each of them runs the top level of this module again
before anything else: that is where the stand-ins for kernels absent on a CPU must be installed.
"""

from __future__ import annotations

import os
import runpy

if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    from slime.engines.sglang.cpu_kernels import install

    install()

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
