"""The client: connections, calls, and how they are resumed."""
