"""``slime check-algo``: an estimator beside the exact gradient of the expected reward, on a policy
so small that every response can be enumerated.
"""
