"""Plans: pure functions from static shapes and an architecture to a `Program`. Nothing here imports Triton."""
