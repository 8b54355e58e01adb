"""What the transports over sockets have in common."""
