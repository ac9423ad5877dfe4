"""``python -m slime.engines.embedded.server``: the documented way to start an embedded engine by
hand.
"""

from slime.plugins.embedded.server import main

if __name__ == "__main__":
    main()
