"""Training backends with one small interface, and the loss path that they share."""
