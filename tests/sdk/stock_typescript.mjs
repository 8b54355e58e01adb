// A TypeScript SDK's client over HTTP, 1.x or 2.x as its first argument says. Given the same JSON
// as stock_python.py in its second argument, it does the same and prints the same.
import { setTimeout as sleep } from "node:timers/promises";

const load = {
  "1": async () => {
    const { Client } = await import("@modelcontextprotocol/sdk/client/index.js");
    const { StreamableHTTPClientTransport } = await import(
      "@modelcontextprotocol/sdk/client/streamableHttp.js"
    );
    const { LoggingMessageNotificationSchema } = await import("@modelcontextprotocol/sdk/types.js");
    const call = (client, params, options) => client.callTool(params, undefined, options);
    return { Client, StreamableHTTPClientTransport, onLog: LoggingMessageNotificationSchema, call };
  },
  "2": async () => {
    const { Client, StreamableHTTPClientTransport } = await import("@modelcontextprotocol/client");
    const call = (client, params, options) => client.callTool(params, options);
    return { Client, StreamableHTTPClientTransport, onLog: "notifications/message", call };
  },
};

const sdk = await load[process.argv[2]]();
const { quiet_s: quiet, patience_s: patience, calls } = JSON.parse(process.argv[3]);

async function make({ url, tool, arguments: given }) {
  const seen = { progress: [], logs: [], result: null, error: null, problems: [] };
  const client = new sdk.Client({ name: "stock", version: "1.0" }, { capabilities: {} });
  client.onerror = (error) => seen.problems.push(String(error));
  client.setNotificationHandler(sdk.onLog, ({ params }) => {
    seen.logs.push(params.data);
  });
  await client.connect(new sdk.StreamableHTTPClientTransport(new URL(url)));
  const onprogress = ({ progress }) => seen.progress.push(progress);
  try {
    const result = await sdk.call(client, { name: tool, arguments: given }, {
      onprogress,
      timeout: patience * 1000,
    });
    seen.result = result.content[0].text;
  } catch (error) {
    seen.error = { code: error.code, message: error.message };
  }
  return { seen, client };
}

const made = await Promise.all(calls.map(make));
await sleep(quiet * 1000);
await Promise.all(
  made.map(({ client }) => {
    client.onerror = undefined; // closing aborts a standing GET that is still being opened
    return client.close();
  }),
);
console.log(JSON.stringify(made.map(({ seen }) => seen)));
