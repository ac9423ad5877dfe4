"""Verifiers that misbehave in every way that the pool must survive. Imported by verifier processes
only.
"""

import os
import sys
import threading
import time


def double(value):
    return 2 * value


def pid():
    return os.getpid()


def forever():
    while True:
        pass


def swallow():
    while True:
        try:
            time.sleep(0.01)
        except BaseException:
            continue


def hold_the_lock():
    """One C call that keeps the interpreter lock: no thread or signal handler of this process gets
    a turn.
    """
    return 7 ** (7**9) % 10


def hoard():
    hoard_of_bytes = []
    while True:
        hoard_of_bytes.append(bytearray(64 << 20))


def leave():
    os._exit(3)


def ask_to_leave():
    sys.exit(4)


def interrupt():
    raise KeyboardInterrupt


def fail():
    raise ValueError("no such thing")


def chatter():
    print("x" * 100_000)
    sys.stdout.flush()
    return "done"


def not_json():
    return {1, 2}


def stubborn_child():
    """Leaves a thread and a child process behind, both busy."""
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)
    threading.Thread(target=forever, daemon=True).start()
    forever()


def heavy_modules():
    return [name for name in ("torch", "transformers", "ray", "aiohttp") if name in sys.modules]


def environment():
    return dict(os.environ)
