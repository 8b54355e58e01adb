// A TypeScript SDK's client over HTTP, 1.x or 2.x as its first argument says. Given the same JSON as
// vendor_python.py in its second argument, it does the same and prints the same.
import { closeSync, openSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";

const POLICY = "notifications/requests/resumePolicy";
const TOKEN = "mcp-streams/resumeToken";
const NEXT = "mcp-streams/nextResumeToken";
const GIVEN_UP = "Maximum reconnection attempts";

const load = {
  "1": async () => {
    const { Client } = await import("@modelcontextprotocol/sdk/client/index.js");
    const { StreamableHTTPClientTransport } = await import(
      "@modelcontextprotocol/sdk/client/streamableHttp.js"
    );
    const types = await import("@modelcontextprotocol/sdk/types.js");
    return {
      Client,
      StreamableHTTPClientTransport,
      onLog: types.LoggingMessageNotificationSchema,
      onProgress: types.ProgressNotificationSchema,
      anything: types.ResultSchema, // with any fields
    };
  },
  "2": async () => {
    const { Client, StreamableHTTPClientTransport } = await import("@modelcontextprotocol/client");
    return {
      Client,
      StreamableHTTPClientTransport,
      onLog: "notifications/message",
      onProgress: "notifications/progress",
      anything: { "~standard": { version: 1, vendor: "any", validate: (value) => ({ value }) } },
    };
  },
};

const sdk = await load[process.argv[2]]();
const { talks: wanted, stays, quiet_s: quiet, patience_s: patience } = JSON.parse(process.argv[3]);

class Talk {
  constructor(url, declares, policy) {
    this.url = url;
    this.declares = declares;
    this.policy = policy;
    this.seen = { policies: [], progress: [], logs: [], outcomes: {}, problems: [] };
    this.behind = {};
    this.news = () => {};
  }

  async hold(steps) {
    this.client = new sdk.Client({ name: "vendor", version: "1.0" }, { capabilities: this.declares });
    this.client.onerror = (error) => this.note("problems", String(error));
    // Notifications that the SDK does not know come here.
    this.client.fallbackNotificationHandler = async ({ method, params }) => {
      if (method === POLICY) {
        this.policy = params;
        this.note("policies", params);
      }
    };
    this.client.setNotificationHandler(sdk.onLog, ({ params }) => this.note("logs", params.data));
    // Replaces the SDK's own, which takes only progress with the id of a call of this session.
    this.client.setNotificationHandler(sdk.onProgress, ({ params }) =>
      this.note("progress", [params.progressToken, params.progress]),
    );
    await this.client.connect(new sdk.StreamableHTTPClientTransport(new URL(this.url)));
    for (const step of steps) {
      const name = step.as ?? step.do;
      const coming = this.outcome(this[step.do](step));
      if (step.behind) this.behind[name] = coming;
      else this.seen.outcomes[name] = await coming;
    }
    return this;
  }

  note(where, what) {
    this.seen[where].push(what);
    this.news();
  }

  // Wait until the notifications so far make this true.
  async until(isTrue) {
    while (!isTrue()) await new Promise((resolve) => (this.news = resolve));
  }

  async outcome(coming) {
    const over = new Error("the patience is over");
    const impatience = sleep(patience * 1000, undefined, { ref: false }).then(() => {
      throw over;
    });
    try {
      return { result: (await Promise.race([coming, impatience])) ?? null };
    } catch (error) {
      return { error: { code: error.code, message: error.message, data: error.data } };
    }
  }

  // Make a call with a progress token of its own, and not the SDK's request id.
  call({ tool, arguments: given, name }) {
    return this.callTool({ name: tool, arguments: given, _meta: { progressToken: name } });
  }

  callTool(params) {
    const options = { timeout: 2 * patience * 1000 }; // the SDK would cancel it
    return process.argv[2] === "1"
      ? this.client.callTool(params, undefined, options)
      : this.client.callTool(params, options);
  }

  // Fetch pages up to the last, or `at_most` so many; `to` names the step with the first page token.
  async pages({ tool, arguments: given, name, token: first, to, at_most: most = 1000 }) {
    let token = to === undefined ? first : this.nextOf(to);
    const pages = [];
    do {
      const meta = { progressToken: name, ...(token === undefined ? {} : { [TOKEN]: token }) };
      const page = await this.callTool({ name: tool, arguments: given, _meta: meta });
      pages.push(page);
      token = page._meta?.[NEXT];
    } while (token !== undefined && pages.length < most);
    return pages;
  }

  // The page token in a step's result.
  nextOf(name) {
    const { result } = this.seen.outcomes[name];
    return (Array.isArray(result) ? result.at(-1) : result)._meta[NEXT];
  }

  // A request that the SDK does not know.
  request({ method, params, timeout_s: timeout = 2 * patience }) {
    const { requestId, resumeToken } = this.policy ?? {};
    const learned = method === "requests/resume" ? { resumeToken } : { requestId, resumeToken };
    const request = { method, params: { ...learned, ...params } };
    return this.client.request(request, sdk.anything, { timeout: timeout * 1000 });
  }

  async list() {
    const { tools } = await this.client.listTools();
    return Object.fromEntries(tools.map(({ name, _meta }) => [name, _meta ?? null]));
  }

  // Wait until there are a policy and so many log messages.
  async hear({ logs }) {
    await this.until(() => this.policy !== undefined && this.seen.logs.length >= logs);
  }

  async await({ for: name }) {
    this.seen.outcomes[name] = await this.behind[name];
  }

  // The SDK reports a call that it has abandoned here only, and not to the call's own promise.
  async lose() {
    await this.until(() => this.seen.problems.some((problem) => problem.includes(GIVEN_UP)));
  }

  async touch({ paths }) {
    for (const path of paths) closeSync(openSync(path, "a"));
  }

  async linger() {
    await sleep(quiet * 1000);
  }

  // Another session, with the policies of this one.
  async elsewhere({ url, declares, steps }) {
    const talk = await new Talk(url, declares, this.policy).hold(steps);
    await talk.client.close();
    return talk.seen;
  }
}

const held = await Promise.all(
  wanted.map(({ url, declares, steps }) => new Talk(url, declares).hold(steps)),
);
console.log(JSON.stringify(held.map(({ seen }) => seen)));
if (stays) await new Promise(() => {}); // to be killed
await Promise.all(held.map(({ client }) => client.close()));
