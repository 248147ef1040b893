"""One traced run of a model: the arguments, outputs, side effects and state of each call."""
