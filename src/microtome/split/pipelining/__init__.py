"""Stages as modules of `torch.distributed.pipelining`."""
