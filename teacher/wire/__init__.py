"""What both sides of a socket share: messages, their bytes and limits, sockets, keys."""
