"""What a type checker knows of the package. Nothing here runs.

`assert_type` states a result. A line with `type: ignore` is one that must be refused: pyright and mypy report a mark that is not needed.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import assert_type

import jax

import purepage as pp
from purepage import testing


def results(query: jax.Array, cache: pp.KVCache, metadata: pp.AttentionMetadata, flag: bool) -> None:
    assert_type(pp.paged_attention(query, cache, metadata), jax.Array)
    assert_type(pp.paged_attention(query, cache, metadata, return_lse=False, implementation="xla"), jax.Array)
    assert_type(pp.paged_attention(query, cache, metadata, return_lse=True), tuple[jax.Array, jax.Array])
    assert_type(pp.paged_attention(query, cache, metadata, return_lse=flag), jax.Array | tuple[jax.Array, jax.Array])
    assert_type(pp.cascade_attention(query, cache, metadata, common_prefix_len=16), jax.Array)
    assert_type(pp.cascade_attention(query, cache, metadata, common_prefix_len=16, return_lse=True), tuple[jax.Array, jax.Array])
    assert_type(pp.merge_attention_states(query, query, query, query), tuple[jax.Array, jax.Array])
    assert_type(pp.update_cache(cache, query, query, metadata.slot_mapping), pp.KVCache)


def test_kit(batch: testing.Batch) -> None:
    assert_type(testing.random_batch(0, query_lens=[1], content="flash", dtype="bfloat16"), testing.Batch)
    assert_type(testing.check_attention(lambda batch: batch.query), testing.Report)
    testing.random_batch(0, kind="decoding")  # type: ignore
    testing.random_batch(0, num_head=4)  # type: ignore
    testing.random_batch(0, unused="inf")  # type: ignore


def refused(query: jax.Array, cache: pp.KVCache, metadata: pp.AttentionMetadata) -> None:
    pp.paged_attention(query, cache, metadata, implementation="tritonn")  # type: ignore
    pp.paged_attention(query, cache, metadata, sliding_windw=4)  # type: ignore
    pp.paged_attention(query, cache)  # type: ignore
    pp.update_cache(cache, query, query, metadata.slot_mapping, implementation="cuda")  # type: ignore
    print(pp.KINDS)  # type: ignore
    pp.CacheSpec(num_blocks=4, block_size=16, num_kv_heads=2, head_size=32, content="pakced")  # type: ignore
    pp.CacheSpec(num_blocks=4, block_size=16, num_kv_heads=2, head_size=32, order="LBHN")  # type: ignore
