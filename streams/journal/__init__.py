"""Journals: what the engine needs of storage, and the storages that give it.

Nothing is imported here, because a relay loads this package and must start at once.
"""
