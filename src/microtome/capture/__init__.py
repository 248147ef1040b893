"""Extract, record and edit the values inside a model.

`extract` captures values in one run, `record` over many, to a `store`; `edit` replaces them; `attention` captures
attention weights. They share `targets` (which calls are selected) and `retention` (copies of captured tensors).
"""
