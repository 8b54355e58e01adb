// The official TypeScript SDK's client makes a conversation, and prints all of it as a line of JSON.
// Its arguments are those of transcript_python.py.
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StdioClientTransport } from "@modelcontextprotocol/sdk/client/stdio.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";
import { WebSocketClientTransport } from "@modelcontextprotocol/sdk/client/websocket.js";
import {
  CreateMessageRequestSchema,
  ElicitRequestSchema,
  ListRootsRequestSchema,
  ResultSchema,
} from "@modelcontextprotocol/sdk/types.js";

const { where, steps } = JSON.parse(process.argv[2]);
const answers = JSON.parse(process.argv[3]);
const sent = [];
const received = [];

function opened() {
  if (where.command) {
    const [command, ...args] = where.command;
    return new StdioClientTransport({ command, args, env: where.environment, stderr: "ignore" });
  }
  const url = new URL(where.url);
  return url.protocol === "ws:"
    ? new WebSocketClientTransport(url)
    : new StreamableHTTPClientTransport(url);
}

function recorded(transport) {
  const send = transport.send.bind(transport);
  transport.send = (message, options) => {
    sent.push(message);
    return send(message, options);
  };
  let hear;
  Object.defineProperty(transport, "onmessage", {
    get: () => hear,
    set: (handler) => {
      hear = (message, extra) => {
        received.push(message);
        handler(message, extra);
      };
    },
  });
  return transport;
}

async function heard(wanted) {
  const count = (method) => received.filter((message) => message.method === method).length;
  while (Object.entries(wanted).some(([method, number]) => count(method) < number)) {
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
}

async function take(client, step) {
  if (step.await) return heard(step.await);
  if (step.method === "notifications/roots/list_changed") return client.sendRootsListChanged();
  const abort = new AbortController();
  const options = {
    onprogress: () => step.cancel && abort.abort("enough"),
    signal: abort.signal,
  };
  const params = step.params;
  const known = {
    "tools/list": () => client.listTools(),
    "resources/list": () => client.listResources(),
    "resources/templates/list": () => client.listResourceTemplates(),
    "prompts/list": () => client.listPrompts(),
    "tools/call": () => client.callTool(params, undefined, options),
    "resources/read": () => client.readResource(params),
    "resources/subscribe": () => client.subscribeResource(params),
    "resources/unsubscribe": () => client.unsubscribeResource(params),
    "prompts/get": () => client.getPrompt(params),
    "completion/complete": () => client.complete(params),
    ping: () => client.ping(),
  };
  const other = () => client.request({ method: step.method, params }, ResultSchema);
  try {
    await (known[step.method] ?? other)();
  } catch {
    // The server's answer is in the record.
  }
}

const client = new Client(
  { name: "transcript", version: "1" },
  { capabilities: { sampling: {}, elicitation: {}, roots: { listChanged: true } } },
);
client.setRequestHandler(CreateMessageRequestSchema, () => answers["sampling/createMessage"]);
client.setRequestHandler(ElicitRequestSchema, () => answers["elicitation/create"]);
client.setRequestHandler(ListRootsRequestSchema, () => answers["roots/list"]);
await client.connect(recorded(opened()));
for (const step of steps) {
  const waiting = setTimeout(() => {
    console.error(`no end of ${JSON.stringify(step)}`);
    process.exit(1);
  }, 20_000);
  await take(client, step);
  clearTimeout(waiting);
}
if (client.transport.terminateSession) await client.transport.terminateSession();
await client.close();
console.log(JSON.stringify({ sent, received }));
process.exit(0);
