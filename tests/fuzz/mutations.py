"""Bytes near the corpus: for runs that coverage does not guide."""

from hypothesis import strategies as st

from tests.fuzz.targets import corpus_of

INTERESTING = [
    b"\n",
    b"\r\n",
    b"\r\n\r\n",
    b"\x00",
    b"\xff",
    b'"',
    b"{",
    b"}",
    b"[" * 50,
    b":",
    b",",
]


def mutated(name: str) -> st.SearchStrategy[bytes]:
    """A corpus entry with a few changes, or two entries in one, or random bytes."""
    kept = st.sampled_from(corpus_of(name))
    return st.one_of(
        st.builds(_changed, kept, st.lists(_changes, min_size=1, max_size=4)),
        st.builds(_spliced, kept, kept, st.floats(0, 1), st.floats(0, 1)),
        st.binary(max_size=200),
    )


_changes = st.tuples(
    st.floats(0, 1),
    st.integers(0, 8),
    st.one_of(st.binary(max_size=6), st.sampled_from(INTERESTING)),
)


def _changed(data: bytes, changes: list[tuple[float, int, bytes]]) -> bytes:
    for place, cut, put in changes:
        at = int(place * len(data))
        data = data[:at] + put + data[at + cut :]
    return data


def _spliced(first: bytes, second: bytes, end: float, start: float) -> bytes:
    return first[: int(end * len(first))] + second[int(start * len(second)) :]
