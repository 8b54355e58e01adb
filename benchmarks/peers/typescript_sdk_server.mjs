// The official TypeScript SDK's server with the event store of its examples.
//
//   node typescript_sdk_server.mjs PORT

import { randomUUID } from "node:crypto";
import { createServer } from "node:http";

import { InMemoryEventStore } from "@modelcontextprotocol/sdk/examples/shared/inMemoryEventStore.js";
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";
import { StreamableHTTPServerTransport } from "@modelcontextprotocol/sdk/server/streamableHttp.js";
import * as z from "zod/v4";

// As in benchmarks/numbered.py.
const FIRST = 1_000_000_000;

const sizeOf = (params) =>
  JSON.stringify({ jsonrpc: "2.0", method: "notifications/message", params }).length + 1;

function fillTool() {
  const server = new McpServer({ name: "stock", version: "1" }, { capabilities: { logging: {} } });
  const inputSchema = { count: z.number(), size: z.number() };
  server.registerTool("fill", { inputSchema }, async ({ count, size }, extra) => {
    const params = (n, text) => ({ level: "info", data: { n, text } });
    const text = "x".repeat(size - sizeOf(params(FIRST, "")));
    for (let n = FIRST; n < FIRST + count; n++) {
      await extra.sendNotification({ method: "notifications/message", params: params(n, text) });
    }
    return { content: [{ type: "text", text: String(count) }] };
  });
  return server;
}

const transports = new Map();

async function opened() {
  const transport = new StreamableHTTPServerTransport({
    sessionIdGenerator: randomUUID,
    eventStore: new InMemoryEventStore(),
    onsessioninitialized: (id) => transports.set(id, transport),
  });
  await fillTool().connect(transport);
  return transport;
}

createServer(async (request, response) => {
  const known = transports.get(request.headers["mcp-session-id"]);
  await (known ?? (await opened())).handleRequest(request, response);
}).listen(Number(process.argv[2]), "127.0.0.1");
