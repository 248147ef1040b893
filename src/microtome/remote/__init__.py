"""The two halves of a split model as two programs: a server that runs tails, and a client that runs heads."""

import logging

# Who wants to hear what both sides say configures this logger; see `microtome.remote.logs`.
logging.getLogger("microtome.remote").addHandler(logging.NullHandler())
