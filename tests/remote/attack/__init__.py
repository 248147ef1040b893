"""Attacks on a server, a client and files, each with a well-behaved client beside it. Loopback only."""
