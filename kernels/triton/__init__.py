"""Triton sources, one file for each subject; the static facts of their launches are in `spec` and `writer_spec`."""
