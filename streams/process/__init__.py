"""Processes: their options, the processes that serve, own a journal and relay, and their end."""
