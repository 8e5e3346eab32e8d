"""Triton sources, one file a kernel family, and the plans that turn shapes into launches of them."""
