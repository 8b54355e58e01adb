"""Fuzzing of every parser of foreign bytes: each target is a function of bytes that raises on a
broken promise.

`python -m tests.fuzz TARGET --seconds N` searches for inputs that fail. `corpus/TARGET` holds the
inputs that every run tries: seeds, and inputs that failed once. `tests/fuzz/test_fuzz.py` tries all
of them.
"""
