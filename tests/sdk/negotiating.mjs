// The TypeScript SDK 2.x, which may try revision 2026-07-28 before it initializes. Given how it is to
// choose a revision ("auto", "legacy" or {"pin": …}) and where the server is, prints what came of it.
import { Client, StreamableHTTPClientTransport } from "@modelcontextprotocol/client";
import { StdioClientTransport } from "@modelcontextprotocol/client/stdio";
import { WebSocketClientTransport } from "@modelcontextprotocol/sdk/client/websocket.js";
import WebSocket from "ws";

globalThis.WebSocket = WebSocket;

const { mode, url, command } = JSON.parse(process.argv[2]);
const transport = command
  ? new StdioClientTransport({ command: command[0], args: command.slice(1), stderr: "ignore" })
  : url.startsWith("ws")
    ? new WebSocketClientTransport(new URL(url)) // 1.x alone has one, and it fits
    : new StreamableHTTPClientTransport(new URL(url));
const seen = { problems: [] };
const client = new Client(
  { name: "negotiating", version: "1.0" },
  { capabilities: {}, versionNegotiation: { mode } },
);
client.onerror = (error) => seen.problems.push(String(error));
try {
  await client.connect(transport);
  seen.revision = client.getNegotiatedProtocolVersion();
  seen.tools = (await client.listTools()).tools.length;
} catch (error) {
  seen.error = String(error.message);
}
// Closing aborts the standing GET where it is still being opened, which the SDK reports as an error.
client.onerror = undefined;
await client.close();
await transport.close();
console.log(JSON.stringify(seen));
