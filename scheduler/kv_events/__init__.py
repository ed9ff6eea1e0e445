"""KV events for subscribers: their sequence, and the sockets that publish it."""
