"""A stub of AMD's runtime, `libamdhip64.so`, under Triton's own HIP driver: it records launches and runs nothing."""
