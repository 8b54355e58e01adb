"""Guesses of stream ids, tokens, event ids and sessions: `python -m tests.guessing`.

`--tries` guesses go out pipelined, over a WebSocket and over HTTP. They name unknown things and
things of another caller, in memory and evicted. All must get the same answer, byte for byte except
for the request's id.

Then `--timed` guesses of each kind go out one at a time, in a changing order, over the sockets and
as lookups alone. The exit code is 1 where the medians for unknown things and for another caller's
differ by more than 2 %.
"""
