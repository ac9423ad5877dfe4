"""Import paths of older scripts; the code is in :mod:`slime.plugins.compat`."""
