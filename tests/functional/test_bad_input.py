"""Bad input, over everything that is exported: each argument with wrong types, ranks, dtypes and ranges is refused by its name."""

import inspect
import re
from dataclasses import fields, replace
from functools import partial

import numpy as np
import pytest
from functional_calls import BLOCK, BLOCKS, CALLS, HEADS, KV_HEADS, SIZE, TOKENS, arguments, cache_spec

import purepage as pp

REFUSED = (ValueError, TypeError, pp.UnsupportedError)
RAGGED = [[1], [1, 2]]
THINGS = {"text": "text", "bytes": b"text", "set": {1}, "dict": {"a": 1}, "object": object(), "type": int, "ragged": RAGGED}
"""What is right for no argument."""


def no_array(rank):
    """What is no real array of this rank."""
    shape = (2,) * rank
    wrong = {
        **THINGS,
        "complex number": 1j,
        "strings": np.full(shape, "a"),
        "objects": np.full(shape, None, object),
        "complex": np.zeros(shape, np.complex64),
        "dates": np.zeros(shape, "M8[s]"),
    }
    for other in {0, rank - 1, rank + 1} - {rank, -1}:
        wrong[f"rank {other}"] = np.ones((2,) * other, np.float32)
    return wrong


def no_floats(*shape):
    """What is no float array of this shape."""
    wrong = {
        **no_array(len(shape)),
        "None": None,
        "number": 1.5,
        "integers": np.zeros(shape, np.int32),
        "bools": np.zeros(shape, bool),
        "list": np.zeros(shape).tolist(),
    }
    for axis in range(len(shape)):
        wrong[f"longer axis {axis}"] = np.zeros([size + (i == axis) for i, size in enumerate(shape)], np.float32)
    return wrong


def no_ints(*shape, longer=True):
    """What is no integer array of this shape."""
    wrong = {
        **no_array(len(shape)),
        "None": None,
        "number": 1.5,
        "floats": np.zeros(shape, np.float32),
        "whole floats": np.ones(shape, np.float64),
        "bools": np.zeros(shape, bool),
    }
    if longer:
        wrong["longer"] = np.zeros([size + 1 for size in shape], np.int32)
    return wrong


def no_vector(length):
    """What is neither None nor a real vector of this length."""
    values = np.zeros(length, np.float32)
    values[-1] = np.nan
    wrong = {**no_array(1), "short": np.ones(length - 1), "long": np.ones(length + 1), "bools": np.ones(length, bool), "number": 1.0}
    return {**wrong, "NaN": values, "infinite": np.full(length, np.inf), "past float32": np.full(length, 1e39)}


NO_INT = {
    **THINGS,
    "None": None,
    "fraction": 7.5,
    "whole float": 2.0,
    "bool": True,
    "complex": 1j,
    "list": [1],
    "vector": np.ones(1, np.int32),
}
NO_POSITIVE_INT = {**NO_INT, "zero": 0, "negative": -1, "text number": "4", "far below": -(2**63)}
NO_FLOAT = {**THINGS, "text number": "0.5", "complex": 1j, "bool": True, "list": [1.0], "vector": np.ones(2), "NaN": np.nan}
NO_FLOAT |= {"infinite": np.inf, "past float32": 1e39, "past float64": 10**400, "subnormal": 1e-40, "complex array": np.array(1j)}
NO_POSITIVE_FLOAT = {**NO_FLOAT, "negative": -1.0}
NO_BOOL = {**THINGS, "None": None, "text bool": "False", "int": 1, "float": 0.0, "array": np.array(True), "list": [True]}
NO_NAME = {**THINGS, "another name": "banana", "int": 3, "tuple": ("xla",), "list": [], "array": np.zeros(2), "upper case": "XLA"}
NO_DTYPE = {**THINGS, "another name": "banana", "int": 3, "list": [], "array": np.zeros(2), "integer": "int32", "complex": "complex64"}
NO_TREE = {**THINGS, "None": None, "int": 3, "array": np.zeros(3), "empty": (), "a class": pp.KVCache, "a config": pp.CacheSpec}
NO_SCALAR = {**NO_POSITIVE_FLOAT, "zero": 0.0, "matrix": np.ones((1, 1))}
NO_CACHE_SCALE = {**NO_POSITIVE_FLOAT, "zero": 0.0, "list": [1.0, 2.0], "not 1": 2.0, "matrix": np.ones((3, 3))}
NO_LAYER = {**NO_INT, "past": 1, "negative": -1, "2**32": 2**32, "float array": np.zeros((), np.float32)}
del NO_LAYER["list"], NO_LAYER["bool"]
NO_WINDOW = {k: v for k, v in NO_INT.items() if k != "None"} | {"negative": -2, "far below": -(2**70)}

OPTIONS = {
    "implementation": NO_NAME,
    "layer": NO_LAYER,
    "scale": NO_FLOAT,
    "sliding_window": NO_WINDOW,
    "logits_soft_cap": NO_POSITIVE_FLOAT,
    "alibi_slopes": no_vector(HEADS),
    "sinks": no_vector(HEADS),
    "q_scale": NO_SCALAR,
    "output_scale": NO_SCALAR,
    "output_dtype": NO_DTYPE,
    "qq_bias": {
        **no_array(2),
        "rank 3": np.zeros((3, 2, 2)),
        "rank 4": np.zeros((2, 2, 2, 2)),
        "NaN": np.full((2, 2), np.nan),
        "infinite": np.full((2, 2), np.inf),
        "bools": np.ones((2, 2), bool),
    },
    "key_range": {**THINGS, "one": (np.zeros(TOKENS, int),), "short": [np.zeros(2, int)] * 2, "floats": (np.zeros(TOKENS),) * 2},
    "return_lse": NO_BOOL,
    "causal": NO_BOOL,
    "is_neox": NO_BOOL,
    "is_interleaved": NO_BOOL,
    "eps": {**NO_POSITIVE_FLOAT, "zero": 0.0, "None": None},
    "num_heads": {**NO_POSITIVE_INT, "odd": 3, "others": 2 * HEADS},
    "mrope_section": {**THINGS, "None": None, "two": (8, 8), "fractions": (6.0, 5, 5), "negative": (-1, 12, 5), "another sum": (6, 5, 6)},
    "common_prefix_len": {**NO_INT, "negative": -BLOCK, "within a block": 3, "past": 100 * BLOCK},
    "cache": NO_TREE,
    "metadata": NO_TREE,
    "spec": NO_TREE,
    "blocks": NO_TREE,
    "query": no_floats(TOKENS, HEADS, SIZE),
    "key": no_floats(TOKENS, KV_HEADS, SIZE),
    "value": no_floats(TOKENS, KV_HEADS, SIZE),
    "out_a": no_floats(TOKENS, HEADS, SIZE),
    "out_b": no_floats(TOKENS, HEADS, SIZE),
    "lse_a": no_floats(TOKENS, HEADS),
    "lse_b": no_floats(TOKENS, HEADS),
    "qkv": no_floats(TOKENS, (HEADS + 2 * KV_HEADS) * SIZE),
    "q_weight": no_floats(SIZE),
    "k_weight": no_floats(SIZE),
    "cos_sin_cache": no_floats(32, SIZE),
    "slot_mapping": no_ints(TOKENS),
    "positions": {**no_ints(TOKENS), "negative": np.array([0, -1, 2]), "past": np.array([0, 32, 2]), "far past": np.array([0, 2**32, 2])},
    "block_ids": no_ints(2, longer=False),
    "src": no_ints(2),
    "dst": no_ints(2),
}
"""Bad values of the arguments of functions, by name."""

# Any number of tokens in the first array is another batch; the error names one of the arrays that disagree.
LENGTH_OF_ANOTHER = {"query", "key", "value", "out_a", "out_b", "qkv", "positions", "slot_mapping", "src", "dst"}
RIGHT = {
    ("paged_attention", "query", "longer axis 0"),  # more rows than the metadata's tokens are padding
    ("cascade_attention", "query", "longer axis 0"),
    ("encoder_attention", "value", "longer axis 2"),  # any head size of the values
    ("rotary_embedding", "query", "longer axis 1"),  # any number of heads
    ("rotary_embedding", "key", "longer axis 1"),
}


def call_cases():
    for name, function in CALLS.items():
        for argument in inspect.signature(function).parameters:
            if argument in ("key", "value") and name == "cache_from_logical":
                bad = no_floats(1, BLOCKS, BLOCK, KV_HEADS, SIZE)
            elif argument in ("k_scale", "v_scale"):
                bad = NO_CACHE_SCALE
            else:
                bad = OPTIONS[argument]
            for what, value in bad.items():
                if (name, argument, what) in RIGHT or (argument, what) == ("cos_sin_cache", "longer axis 0"):
                    continue
                yield f"{name}-{argument}-{what}", name, argument, value


def refused_by_name(call, argument, others=()):
    """None where `call` is refused by the name of the argument, else what happened."""
    try:
        call()
    except REFUSED as error:
        text = str(error)
        if any(re.search(rf"\b{name}\b", text) for name in (argument, *others)):
            return None
        return f"unnamed: {type(error).__name__}: {text[:200]}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return "accepted"


def call_report():
    base = {name: arguments(name, "float32") for name in CALLS}
    wrong = {}
    for label, name, argument, value in call_cases():
        arrays, static = base[name]
        others = LENGTH_OF_ANOTHER & arrays.keys() if argument in LENGTH_OF_ANOTHER or argument == "num_heads" else ()
        kwargs = {**arrays, **static, argument: value}
        found = refused_by_name(partial(CALLS[name], **kwargs), argument, others)
        if found:
            wrong[label] = found
    return wrong


def test_no_function_takes_a_bad_argument_or_refuses_one_without_its_name():
    wrong = call_report()
    assert not wrong, "\n".join(f"{label}: {found}" for label, found in wrong.items())


def test_every_function_and_argument_is_in_the_sweep():
    functions = {name for name in pp.__all__ if inspect.isfunction(getattr(pp, name))}
    assert functions - set(CALLS) - set(HOST) == set()
    for name in CALLS:
        assert set(inspect.signature(CALLS[name]).parameters) <= {*OPTIONS, "k_scale", "v_scale"}


METADATA = {
    "query_start_loc": no_ints(3),
    "seq_lens": no_ints(2),
    "block_table": {**no_ints(2, 2, longer=False), "rows": np.zeros((3, 2), np.int32)},
    "slot_mapping": no_ints(TOKENS, longer=False),
    "max_query_len": {**NO_INT, "negative": -1},
    "max_seq_len": {**{k: v for k, v in NO_INT.items() if k != "None"}, "negative": -1},
    "causal": NO_BOOL,
    "block_size": {**{k: v for k, v in NO_INT.items() if k != "None"}, "another": 2 * BLOCK, "zero": 0, "negative": -1},
}
CACHE = {
    "data": no_array(5) | {"None": None, "number": 1.0, "dtype": np.zeros(cache_spec("float32").shape, np.int8)},
    "k_scale": {**no_array(1), "None": None, "number": 1.0, "three": np.ones(3, np.float32)},
    "v_scale": {**no_array(1), "None": None, "number": 1.0, "three": np.ones(3, np.float32)},
    "spec": NO_TREE,
}


def test_no_bad_metadata_or_cache_passes():
    arrays, static = arguments("paged_attention", "float32")
    wrong = {}
    for owner, table in (("metadata", METADATA), ("cache", CACHE)):
        for field, bad in table.items():
            for what, value in bad.items():

                def call(owner=owner, field=field, value=value):
                    return pp.paged_attention(**{**arrays, owner: replace(arrays[owner], **{field: value})}, **static)

                found = refused_by_name(call, field)
                if found:
                    wrong[f"{owner}.{field}-{what}"] = found
    assert not wrong, "\n".join(f"{label}: {found}" for label, found in wrong.items())


SEQUENCE = [[0, 1], [2, 3]]
NO_LENS = {k: v for k, v in no_ints(2).items() if k not in ("longer",)} | {
    "negative": [-1, 1],
    "past int32": [2**31, 1],
    "far past": [2**63, 1],
    "other length": [1, 1, 1],
}
NO_OPTIONAL_INT = {k: v for k, v in NO_INT.items() if k != "None"} | {"negative": -1}
NO_TABLE = {**no_ints(2, 2, longer=False), "rows": np.zeros((1, 2), int), "list of floats": [[1.0, 2.0], [3.0, 4.0]]}
HOST = {
    "init_cache": (
        lambda **k: pp.init_cache(**k),
        {"spec": cache_spec("float32")},
        {
            "spec": NO_TREE,
            "k_scale": NO_CACHE_SCALE,
            "v_scale": NO_CACHE_SCALE,
        },
    ),
    "make_metadata": (
        lambda **k: pp.make_metadata(**k),
        {"query_lens": [2, 1], "seq_lens": [20, 18], "block_table": SEQUENCE, "block_size": BLOCK},
        {
            "query_lens": NO_LENS,
            "seq_lens": {**NO_LENS, "past the table": [40, 18]},
            "block_table": NO_TABLE,
            "block_size": NO_POSITIVE_INT,
            "num_tokens": {**NO_OPTIONAL_INT, "few": 2},
            "num_seqs": {**NO_OPTIONAL_INT, "few": 1},
            "max_query_len": {**NO_OPTIONAL_INT, "few": 1},
            "max_seq_len": {**NO_OPTIONAL_INT, "few": 19},
            "causal": NO_BOOL,
        },
    ),
    "cross_metadata": (
        lambda **k: pp.cross_metadata(**k),
        {"query_lens": [2, 1], "encoder_lens": [20, 18], "block_table": SEQUENCE, "block_size": BLOCK, "write": True},
        {
            "query_lens": NO_LENS,
            "encoder_lens": {**NO_LENS, "past the table": [40, 18]},
            "block_table": NO_TABLE,
            "block_size": NO_POSITIVE_INT,
            "write": NO_BOOL,
            "num_tokens": {**NO_OPTIONAL_INT, "few": 2},
            "num_encoder_tokens": {**NO_OPTIONAL_INT, "few": 20},
            "num_seqs": {**NO_OPTIONAL_INT, "few": 1},
            "max_query_len": {**NO_OPTIONAL_INT, "few": 1},
            "max_seq_len": {**NO_OPTIONAL_INT, "few": 19},
        },
    ),
    "decode_metadata": (
        lambda **k: pp.decode_metadata(**k),
        {"seq_lens": np.array([20, 18]), "block_table": np.array(SEQUENCE), "block_size": BLOCK},
        {
            "seq_lens": no_ints(2),
            "block_table": NO_TABLE,
            "block_size": NO_POSITIVE_INT,
            "max_seq_len": NO_OPTIONAL_INT,
        },
    ),
    "validate_metadata": (
        lambda **k: pp.validate_metadata(**k),
        {"metadata": arguments("paged_attention", "float32")[0]["metadata"], "spec": cache_spec("float32")},
        {"metadata": NO_TREE, "spec": NO_TREE, "writes": NO_BOOL, "sliding_window": NO_WINDOW},
    ),
    "debug_checks": (pp.debug_checks, {}, {}),
    "CacheSpec": (
        lambda **k: pp.CacheSpec(**k),
        {"num_blocks": 4, "block_size": 16, "num_kv_heads": 2, "head_size": 32},
        {
            **dict.fromkeys(("num_blocks", "block_size", "num_kv_heads", "head_size", "num_layers"), NO_POSITIVE_INT),
            "head_size_v": {what: value for what, value in NO_POSITIVE_INT.items() if value is not None},
            "dtype": {**NO_DTYPE, "None": None, "float64": np.float64},
            "content": {**NO_NAME, "None": None},
            "order": {**NO_NAME, "None": None, "lower case": "lbhnc"},
        },
    ),
    "AttentionConfig": (
        lambda **k: pp.AttentionConfig(**k),
        {"num_heads": 4, "num_kv_heads": 2, "head_size": 32},
        {
            **dict.fromkeys(("num_heads", "num_kv_heads", "head_size"), NO_POSITIVE_INT),
            "head_size_v": {what: value for what, value in NO_POSITIVE_INT.items() if value is not None},
            "scale": NO_FLOAT,
            "sliding_window": NO_WINDOW,
            "logits_soft_cap": NO_POSITIVE_FLOAT,
            "attn_type": {**NO_NAME, "None": None},
            "alibi_slopes": no_vector(4),
            "sinks": no_vector(4),
            "kv_cache_dtype": {k: v for k, v in NO_NAME.items() if not isinstance(v, str)} | {"None": None},
        },
    ),
}
"""Functions and types whose arguments are of the host: (function, arguments that are right, bad values by argument)."""


@pytest.mark.parametrize("name", HOST)
def test_no_bad_argument_of_the_host_passes(name):
    function, right, table = HOST[name]
    function(**right)
    wrong = {}
    for argument, bad in table.items():
        for what, value in bad.items():
            others = ("seq_lens", "encoder_lens", "block_table") if argument.endswith("_lens") else ()  # as many of each
            found = refused_by_name(lambda a=argument, v=value: function(**{**right, a: v}), argument, others)
            if found:
                wrong[f"{argument}-{what}"] = found
    assert not wrong, "\n".join(f"{label}: {found}" for label, found in wrong.items())


def test_every_field_of_the_types_is_in_the_sweep():
    assert {f.name for f in fields(pp.AttentionMetadata)} == METADATA.keys()
    assert {f.name for f in fields(pp.KVCache)} == CACHE.keys()
    for name in ("CacheSpec", "AttentionConfig"):
        assert {f.name for f in fields(getattr(pp, name))} == HOST[name][2].keys()
