"""Documented path of the embedded engine; the code is in :mod:`slime.plugins.embedded`."""
