"""How fast messages come through, beside what the machine could do at best.

    python -m benchmarks            five rounds, some minutes
    python -m benchmarks --quick    one tiny round, to see that it works
    python -m benchmarks reconnect  a thousand clients that come back at once, some minutes

Every server is a real child process, every message is checked for presence and order, and the
limits are measured between the other measurements, in the same run.
"""
