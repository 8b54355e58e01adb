"""What the commands do. Loaded when a command runs; the declarations are in `streams.cli`."""
