"""How fast messages come through, beside what the machine could do at best.

    python -m benchmarks            ours and the limits, some minutes
    python -m benchmarks --peers    what else there is, too
    python -m benchmarks --quick    one tiny round, to see that it works

Every server is a real child process, every message is checked for presence and order, and limits
and peers are measured between the other measurements, in the same run.
"""
