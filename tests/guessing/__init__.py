"""Guessing at stream ids, tokens, event ids and sessions: `python -m tests.guessing`.

`--tries` guesses are made over a WebSocket and over HTTP, pipelined, at what there is not and at
what is somebody else's, in memory and at rest: all get the one answer, byte for byte but for the id
that they were asked under. Then `--timed` guesses of each kind are made one at a time, in an order
that changes, and the medians for what there is not and for what is somebody else's are compared:
over the sockets, and of the lookups alone. Exit code 1 where they differ by more than 2 %.
"""
