// The official TypeScript SDK's server with a tool that returns its text.
//
//   node typescript_sdk_echo.mjs http|stdio
//
// Over HTTP it prints its address.

import { randomUUID } from "node:crypto";
import { createServer } from "node:http";

import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";
import { StdioServerTransport } from "@modelcontextprotocol/sdk/server/stdio.js";
import { StreamableHTTPServerTransport } from "@modelcontextprotocol/sdk/server/streamableHttp.js";
import * as z from "zod/v4";

function echoTool() {
  const server = new McpServer({ name: "echo", version: "1" });
  const inputSchema = { text: z.string() };
  server.registerTool("echo", { inputSchema }, async ({ text }) => ({
    content: [{ type: "text", text }],
  }));
  return server;
}

const transports = new Map();

async function opened() {
  const transport = new StreamableHTTPServerTransport({
    sessionIdGenerator: randomUUID,
    onsessioninitialized: (id) => transports.set(id, transport),
  });
  await echoTool().connect(transport);
  return transport;
}

if (process.argv[2] === "stdio") {
  await echoTool().connect(new StdioServerTransport());
} else {
  const http = createServer(async (request, response) => {
    const known = transports.get(request.headers["mcp-session-id"]);
    await (known ?? (await opened())).handleRequest(request, response);
  });
  http.listen(0, "127.0.0.1", () => console.log(`http://127.0.0.1:${http.address().port}`));
}
