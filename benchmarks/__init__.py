"""The throughput of messages, and the limits of the machine.

    python -m benchmarks            ours and the limits, some minutes
    python -m benchmarks --peers    other systems, too
    python -m benchmarks --quick    one tiny round, to see that it works

Every server is a real child process, every message is checked for presence and order, and limits
and peers are measured between the other measurements, in the same run.
"""
