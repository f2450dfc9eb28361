"""The stubs say what is there: names, arguments, defaults."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import maru_kv_ops as m
import pytest

TREE = ast.parse((Path(m.__file__).parent / "__init__.pyi").read_text())


def public(body):
    return {n.name: n for n in body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and not n.name.startswith("_")}


STUBS = public(TREE.body)


def test_every_public_name_has_a_stub():
    imported = {a.asname for n in TREE.body if isinstance(n, ast.ImportFrom) for a in n.names if a.asname}
    assert set(m.__all__) == set(STUBS) | imported


def test_marker_is_packaged():
    assert (Path(m.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize("name", [n for n, s in STUBS.items() if isinstance(s, ast.ClassDef)])
def test_members(name):
    cls, stub = getattr(m, name), STUBS[name]
    if issubclass(cls, Exception):
        assert [b.id for b in stub.bases] == [b.__name__ for b in cls.__bases__]
        return
    if hasattr(cls, "__members__"):
        assert {t.targets[0].id: t.value.value for t in stub.body} == {k: int(v) for k, v in cls.__members__.items()}
        return
    stated = set(public(stub.body)) | {t.target.id for t in stub.body if isinstance(t, ast.AnnAssign)}
    assert stated == {n for n in vars(cls) if not n.startswith("_")}


def functions():
    for name, stub in STUBS.items():
        if isinstance(stub, ast.FunctionDef):
            yield name, getattr(m, name), stub, 0
        elif not issubclass(getattr(m, name), Exception):
            for method, inner in public(stub.body).items():
                if not any(getattr(d, "id", "") == "property" for d in inner.decorator_list):
                    static = any(getattr(d, "id", "") == "staticmethod" for d in inner.decorator_list)
                    yield f"{name}.{method}", getattr(getattr(m, name), method), inner, 0 if static else 1


@pytest.mark.parametrize("name,function,stub,skip", [pytest.param(*f, id=f[0]) for f in functions()])
def test_arguments(name, function, stub, skip):
    real = list(inspect.signature(function).parameters.values())
    real = [p for p in real if p.name not in ("self", "$self")]
    stated = (stub.args.posonlyargs + stub.args.args)[skip:]
    assert [a.arg for a in stated + stub.args.kwonlyargs] == [p.name for p in real]
    optional = {a.arg for a in stated[len(stated) - len(stub.args.defaults) :]} if stub.args.defaults else set()
    optional |= {a.arg for a, d in zip(stub.args.kwonlyargs, stub.args.kw_defaults) if d is not None}
    assert optional == {p.name for p in real if p.default is not inspect.Parameter.empty}
    assert {a.arg for a in stub.args.kwonlyargs} == {p.name for p in real if p.kind is p.KEYWORD_ONLY}


def test_the_old_calls_are_as_the_old_callers_know_them():
    assert str(inspect.signature(m.multi_layer_kv_transfer)) == (
        "(key_value, key_value_ptrs, slot_mapping, paged_memory_device, page_buffer_size, direction, "
        "engine_kv_format, block_size=0, head_size=0, skip_prefix_n_tokens=0, block_stride_elems=0)"
    )
    assert str(inspect.signature(m.single_layer_kv_transfer)) == (
        "(lmc_key_value_cache, vllm_key_value_cache, slot_mapping, direction, engine_kv_format, token_major=False)"
    )
    assert str(inspect.signature(m.multi_layer_block_kv_transfer)) == (
        "(paged_buffer_ptrs_tensor, lmcache_objects_ptrs, block_ids, device, direction, shape_desc, "
        "lmcache_chunk_size, engine_kv_format, skip_prefix_n_blocks=0)"
    )
