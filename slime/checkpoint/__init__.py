"""One atomic snapshot of the whole run."""
