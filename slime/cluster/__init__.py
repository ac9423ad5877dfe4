"""Ray: placement, train group, rollout manager, deadlines, fault handling."""

import os

# A private cluster keeps to the loopback. Ray resolves a loopback address to the host's public one and
# listens on all interfaces, unless its switch for desktop systems (whatever its name says, it works
# everywhere) is off. It is read when ray is first imported, and libraries import ray on their own.
if not os.environ.get("RAY_ADDRESS"):
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
