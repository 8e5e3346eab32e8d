"""Tuning as data: facts of each GPU architecture and, per kernel, rows of tile sizes. Nothing here imports Triton."""
