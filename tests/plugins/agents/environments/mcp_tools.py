"""An MCP server: ``python mcp_tools.py`` on the standard input and output, ``python mcp_tools.py
PORT`` over HTTP.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from mcp.server import MCPServer

server = MCPServer("tools")
state = {"count": 0}


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def count() -> str:
    """Count the calls."""
    state["count"] += 1
    return f"call {state['count']}"


@server.tool()
def fail() -> str:
    """Always fail."""
    raise ValueError("it is broken")


@server.tool()
def look() -> str:
    """Say what this process can do to the machine."""
    found = []
    for name, attempt in {
        "network": lambda: socket.create_connection(("127.0.0.1", 9), timeout=1),
        "files": lambda: open("/etc/passwd").close(),
        "program": lambda: subprocess.run(["/bin/true"], check=False),
        "own folder": lambda: open(__file__, "a").close(),
        "scratch": lambda: open("/tmp/scratch", "w").close(),
    }.items():
        try:
            attempt()
            found.append(name)
        except ConnectionRefusedError:
            found.append(name)  # it came to the other end
        except OSError:
            continue
    return ", ".join(found)


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run(transport="streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run(transport="stdio")
