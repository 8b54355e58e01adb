// A TypeScript SDK's client, 1.x or 2.x as its first argument says, that waits for two seconds. Its
// second argument is JSON: `url`, or `command` and `args`; the `folder` of the tool's files; and
// `steps`: "build", "wait", "list", "gate" (let the tool end), "leave" (connect anew). Prints what
// each step has got.
import { writeFileSync } from "node:fs";
import { join } from "node:path";

const TIMEOUT_MS = 2000;
const generation = process.argv[2];
const given = JSON.parse(process.argv[3]);

const load = {
  "1": async () => {
    const { Client } = await import("@modelcontextprotocol/sdk/client/index.js");
    const { StdioClientTransport } = await import("@modelcontextprotocol/sdk/client/stdio.js");
    const { StreamableHTTPClientTransport } = await import(
      "@modelcontextprotocol/sdk/client/streamableHttp.js"
    );
    const call = (client, params, options) => client.callTool(params, undefined, options);
    return { Client, StdioClientTransport, StreamableHTTPClientTransport, call };
  },
  "2": async () => {
    const { Client, StreamableHTTPClientTransport } = await import("@modelcontextprotocol/client");
    const { StdioClientTransport } = await import("@modelcontextprotocol/client/stdio");
    const call = (client, params, options) => client.callTool(params, options);
    return { Client, StdioClientTransport, StreamableHTTPClientTransport, call };
  },
};
const sdk = await load[generation]();
const problems = [];
// Once the tool may end, a wait may get the progress and the result in one piece. The SDK takes a
// result at once and a notification a microtask later, when it has forgotten the token.
let mayEnd = false;
const TOO_LATE = "progress notification for an unknown token";

function note(error) {
  if (!(mayEnd && String(error).includes(TOO_LATE))) problems.push(String(error));
}

async function connected() {
  const client = new sdk.Client({ name: "impatient", version: "1.0" }, { capabilities: {} });
  client.onerror = note;
  const { command, args, url } = given;
  const transport = command
    ? new sdk.StdioClientTransport({ command, args, stderr: "inherit" })
    : new sdk.StreamableHTTPClientTransport(new URL(url));
  await client.connect(transport);
  await client.listTools(); // from now on it checks structured content
  return client;
}

let client = await connected();
let name;

async function call(tool, more) {
  const progress = [];
  const onprogress = ({ progress: value }) => progress.push(value);
  try {
    const params = { name: tool, arguments: more };
    const result = await sdk.call(client, params, { timeout: TIMEOUT_MS, onprogress });
    name = result._meta?.["mcp-streams/call"] ?? result.structuredContent?.calls?.[0]?.call ?? name;
    return { text: result.content[0].text, structured: result.structuredContent, progress };
  } catch (error) {
    return { code: error.code, message: error.message, reason: error.data?.reason, progress };
  }
}

const steps = {
  build: () => call("build", { folder: given.folder }),
  wait: () => call("wait_for_call", { call: name }),
  list: () => call("list_calls", {}),
  gate: async () => {
    mayEnd = true;
    writeFileSync(join(given.folder, "gate"), "");
  },
  leave: async () => {
    await client.close();
    client = await connected();
  },
};
const seen = [];
for (const step of given.steps) seen.push((await steps[step]()) ?? null);
const tools = (await client.listTools()).tools;
client.onerror = undefined;
await client.close();
console.log(JSON.stringify({ seen, tools, problems }));
