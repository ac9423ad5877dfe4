"""Weights on their way from the trainer to the engines: HF names, buckets, transports, audit."""
