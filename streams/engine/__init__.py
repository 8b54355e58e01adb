"""Streams while they live: numbered, committed, delivered, resumed, evicted, loaded and ended."""
