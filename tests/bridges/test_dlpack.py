"""The eager exchange with torch: shared memory where it says so, honest copies, no silent narrowing, views of every cache layout."""

import gc
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purepage.bridges.dlpack import DEVICE_TYPES, cache_to_torch, shares_memory, stream_argument, to_jax, to_torch, torch_device
from purepage.functional.cache import CacheSpec, cache_from_logical, cache_to_logical
from purepage.functional.errors import UnsupportedError

torch = pytest.importorskip("torch")

DTYPES = ["float32", "float16", "bfloat16", "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32"]
FP8 = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]
DEVICE = "cpu" if jax.default_backend() == "cpu" else "cuda"
on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="about memory of a CPU")


def bits(array):
    """The bytes of a JAX array or a torch tensor."""
    if isinstance(array, jax.Array):
        return np.asarray(array).tobytes()
    return bytes(array.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def sample(dtype, shape=(3, 4, 5), seed=0):
    """Every byte pattern that fits, NaNs among them."""
    size = int(np.prod(shape))
    if dtype == "bool":
        return jnp.asarray(np.random.default_rng(seed).integers(0, 2, shape).astype(bool))
    raw = np.random.default_rng(seed).integers(0, 256, size * jnp.dtype(dtype).itemsize, np.uint8)
    return jnp.asarray(raw.view(jnp.dtype(dtype)).reshape(shape))


@pytest.mark.parametrize("dtype", DTYPES + FP8)
def test_every_dtype_crosses_both_ways_in_one_memory_bit_for_bit(dtype):
    array = sample(dtype)
    tensor = to_torch(array)
    assert str(tensor.dtype) == f"torch.{dtype}"
    assert shares_memory(array, tensor)
    assert bits(tensor) == bits(array)
    back = to_jax(tensor)
    assert back.dtype == array.dtype
    assert shares_memory(back, tensor)
    assert bits(back) == bits(array)


@pytest.mark.parametrize("dtype", FP8)
def test_all_256_codes_of_an_fp8_kind_survive(dtype):
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    assert bits(to_jax(codes.view(getattr(torch, dtype)))) == bytes(range(256))
    assert bits(to_torch(jnp.asarray(np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype))))) == bytes(range(256))


@pytest.mark.parametrize("shape", [(), (0,), (0, 8, 128), (3, 0, 2), (1,), (3, 1, 6, 2), (1, 1, 1)], ids=str)
def test_scalars_empty_arrays_and_axes_of_size_one_cross_and_compute(shape):
    array = jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.float32)
    tensor = to_torch(array)
    assert tuple(tensor.shape) == shape
    back = to_jax(tensor)
    assert back.shape == shape
    np.testing.assert_array_equal(jax.jit(jnp.add)(back, back), 2 * np.asarray(array))


def test_an_axis_of_size_one_may_have_any_stride():
    tensor = torch.arange(24.0, device=DEVICE).as_strided((3, 1, 8), (8, 5, 1))
    np.testing.assert_array_equal(to_jax(tensor), np.arange(24.0).reshape(3, 1, 8))


@pytest.mark.parametrize("axes", [(1, 0, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_a_transposed_tensor_is_shared_and_indexes_right(axes):
    base = torch.arange(24.0, device=DEVICE).reshape(2, 3, 4)
    array = to_jax(base.permute(axes))
    expected = np.arange(24.0).reshape(2, 3, 4).transpose(axes)
    np.testing.assert_array_equal(array, expected)
    np.testing.assert_array_equal(jax.jit(lambda x: x[1, 0] + 1)(array), expected[1, 0] + 1)


STRIDED = {
    "columns": lambda x: x[:, :2],
    "every other row": lambda x: x[::2],
    "expanded": lambda x: x[:1].expand(4, 6),
    "one side of a packed pair": lambda x: x.view(4, 3, 2)[..., 1],
}


@pytest.mark.parametrize("view", STRIDED)
@pytest.mark.parametrize("copy", [None, False])
def test_a_view_that_skips_or_repeats_memory_is_refused_with_the_way_out(view, copy):
    tensor = STRIDED[view](torch.arange(24.0, device=DEVICE).reshape(4, 6))
    with pytest.raises(ValueError, match=re.escape("tensor.contiguous()")):
        to_jax(tensor, copy=copy)
    np.testing.assert_array_equal(to_jax(tensor.contiguous()), tensor.cpu().numpy())
    np.testing.assert_array_equal(to_jax(tensor, copy=True), tensor.cpu().numpy())


@pytest.mark.parametrize("size", [1, 16, 64, 1 << 20])
def test_copy_true_is_a_copy_in_both_directions(size):
    tensor = torch.arange(size, dtype=torch.float32, device=DEVICE)
    array = to_jax(tensor, copy=True)
    assert not shares_memory(array, tensor)
    tensor.fill_(-1.0)
    np.testing.assert_array_equal(array, np.arange(size, dtype=np.float32))
    out = to_torch(array, copy=True)
    out.fill_(-1.0)
    np.testing.assert_array_equal(array, np.arange(size, dtype=np.float32))


@pytest.mark.parametrize("copy", [None, False])
def test_without_a_copy_what_torch_writes_is_seen(copy):
    tensor = torch.zeros(64, device=DEVICE)
    array = to_jax(tensor, copy=copy)
    tensor[3] = 5.0
    assert shares_memory(array, tensor)
    assert float(array[3]) == 5.0


@on_cpu
def test_an_unaligned_tensor_is_copied_unless_copying_is_forbidden():
    base = torch.arange(65.0)
    array = to_jax(base[1:])
    assert not shares_memory(array, base[1:])
    base.fill_(-1.0)
    np.testing.assert_array_equal(array, np.arange(1.0, 65.0))
    with pytest.raises(ValueError, match=r"aligned to 64 bytes.*copy=True"):
        to_jax(base[1:], copy=False)


@pytest.mark.parametrize("dtype", ["int64", "float64", "complex128"])
@pytest.mark.parametrize("copy", [None, True])
def test_64_bit_values_are_refused_while_jax_would_cut_them(dtype, copy):
    tensor = torch.tensor([2**31 + 5, 1]).to(getattr(torch, dtype)).to(DEVICE)
    with pytest.raises(ValueError, match=f"torch.{dtype}.*cut it to .*jax_enable_x64"):
        to_jax(tensor, copy=copy)
    with pytest.raises(ValueError, match=f"{dtype}.*jax_enable_x64"):
        to_jax(tensor.cpu().numpy(), copy=copy)
    with jax.enable_x64(True):
        assert to_jax(tensor, copy=copy).dtype == dtype


REFUSED = {
    "requires_grad": (lambda: torch.zeros(3, requires_grad=True), ValueError, r"requires_grad: pass tensor\.detach\(\)"),
    "sparse": (lambda: torch.zeros(3, 3).to_sparse(), ValueError, r"to_dense\(\)"),
    "lazy conjugate": (lambda: torch.zeros(3, dtype=torch.complex64).conj(), ValueError, r"resolve_conj\(\)"),
    "meta device": (lambda: torch.zeros(3, device="meta"), ValueError, "not on meta"),
    "jax array": (lambda: jnp.zeros(3), TypeError, "not a jax.Array"),
    "list": (lambda: [1.0, 2.0], TypeError, "a torch tensor"),
    "strided numpy": (lambda: np.zeros((4, 4), np.float32)[:, :2], ValueError, "ascontiguousarray"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_shared_says_what_to_do(case):
    make, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        to_jax(make())


@on_cpu
def test_a_read_only_numpy_array_is_shared_never_and_copied_on_demand():
    array = np.arange(4, dtype=np.float32)
    array.flags.writeable = False
    with pytest.raises(ValueError, match="read-only: pass copy=True"):
        to_jax(array)
    np.testing.assert_array_equal(to_jax(array, copy=True), array)


def test_numpy_copies_do_not_follow_the_source():
    array = np.arange(4096, dtype=np.float32)
    copied = to_jax(array, copy=True)
    array[:] = -1
    np.testing.assert_array_equal(copied, np.arange(4096, dtype=np.float32))


def test_arrays_that_are_no_buffer_are_refused():
    with pytest.raises(TypeError, match=r"inside jax.jit use purepage.bridges.callback.call_torch"):
        jax.jit(to_torch)(jnp.zeros(3))
    with pytest.raises(TypeError, match="key_data"):
        to_torch(jax.random.key(0))
    with pytest.raises(TypeError, match="no dtype int4"):
        to_torch(jnp.zeros(3, jnp.int4))
    with pytest.raises(TypeError, match=r"a jax\.Array"):
        to_torch(np.zeros(3))
    donated = jnp.zeros(3)
    donated.delete()
    with pytest.raises(ValueError, match="was deleted: its buffer was donated"):
        to_torch(donated)
    with pytest.raises(ValueError, match="copy is 'yes': it must be None, True or False"):
        to_torch(jnp.zeros(3), copy="yes")


def test_memory_lives_as_long_as_either_side_needs_it():
    array = jnp.asarray(np.random.default_rng(2).standard_normal(100_000), jnp.float32)
    expected = np.array(array)
    first, second = to_torch(array), to_torch(array)
    del array, first
    gc.collect()
    np.testing.assert_array_equal(second.cpu().numpy(), expected)
    back = to_jax(second)
    del second
    gc.collect()
    np.testing.assert_array_equal(back, expected)


@pytest.mark.parametrize(
    ("name", "code", "device"),
    [("cpu", 1, "cpu"), ("cuda", 2, "cuda:1"), ("cuda_host", 3, "cpu"), ("rocm", 10, "cuda:1"), ("rocm_host", 11, "cpu")],
)
def test_dlpack_devices_have_torch_names(name, code, device):
    assert DEVICE_TYPES[name] == code
    assert torch_device(code, 1) == device


def test_an_unknown_dlpack_device_is_refused():
    with pytest.raises(ValueError, match="device_type is 99"):
        torch_device(99)


@pytest.mark.parametrize(
    ("platform", "stream", "argument"),
    [
        ("cpu", None, None),
        ("cuda", None, 1),
        ("cuda", 0, 1),
        ("cuda", 2, 2),
        ("cuda", -1, -1),
        ("cuda", 0x7F00, 0x7F00),
        ("rocm", None, 0),
        ("rocm", 0, 0),
        ("rocm", -1, -1),
        ("rocm", 0x7F00, 0x7F00),
    ],
)
def test_a_stream_is_spelled_as_its_platform_wants(platform, stream, argument):
    assert stream_argument(DEVICE_TYPES[platform], stream) == argument


@pytest.mark.parametrize(("platform", "stream"), [("rocm", 1), ("rocm", 2), ("cpu", 0), ("cpu", 1)])
def test_a_stream_that_its_platform_lacks_is_refused(platform, stream):
    with pytest.raises(ValueError, match=f"stream is {stream}"):
        stream_argument(DEVICE_TYPES[platform], stream)


LAYOUTS = [
    (content, order) for content in ("packed", "xpacked", "xpacked_interleaved_v", "shuffled", "flash") for order in ("LBHNC", "LHBNC")
]


def random_cache(content, order, dtype):
    spec = CacheSpec(num_blocks=3, block_size=16, num_kv_heads=2, head_size=32, num_layers=2, dtype=dtype, content=content, order=order)
    key, value = (sample(dtype, (2, 3, 16, 2, 32), seed) for seed in (3, 4))
    return cache_from_logical(spec, key, value)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fnuz"])
@pytest.mark.parametrize(("content", "order"), LAYOUTS, ids="-".join)
def test_views_of_a_cache_hold_its_logical_contents_without_a_copy(content, order, dtype):
    cache = random_cache(content, order, dtype)
    split = content not in ("packed", "flash")
    if split:
        with pytest.raises(UnsupportedError, match=r"no strided \[L, B, N, H, D\] view; pass native=True"):
            cache_to_torch(cache)
    views = cache_to_torch(cache, native=split)
    start, end = cache.data.unsafe_buffer_pointer(), cache.data.unsafe_buffer_pointer() + cache.data.nbytes
    for view, axes, side in zip(views, cache.spec.side_axes, (0, 1), strict=True):
        assert str(view.dtype) == f"torch.{dtype}"
        assert start <= view.data_ptr() < end
        if split:
            names = ["L", "B", *(axis for axis in axes if axis not in ("L", "B", "2"))]
            wanted = [names.index(axis) for group in "LBNHD" for axis in ([group] if group in names else [f"{group}/x", "x"])]
            view = view.permute(wanted).reshape(2, 3, 16, 2, 32)
        for layer in range(2):
            assert bits(view[layer]) == bits(cache_to_logical(cache, layer)[side])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_consumer_on_another_stream_waits_for_the_producer():
    x = jnp.asarray(np.random.default_rng(5).standard_normal((4096, 4096)), jnp.float32)
    long = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: jnp.tanh(y @ x), x))
    expected = float(to_torch(long(x).block_until_ready()).double().sum())
    side = torch.cuda.Stream()
    for _ in range(100):
        with torch.cuda.stream(side):
            total = to_torch(long(x)).double().sum()
        assert float(total) == expected
