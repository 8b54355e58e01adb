"""The actions of the commands, loaded when a command runs. `streams.cli` declares the commands."""
