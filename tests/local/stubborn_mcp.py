"""An MCP server over stdio that ends neither with its input nor by SIGTERM."""

from __future__ import annotations

import signal

from mcp.server.mcpserver import MCPServer

server = MCPServer("stubborn")


@server.tool()
def price(item: str) -> int:
    """Price of an item, in cents."""
    return len(item)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server.run("stdio")
    while True:
        signal.pause()
