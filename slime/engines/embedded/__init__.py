"""The embedded engine: a server of our own that speaks SGLang's native HTTP on torch and transformers.

``server.py`` is the process: aiohttp routes in the main thread, the model in one other thread
(``engine.py``). ``scheduler.py`` decides which tokens the next forward computes, ``runner.py`` computes
them, ``sampling.py`` samples. Nothing here is imported by the rest of slime; clients use HTTP.
"""
