"""The messages on the wire, for both sides: the proposals as tables over one vocabulary."""
