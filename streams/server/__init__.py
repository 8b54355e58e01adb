"""The server: what the author of a tool and an MCP client see of it."""
