"""Commands that test this software itself: `demo` and `torture`."""
