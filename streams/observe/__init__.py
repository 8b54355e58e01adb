"""What operators are told of a server: what lives now, and what happens to calls."""
