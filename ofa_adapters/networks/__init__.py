"""The published families, one module per family; each module's `FAMILY` is what the registry reads.

`mobile_layout` and `slimmable_space` hold what several families share.
"""
