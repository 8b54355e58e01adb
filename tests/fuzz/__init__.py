"""Fuzzing whatever reads what others have sent: a function of bytes for each, that fails where it
does not do what it promises.

`python -m tests.fuzz TARGET --seconds N` looks for what fails; `corpus/TARGET` has what is worth to
be tried each time, and what has failed once. `tests/fuzz/test_fuzz.py` tries all of that.
"""
