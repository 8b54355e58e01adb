"""The socket between a relay, which a client spawns, and the owner of the journal."""
