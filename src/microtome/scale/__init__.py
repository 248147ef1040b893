"""microtome on engines that scale: stages and data sets over many machines. Each engine is an extra."""
