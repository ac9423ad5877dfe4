"""What the end of a run and ``slime summary`` show: the figures of a run, its table and its
picture.
"""
