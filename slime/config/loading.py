"""One lock for all that loads models and tokenizers.

In an inline run, engine, trainer and rollout manager load theirs on threads of one process, and the imports of
transformers on two threads at once can fail.
"""

from __future__ import annotations

import threading

ONE_AT_A_TIME = threading.RLock()
