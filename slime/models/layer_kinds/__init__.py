"""The kinds of layers that slime computes: one file each, listed in :mod:`slime.models.layer_kinds.registry`."""
