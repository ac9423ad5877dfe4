"""Training from Python: ``slime.train`` and ``slime.Trainer`` over the parts of a run in
:mod:`slime.cluster`.
"""
