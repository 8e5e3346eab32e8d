"""vLLM's two backends as modules of pure functions: `rocm_attn` and `rocm_aiter_unified_attn`."""
