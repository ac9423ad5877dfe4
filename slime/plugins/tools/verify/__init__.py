"""Compare a small model on any backend and layout with plain transformers (``slime verify``)."""
