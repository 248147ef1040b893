"""One run of a stage: replay the calls before it, and record what crosses after it."""
