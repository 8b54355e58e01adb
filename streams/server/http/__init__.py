"""Streamable HTTP as the server speaks it: requests, responses, event streams and sessions."""
