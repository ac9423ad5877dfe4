"""Filters that keep or drop a finished group (``--dynamic-sampling-filter-path``)."""
