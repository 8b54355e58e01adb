"""Journals: what the engine needs from storage, and its implementations.

Nothing is imported here, because a relay loads this package and must start at once.
"""
