"""The socket between a relay, which a client starts, and the owner of the journal."""
