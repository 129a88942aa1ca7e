"""A server of the MCP SDK, whose basket belongs to its process: python serve_mcp.py stdio|http."""

from __future__ import annotations

import os
import sys

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("shop")
basket: list[str] = []


@server.tool()
def buy(item: str, count: int = 1) -> str:
    """Put items into the basket."""
    if item == "nothing":
        raise ToolError("nothing is not for sale")
    if item == "end":
        os._exit(3)
    basket.extend([item] * count)
    return f"{len(basket)} items"


@server.tool()
def price(item: str) -> int:
    """Price of an item, in cents."""
    return len(item)


@server.tool()
def look() -> list[str]:
    """Look at the items in the basket."""
    return basket


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        from tests.adapters.libraries.serve_nemo_gym import serve

        serve(server.streamable_http_app())
