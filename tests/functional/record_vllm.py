"""Records facts about vLLM's two ROCm backends from a wheel, as JSON: names, flags, answers, early returns, ignored arguments.

    pip download --no-deps vllm==0.33.0
    python tests/functional/record_vllm.py vllm-0.33.0-*.whl > tests/functional/data/vllm_0_33.json

The wheel's Python files are read, nothing is installed. The modules of the backends run with stand-ins for all else that they import, so
that a machine with CPU torch is enough; kernels are replaced by recorders of what they are called with.
"""

import ast
import base64
import dataclasses
import importlib.abc
import importlib.machinery
import inspect
import itertools
import json
import re
import sys
import types
import zipfile
import zlib
from typing import Any

import torch

CORE, ATTN = "vllm.v1.attention.backend", "vllm.v1.attention.backends.rocm_attn"
UNIFIED, OPS = "vllm.v1.attention.backends.rocm_aiter_unified_attn", "vllm.v1.attention.ops.chunked_prefill_paged_decode"
SPECS = "vllm.v1.kv_cache_interface"
RUN = (CORE, ATTN, UNIFIED, OPS, SPECS, "vllm.v1.kv_cache_layout", "vllm.v1.attention.ops.paged_attn")
"""Modules that run as they are; every other module of the packages below is a stand-in."""

STAND_IN_PACKAGES = ("vllm", "aiter", "triton")
TYPES = ("decoder", "encoder", "encoder_only", "encoder_decoder")

GATE_AXES: dict[str, list[Any]] = {
    "query_dtype": ["float16", "bfloat16", "float32"],
    "head_size": [64, 80, 128],
    "block_size": [16, 32, 64],
    "gqa_ratio": [1, 2, 3, 16, 17],
    "max_seq_len": [131072, 131073],
    "sliding_window": [0, [-1, -1], 1, [127, 0]],
    "kv_cache_dtype": ["auto", "fp8", "fp8_e5m2"],
    "alibi_slopes": [False, True],
    "sinks": [False, True],
}
GATE_ARCHS = "gfx906 gfx908 gfx90a gfx940 gfx941 gfx942 gfx950 gfx1030 gfx1100 gfx1101 gfx1151 gfx1200 gfx1201 gfx1250 sm_90".split()


class _Anything(type):
    """The type of stand-ins: any attribute, item, call, union or decoration of one is another, and it can be inherited from."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = stand_in(name)
        setattr(cls, name, made)
        return made

    def __call__(cls, *arguments: Any, **_: Any) -> Any:
        return arguments[0] if len(arguments) == 1 and inspect.isfunction(arguments[0]) else cls

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __or__(cls, _: Any) -> Any:
        return cls

    __ror__ = __or__


def stand_in(name: str) -> Any:
    return _Anything.__new__(_Anything, name, (), {"__mro_entries__": lambda *_: (), "__init_subclass__": lambda **_: None})


def _platform() -> Any:
    platform = stand_in("current_platform")
    platform.fp8_dtype = lambda: torch.float8_e4m3fn
    return platform


KNOWN = {
    "vllm.platforms": {"current_platform": _platform()},
    "vllm.utils.torch_utils": {"get_dtype_size": lambda dtype: dtype.itemsize},
    "vllm.platforms.rocm": {"on_gfx1250": lambda: False, "on_gfx11": lambda: False},
    "vllm.config.cache": {"get_kv_cache_dtype_handler": lambda _: None},
    "vllm._aiter_ops": {"IS_AITER_FOUND": True},
}
"""What stand-ins must answer for the recorded methods to run: an arch whose fp8 is e4m3fn, with AITER."""


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, wheel: zipfile.ZipFile) -> None:
        self.wheel = wheel

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in STAND_IN_PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=name not in RUN)

    def create_module(self, spec: Any) -> Any:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        name = module.__name__
        if name in RUN:
            exec(compile(read(self.wheel, name), name, "exec"), module.__dict__)
            return
        made: dict[str, Any] = dict(KNOWN.get(name, {}))
        module.__getattr__ = lambda attribute: made.setdefault(attribute, stand_in(attribute))


def read(wheel: zipfile.ZipFile, module: str) -> str:
    return wheel.read(module.replace(".", "/") + ".py").decode()


def outcome(function: Any, *arguments: Any, **options: Any) -> str:
    """The class of what a call raises, or "returns"."""
    try:
        function(*arguments, **options)
    except Exception as error:
        return type(error).__name__
    return "returns"


def ranges(numbers: list[int]) -> list[list[int]]:
    """Sorted numbers as [first, last, step] of each evenly spaced run."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][2] in (0, number - runs[-1][1]):
            runs[-1][1:] = [number, number - runs[-1][1]]
        else:
            runs.append([number, number, 0])
    return runs


def name_of(value: Any) -> str:
    return str(getattr(value, "name", None) or value).removeprefix("torch.")


def layer_of(implementation: type, **options: Any) -> Any:
    given = {"attn_type": "decoder", "sliding_window": None, "alibi_slopes": None, "kv_cache_dtype": "auto", "sinks": None}
    layer = object.__new__(implementation)
    layer.__init__(num_heads=4, head_size=32, scale=1.0, num_kv_heads=2, logits_soft_cap=None, **{**given, **options})
    return layer


def calls_of_forward(module: types.ModuleType, layer: Any, query: Any, metadata: Any, scale: float = 1.0) -> dict[str, Any] | str:
    """What the kernel is called with, or the class of what `forward` raises first."""
    called: dict[str, Any] = {}
    cache = torch.zeros(3, 2, 16, 64, dtype=torch.uint8 if "fp8" in layer.kv_cache_dtype else torch.bfloat16)
    prefill = sys.modules["vllm.v1.attention.ops.triton_prefill_attention"]
    fallback = sys.modules["vllm.v1.attention.ops.triton_unified_attention"]
    module.__dict__["chunked_prefill_paged_decode"] = called.update
    layer.unified_attention = prefill.context_attention_fwd = fallback.unified_attention = called.update
    layer.fp8_dtype = torch.float8_e4m3fn
    scales = types.SimpleNamespace(_q_scale="q", _q_scale_float=scale, _k_scale=torch.ones(1), _v_scale=torch.ones(1))
    key = torch.zeros(4, 2, 32, dtype=torch.bfloat16)
    try:
        layer.forward(scales, query, key, key, cache, metadata, torch.zeros(4, 4, 32), output_scale=0.5)
    except Exception as error:
        return type(error).__name__
    return called


def facts_of_forward(module: types.ModuleType, implementation: type) -> dict[str, Any]:
    def metadata(causal: bool = True) -> Any:
        lens = torch.tensor([4])
        fields = {"num_actual_tokens": 4, "max_query_len": 4, "query_start_loc": torch.tensor([0, 4]), "max_seq_len": 4, "seq_lens": lens}
        return types.SimpleNamespace(**fields, block_table=torch.zeros(1, 1), slot_mapping=torch.arange(4), causal=causal)

    half, eight = torch.zeros(4, 4, 32, dtype=torch.bfloat16), torch.zeros(4, 4, 32).to(torch.float8_e4m3fn)
    found: dict[str, Any] = {"profiling": {}, "kernel arguments": {}, "q_scale": {}}
    for kind in TYPES:
        layer = layer_of(implementation, attn_type=kind, kv_cache_dtype="fp8")
        output = torch.ones(2)
        layer.forward(None, None, None, None, None, None, output)
        found["profiling"][kind] = "zeros" if not output.any() else "other"
        blocked = outcome(layer.forward, None, None, None, None, None, None, output, None, 1)
        found["profiling"][f"{kind}, output_block_scale"] = blocked
        causal = kind != "encoder_decoder"
        options = {"attn_type": kind, "sliding_window": 5, "alibi_slopes": [1.0] * 4, "sinks": torch.ones(4)}
        called = calls_of_forward(module, layer_of(implementation, **options), half, metadata(causal))
        found["kernel arguments"][kind] = called if isinstance(called, str) else sorted(called)
        quantized = calls_of_forward(module, layer_of(implementation, attn_type=kind, kv_cache_dtype="fp8"), half, metadata(causal))
        found["kernel arguments"][f"{kind}, fp8 cache"] = quantized if isinstance(quantized, str) else "served"
    for query, kind in itertools.product((half, eight), ("auto", "fp8")):
        for scale in (1.0, 0.5):
            called = calls_of_forward(module, layer_of(implementation, kv_cache_dtype=kind), query, metadata(), scale)
            case = f"{name_of(query.dtype)} query, {kind} cache, scale {scale}"
            found["q_scale"][case] = called if isinstance(called, str) else "applied" if called.get("q_descale") is not None else "ignored"
    return found


def unread_parameters(source: str, class_name: str) -> dict[str, list[str]]:
    """Parameters of each method that its body never loads."""
    (cls,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == class_name)
    found = {}
    for method in (node for node in cls.body if isinstance(node, ast.FunctionDef)):
        loaded = {node.id for node in ast.walk(method) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        names = [argument.arg for argument in method.args.args if argument.arg not in ("self", "cls")]
        unread = [name for name in names if name not in loaded]
        if unread and len(unread) < len(names):
            found[method.name] = unread
    return found


def facts_of_builder(module: types.ModuleType, builder: type) -> dict[str, Any]:
    def build(method: str, *arguments: Any) -> tuple[Any, Any]:
        common = types.SimpleNamespace(
            num_actual_tokens=4,
            max_query_len=3,
            max_seq_len=33,
            query_start_loc=torch.tensor([0, 3, 4]),
            seq_lens=torch.tensor([20, 33]),
            block_table_tensor=torch.tensor([[0, 1, -1], [2, 3, 4]]),
            slot_mapping=torch.tensor([17, 18, 19, 64]),
            causal=True,
        )
        return getattr(object.__new__(builder), method)(*arguments, common), common

    def values(metadata: Any) -> dict[str, Any]:
        return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in vars(metadata).items()}

    plain, prefixed, captured = (values(build(*call)[0]) for call in (("build", 0), ("build", 16), ("build_for_cudagraph_capture",)))
    return {
        "cudagraph": builder._cudagraph_support.name,
        "fields": {
            f.name: None if f.default is dataclasses.MISSING else f.default for f in dataclasses.fields(module.RocmAttentionMetadata)
        }
        if hasattr(module, "RocmAttentionMetadata")
        else {},
        "common_prefix_len changes": sorted(name for name in plain if plain[name] != prefixed[name]),
        "capture changes": {name: captured[name] for name in plain if plain[name] != captured[name]},
        "parameters": list(inspect.signature(builder.build).parameters)[1:],
    }


def facts_of_specs(backend: type, specs: types.ModuleType) -> dict[str, Any]:
    def made(**changes: Any) -> Any:
        fields = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16, **changes}
        try:
            spec = backend.customize_spec(specs.FullAttentionSpec(**fields))
        except Exception as error:
            return type(error).__name__
        return {"num_head_slots": spec.num_head_slots, "state_content_bytes": spec.state_content_bytes}

    cases = {f"block_size {size}": made(block_size=size) for size in (1, 16, 24, 64)}
    return {**cases, "head_size_v 16": made(head_size_v=16)}


def facts_of_backend(wheel: zipfile.ZipFile, module: types.ModuleType, backend: type, quant_keys: list[str]) -> dict[str, Any]:
    core, specs = sys.modules[CORE], sys.modules[SPECS]
    implementation, builder = backend.get_impl_cls(), backend.get_builder_cls()
    flags = {}
    for name, _ in inspect.getmembers(core.AttentionBackend, callable):
        if name.startswith(("supports_", "is_")) and not list(inspect.signature(getattr(backend, name)).parameters):
            flags[name] = getattr(backend, name)()
    usual = {"head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 64, "attn_type": "decoder"}
    parameters = list(inspect.signature(backend.validate_configuration).parameters)
    usual |= dict.fromkeys((name for name in parameters if name.startswith(("use_", "has_"))), False) | {"device_capability": None}
    quant = sys.modules["vllm.model_executor.layers.quantization.utils.quant_utils"]
    methods = {}
    for name, method in inspect.getmembers(implementation, inspect.isfunction):
        if name.startswith("do_") or name in ("forward", "__init__"):
            methods[name] = list(inspect.signature(method).parameters)[1:]
    layouts = {}
    for kv_connector in (False, True):
        sys.modules[UNIFIED]._kv_connector_enabled = lambda kv_connector=kv_connector: kv_connector
        layouts["with a KV connector" if kv_connector else "without"] = [name_of(order) for order in backend.supported_kv_cache_layouts()]
    writers = {name: parameters for name, parameters in methods.items() if name.startswith("do_")}
    early = {
        name: {kind: outcome(getattr(layer_of(implementation, attn_type=kind), name), *([None] * len(given))) for kind in TYPES}
        for name, given in writers.items()
        if getattr(implementation, name) is not getattr(core.AttentionImpl, name, None)
    }
    return {
        "classes": methods_of(backend, implementation, builder),
        "flags": flags,
        "attributes": {
            name: getattr(owner, name)
            for owner, names in (
                (backend, ("forward_includes_kv_cache_update", "supports_kv_cache_update_bypass")),
                (implementation, ("supports_pcp", "supports_dcp", "supports_quant_query_input", "can_return_lse_for_decode")),
                (builder, ("reorder_batch_threshold", "supports_update_block_table", "supports_draft_decode_metadata_update")),
            )
            for name in names
        },
        "dtypes": [name_of(dtype) for dtype in backend.supported_dtypes],
        "kv_cache_dtypes": list(backend.supported_kv_cache_dtypes),
        "head_sizes up to 512": ranges([size for size in range(1, 513) if backend.supports_head_size(size)]),
        "block_sizes up to 2048": ranges([size for size in range(1, 2049) if backend.supports_block_size(size)]),
        "block_size None": backend.supports_block_size(None),
        "preferred_block_size": {str(size): backend.get_preferred_block_size(size) for size in (1, 16, 24, 32, 64, 544)},
        "attn_types": [kind for kind in (*TYPES, "other") if backend.supports_attn_type(kind)],
        "layouts": layouts,
        "customize_spec": facts_of_specs(backend, specs),
        "validate_configuration": parameters,
        "refused by validate_configuration": [
            name for name in parameters if name.startswith(("use_", "has_")) and backend.validate_configuration(**{**usual, name: True})
        ],
        "fused_output_quant": [key for key in quant_keys if layer_of(implementation).fused_output_quant_supported(getattr(quant, key))],
        "fused_mrope": bool(layer_of(implementation).fused_qk_norm_mrope_kvcache_supported()),
        "parameters": methods,
        "writers without a cache": early,
        "forward": facts_of_forward(module, implementation),
        "never read": unread_parameters(read(wheel, module.__name__), implementation.__name__),
        "builder": facts_of_builder(module, builder),
    }


def facts_of_step() -> dict[str, Any]:
    """Which kernels ROCM_ATTN runs for a step, by `max_query_len`."""
    ops = sys.modules[OPS]
    found = {}
    for longest in (1, 3):
        run: list[str] = []

        class Decode:
            def __getitem__(self, _: Any, run: list[str] = run) -> Any:
                return lambda **given: run.append(f"decode, filter_by_query_len={given['filter_by_query_len']}")

        ops.context_attention_fwd = lambda run=run, **given: run.append(f"prefill, skip_decode={given['skip_decode']}")
        ops.kernel_paged_attention_2d = Decode()
        ops.triton = types.SimpleNamespace(next_power_of_2=lambda n: 1 << (n - 1).bit_length())
        sys.modules["vllm.platforms.rocm"].use_rocm_custom_paged_attention = lambda *_: False
        query, key = torch.zeros(4, 4, 32), torch.zeros(4, 2, 32)
        caches = torch.zeros(3, 2, 8, 16, 4), torch.zeros(3, 2, 32, 16)
        starts, lens, table = torch.tensor([0, 3, 4]), torch.tensor([3, 9]), torch.zeros(2, 1, dtype=torch.int32)
        ops.chunked_prefill_paged_decode(query, key, key, query, "auto", *caches, table, starts, lens, 9, longest, 1.0, 1.0)
        found[f"max_query_len {longest}"] = run
    return found


def facts_without_slots(wheel: zipfile.ZipFile) -> dict[str, list[str]]:
    """What the layer's operations do to their outputs where a step has no slots (profiling): names of the buffers that are zeroed."""
    operations = {
        "vllm.model_executor.layers.attention.attention": ("unified_kv_cache_update",),
        "vllm.compilation.passes.fusion.rope_kvcache_fusion": ("fused_rope_and_unified_kv_cache_update_impl",),
        "vllm.compilation.passes.fusion.qk_norm_rope_kvcache_fusion": (
            "fused_qk_norm_rope_and_unified_kv_cache_update_impl",
            "fused_qk_norm_mrope_and_unified_kv_cache_update_impl",
        ),
    }
    found = {}
    for module, names in operations.items():
        for node in ast.parse(read(wheel, module)).body:
            if not isinstance(node, ast.FunctionDef) or node.name not in names:
                continue
            scope = {"torch": torch, "LayerNameType": str, "_resolve_layer_name": str, "get_attention_context": lambda _: (None,) * 4}
            exec(compile(ast.Module([node], []), module, "exec"), scope)
            given = {argument.arg: torch.ones(2, 2) for argument in node.args.args}
            scope[node.name](**given)
            found[node.name.removesuffix("_impl")] = [name for name, value in given.items() if not value.any()]
    return found


def gate_of(wheel: zipfile.ZipFile) -> list[dict[str, Any]]:
    """The answers of `use_rocm_custom_paged_attention` over the grid, for each set of archs that share them.

    Answer i is bit i of the bytes (little endian) that base64 and zlib hold; the last axis of the grid is the fastest.
    """
    wanted = {"use_rocm_custom_paged_attention", "on_cdna"}
    body = ast.parse(read(wheel, "vllm.platforms.rocm")).body
    functions = [node for node in body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    flags = [node for node in body if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "").startswith("_ON_")]
    found: dict[str, list[str]] = {}
    for arch in GATE_ARCHS:
        scope: dict[str, Any] = {"torch": torch, "cache": lambda function: function, "_GCN_ARCH": arch}
        exec(compile(ast.Module([*flags, *functions], []), "rocm", "exec"), scope)
        bits = 0
        for count, values in enumerate(itertools.product(*GATE_AXES.values())):
            dtype, *sizes, window, kind, alibi, sinks = values
            window = tuple(window) if isinstance(window, list) else window
            given = (getattr(torch, dtype), *sizes, window, kind, True if alibi else None, True if sinks else None)
            bits |= bool(scope["use_rocm_custom_paged_attention"](*given)) << count
        size = -(-(count + 1) // 8)
        found.setdefault(base64.b64encode(zlib.compress(bits.to_bytes(size, "little"), 9)).decode(), []).append(arch)
    return [{"archs": archs, "answers": answers} for answers, archs in found.items()]


ENVIRONMENT = re.compile(r"VLLM_ROCM_USE_AITER|VLLM_\w*(?:ATTN|ATTENTION|MHA|ROPE|KV_CACHE_LAYOUT|BATCH_INVARIANT)\w*|[QKV]_SCALE_CONSTANT")
"""Environment variables that decide how these backends attend, what their caches are, or whether they are chosen."""
OTHER_ENVIRONMENT = re.compile(r"MLA|FLASH_ATTN|FLASHINFER|CPU|NVFP4|VIT|VISION|KIMI|COHERE")
"""Parts of the names of variables of other backends."""


def environment_of(wheel: zipfile.ZipFile) -> list[str]:
    """Names of the environment variables that `vllm/envs.py` reads for these backends."""
    body = ast.parse(read(wheel, "vllm.envs")).body
    (table,) = (
        node.value for node in body if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "environment_variables"
    )
    assert isinstance(table, ast.Dict)
    names = [key.value for key in table.keys if isinstance(key, ast.Constant)]
    return [name for name in names if ENVIRONMENT.fullmatch(name) and not OTHER_ENVIRONMENT.search(name)]


def methods_of(*classes: type) -> dict[str, list[str]]:
    """Public functions of each class, inherited ones included, in alphabetical order."""
    kinds = (types.FunctionType, types.MethodType)
    return {one.__name__: sorted(name for name in dir(one) if name[0] != "_" and isinstance(getattr(one, name), kinds)) for one in classes}


def record(path: str) -> dict[str, Any]:
    with zipfile.ZipFile(path) as wheel:
        sys.meta_path.insert(0, _Finder(wheel))
        for name in (*RUN, "vllm.v1.attention.ops.triton_prefill_attention", "vllm.v1.attention.ops.triton_unified_attention"):
            importlib.import_module(name)
        attn, unified = sys.modules[ATTN], sys.modules[UNIFIED]
        quant_utils = ast.parse(read(wheel, "vllm.model_executor.layers.quantization.utils.quant_utils")).body
        targets = (node.targets[0] for node in quant_utils if isinstance(node, ast.Assign))
        keys = [name for name in (getattr(target, "id", "") for target in targets) if name[:1] == "k" and name[1:2].isupper()]
        return {
            "version": wheel.namelist()[-1].split("-")[1].removesuffix(".dist"),
            "attention types": [kind.value for kind in sys.modules[CORE].AttentionType],
            "backends": {
                "ROCM_ATTN": facts_of_backend(wheel, attn, attn.RocmAttentionBackend, keys),
                "ROCM_AITER_UNIFIED_ATTN": facts_of_backend(wheel, unified, unified.RocmAiterUnifiedAttentionBackend, keys),
            },
            "environment": environment_of(wheel),
            "step": facts_of_step(),
            "without slots": facts_without_slots(wheel),
            "gate axes": GATE_AXES,
            "gate": gate_of(wheel),
        }


def text_of(facts: dict[str, Any]) -> str:
    """JSON with one line for each list or dict that holds no other."""
    return re.sub(r"[\[{][^\[\]{}]*[\]}]", lambda found: " ".join(found[0].split()), json.dumps(facts, indent=1))


if __name__ == "__main__":
    print(text_of(record(sys.argv[1])))
