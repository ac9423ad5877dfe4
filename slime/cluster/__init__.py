"""Ray: placement, train group, rollout manager, deadlines, fault handling."""

import os
from pathlib import Path

# A private cluster keeps to the loopback. Ray resolves a loopback address to the host's public one and
# listens on all interfaces, unless its switch for desktop systems (whatever its name says, it works
# everywhere) is off. It is read when ray is first imported, and libraries import ray on their own.
if not os.environ.get("RAY_ADDRESS"):
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
elif (Path.home() / ".ray" / "auth_token").exists():
    # `ray start` asks for a token as soon as one exists, while a joining driver has to be told to send it.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
