"""What travels between processes: messages, the ZMQ pump, server and client."""
