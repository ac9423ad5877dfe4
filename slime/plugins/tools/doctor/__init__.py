"""``slime doctor``: why a run hung, died, slowed down or stopped learning, from the files that it
leaves.
"""
