"""``slime ui``: a local page that shows runs from the files that they leave, also while they go
on.
"""
