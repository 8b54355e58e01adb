"""What is said on the wire, by either side: the proposals as tables over one vocabulary."""
