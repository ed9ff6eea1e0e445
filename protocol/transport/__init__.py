"""Transport of messages: frames, private ZMQ sockets, and the socket to the supervisor."""
