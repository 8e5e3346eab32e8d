"""How calls are computed: plain JAX (`xla`), Triton sources with their plans (`triton`), tile sizes as data (`tuning`).

`launch` has the values that a plan makes; `verify` compiles them for an AMD architecture without a GPU. Nothing here is imported before an
implementation is first considered.
"""
