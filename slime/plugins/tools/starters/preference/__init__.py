"""A task of pairs: a response that is preferred, and one that is not."""
