"""The actions of `demo` and `torture`, which test this software itself."""
