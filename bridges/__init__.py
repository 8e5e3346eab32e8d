"""Between JAX and what is not JAX: Triton launches, torch functions and AITER's operators inside jitted programs.

`triton` and `aiter` are the implementations of those names; `callback` and `jax_triton` run a `Program`, `run` chooses between them;
`dlpack` moves single arrays, `arch` names the device, `explain` says what would run for a call. torch and Triton are imported when first
used.
"""
