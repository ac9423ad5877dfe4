"""Training backends behind one small interface, and the loss path that they share."""
