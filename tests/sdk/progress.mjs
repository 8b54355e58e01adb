// A TypeScript SDK's client, 1.x or 2.x as its first argument says, over stdio or a WebSocket. Prints
// as JSON what each call of `work` reported, and how long it took. Its second argument is JSON:
// `url`, or `command` and `args`; `socket` is "node" for the WebSocket of Node.js itself, or "ws";
// `rounds` calls are made one after the other, each of them `abreast` at once.
const generation = process.argv[2];
const given = JSON.parse(process.argv[3]);

const load = {
  "1": async () => {
    const { Client } = await import("@modelcontextprotocol/sdk/client/index.js");
    const { StdioClientTransport } = await import("@modelcontextprotocol/sdk/client/stdio.js");
    const { LoggingMessageNotificationSchema } = await import("@modelcontextprotocol/sdk/types.js");
    const call = (client, params, options) => client.callTool(params, undefined, options);
    return { Client, StdioClientTransport, onLog: LoggingMessageNotificationSchema, call };
  },
  "2": async () => {
    const { Client } = await import("@modelcontextprotocol/client");
    const { StdioClientTransport } = await import("@modelcontextprotocol/client/stdio");
    const call = (client, params, options) => client.callTool(params, options);
    return { Client, StdioClientTransport, onLog: "notifications/message", call };
  },
};
const sdk = await load[generation]();

async function transport() {
  if (given.command) {
    const { command, args } = given;
    return new sdk.StdioClientTransport({ command, args, stderr: "inherit" });
  }
  if (given.socket === "ws") globalThis.WebSocket = (await import("ws")).default;
  // 2.x has no such transport of its own; its client takes that of 1.x.
  const { WebSocketClientTransport } = await import("@modelcontextprotocol/sdk/client/websocket.js");
  return new WebSocketClientTransport(new URL(given.url));
}

const problems = [];
const logs = [];
const client = new sdk.Client({ name: "progress", version: "1.0" }, { capabilities: {} });
client.onerror = (error) => problems.push(String(error));
client.setNotificationHandler(sdk.onLog, ({ params }) => logs.push(params.data.step));
await client.connect(await transport());

async function work() {
  const seen = [];
  const began = performance.now();
  const options = { onprogress: ({ progress }) => seen.push(progress), timeout: 60_000 };
  const result = await sdk.call(client, { name: "work", arguments: given.arguments }, options);
  return { seen, ms: performance.now() - began, text: result.content[0].text };
}

const calls = [];
for (let round = 0; round < given.rounds; round++) {
  calls.push(...(await Promise.all(Array.from({ length: given.abreast }, work))));
}
await client.close();
console.log(JSON.stringify({ calls, logs: logs.length, problems }));
