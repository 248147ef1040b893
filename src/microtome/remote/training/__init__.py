"""Split learning: a model whose head trains on a client, and whose tail trains on a server."""
