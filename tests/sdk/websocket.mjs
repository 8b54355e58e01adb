// The TypeScript SDK's client over its WebSocket transport. Prints what it saw as one line of JSON.
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { WebSocketClientTransport } from "@modelcontextprotocol/sdk/client/websocket.js";
import {
  ElicitRequestSchema,
  LoggingMessageNotificationSchema,
} from "@modelcontextprotocol/sdk/types.js";

const seen = { progress: [], logs: [], problems: [] };
const client = new Client(
  { name: "sdk-tests", version: "1.0" },
  { capabilities: { elicitation: {} } },
);
client.onerror = (error) => seen.problems.push(String(error));
const closed = new Promise((resolve) => (client.onclose = resolve));
client.setNotificationHandler(LoggingMessageNotificationSchema, ({ params }) => {
  seen.logs.push(params.data);
});
client.setRequestHandler(ElicitRequestSchema, ({ params }) => {
  seen.asked = params.message;
  return { action: "accept", content: { name: "ts" } };
});

await client.connect(new WebSocketClientTransport(new URL(process.argv[2])));
seen.server = client.getServerVersion();
seen.tools = (await client.listTools()).tools.map((tool) => tool.name);
seen.worked = await client.callTool({ name: "work", arguments: { steps: 3 } }, undefined, {
  onprogress: (progress) => seen.progress.push(progress),
});
seen.measured = await client.callTool({ name: "measure", arguments: { values: [1, 2.5] } });
seen.failed = await client.callTool({ name: "fail", arguments: {} });
seen.misused = await client.callTool({ name: "work", arguments: { steps: "many" } });
seen.answered = await client.callTool({ name: "ask", arguments: {} });
seen.many = await Promise.all(
  Array.from({ length: 50 }, (_, steps) => client.callTool({ name: "work", arguments: { steps } })),
);
try {
  await client.callTool({ name: "nobody", arguments: {} });
} catch (error) {
  seen.unknown = { code: error.code, message: error.message };
}
await client.close();
await closed;
console.log(JSON.stringify(seen));
