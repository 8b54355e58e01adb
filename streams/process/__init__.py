"""How it runs as a process: options, the processes that serve and relay, and their end."""
