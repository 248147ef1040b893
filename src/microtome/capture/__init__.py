"""Extract, record and edit the values inside a model."""
