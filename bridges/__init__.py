"""Between JAX and what is not JAX: Triton launches, torch functions and AITER's operators inside jitted programs.

`triton` and `aiter` are the implementations of those names. `callback`, `jax_triton` and `native` run a `Program`, and `execute` chooses
between them. `dlpack` moves single arrays, `explain` says what would run for a call. torch and Triton are imported when first used.
"""
