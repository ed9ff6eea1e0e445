"""How messages travel: frames over private ZMQ sockets, and the tie to the supervisor."""
