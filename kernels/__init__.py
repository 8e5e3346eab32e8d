"""How calls are computed: plain JAX (`xla`), and Triton sources (`triton`) with their plans (`plans`) and architectures (`archs`).

`launch` has the values that plans make, and `compile_check` compiles them for an AMD architecture without a GPU. An implementation is
imported when it is first considered.
"""
