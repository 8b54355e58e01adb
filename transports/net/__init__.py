"""Listening, dialing and sockets, for the transports over TCP and Unix sockets."""
