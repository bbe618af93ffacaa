"""Wire layer shared by client, proxy and worker: messages, their encoding and limits, sockets, CURVE keys."""
