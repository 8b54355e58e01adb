// The Node.js server of Durable Streams, with its files in a folder.
//
//   node durable_streams_server.mjs PORT FOLDER

import { DurableStreamTestServer } from "@durable-streams/server";

const [port, dataDir] = process.argv.slice(2);
await new DurableStreamTestServer({ port: Number(port), dataDir, compression: false }).start();
