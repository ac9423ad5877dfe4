"""Samples, data sets, the data source with its buffer, batches and their schedule."""
