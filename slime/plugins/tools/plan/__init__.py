"""``slime plan``: whether a run fits on its GPUs, how long its steps take, and which layout suits
it; without a GPU.
"""
