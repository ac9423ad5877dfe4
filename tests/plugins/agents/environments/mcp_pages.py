"""An MCP server on the standard input and output that lists its tools in pages of one tool each."""

from __future__ import annotations

import asyncio

import mcp_types as types
from mcp.server import Server
from mcp.server.stdio import stdio_server

NAMES = ("first", "second", "third")


async def list_tools(
    context: object, params: types.PaginatedRequestParams | None
) -> types.ListToolsResult:
    page = int(params.cursor) if params is not None and params.cursor else 0
    tool = types.Tool(
        name=NAMES[page],
        description="Say its name.",
        input_schema={"type": "object", "properties": {}},
    )
    return types.ListToolsResult(
        tools=[tool], next_cursor=str(page + 1) if page + 1 < len(NAMES) else None
    )


async def call_tool(context: object, params: types.CallToolRequestParams) -> types.CallToolResult:
    return types.CallToolResult(
        content=[types.TextContent(type="text", text=f"I am {params.name}")]
    )


async def main() -> None:
    server = Server("pages", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


if __name__ == "__main__":
    asyncio.run(main())
