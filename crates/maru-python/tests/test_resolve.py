"""resolve_ops, with each generation of LMCache played by small modules."""

from __future__ import annotations

import importlib.abc
import logging
import sys
import types

import maru_kv_ops as m
import pytest
from maru_kv_ops import resolve
from maru_kv_ops.resolve import resolve_ops

KERNELS = ("multi_layer_kv_transfer", "single_layer_kv_transfer", "multi_layer_block_kv_transfer")
LMCACHE = {"maru_kernel_source": "lmcache"}
FORMAT = "NL_X_TWO_NB_BS_NH_HS"


class Direction:
    H2D, D2H = 0, 1


class Format:
    NL_X_TWO_NB_BS_NH_HS, NL_X_NB_TWO_BS_NH_HS = 1, 2


def module(name: str, **members) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(members)
    return made


def kernels(*names):
    return {name: (lambda *a, **k: None) for name in names or KERNELS}


@pytest.fixture
def lmcache(monkeypatch):
    """Installs a fake LMCache of given submodules; every other ``lmcache`` name cannot be imported."""

    def install(**submodules):
        package = module("lmcache", __path__=[])
        monkeypatch.setitem(sys.modules, "lmcache", package)
        for name in ("c_ops", "lmcache_native", "cuda_ops"):
            made = submodules.get(name)
            monkeypatch.setitem(sys.modules, f"lmcache.{name}", made)
            if made is not None:
                setattr(package, name, made)
        return package

    return install


@pytest.fixture
def imports(monkeypatch):
    """Every name of LMCache that somebody tries to import."""
    asked = []

    class Watch(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == "lmcache":
                asked.append(name)
            return None

    monkeypatch.setattr(sys, "meta_path", [Watch(), *sys.meta_path])
    for name in [n for n in sys.modules if n.split(".")[0] == "lmcache"]:
        monkeypatch.delitem(sys.modules, name)
    return asked


def test_an_old_build(lmcache, caplog):
    c_ops = module("lmcache.c_ops", EngineKVFormat=Format, TransferDirection=Direction, **kernels())
    lmcache(c_ops=c_ops)
    with caplog.at_level(logging.INFO, "maru_kv_ops"):
        ops = resolve_ops(LMCACHE)
    assert ops.source == "lmcache" and ops.EngineKVFormat is Format and ops.TransferDirection is Direction
    assert ops.multi_layer_kv_transfer is c_ops.multi_layer_kv_transfer
    chosen = [r.getMessage() for r in caplog.records if "KV transfer kernels" in r.getMessage()]
    assert len(chosen) == 1 and "lmcache.c_ops" in chosen[0]


def test_a_build_with_the_enums_name_of_before(lmcache):
    lmcache(c_ops=module("lmcache.c_ops", GPUKVFormat=Format, TransferDirection=Direction, **kernels(*KERNELS[:2])))
    ops = resolve_ops(LMCACHE)
    assert ops.EngineKVFormat is Format and ops.multi_layer_block_kv_transfer is None


def test_moved_enums(lmcache):
    native = module("lmcache.lmcache_native", EngineKVFormat=Format, TransferDirection=Direction, PageBufferShapeDesc=int)
    lmcache(c_ops=module("lmcache.c_ops", **kernels()), lmcache_native=native)
    ops = resolve_ops(LMCACHE)
    assert ops.EngineKVFormat is Format and ops.PageBufferShapeDesc is int and ops.supports(FORMAT)


def test_kernels_in_cuda_ops(lmcache):
    native = module("lmcache.lmcache_native", EngineKVFormat=Format, TransferDirection=Direction)
    cuda = module("lmcache.cuda_ops", **kernels())
    lmcache(cuda_ops=cuda, lmcache_native=native)
    assert resolve_ops(LMCACHE).multi_layer_kv_transfer is cuda.multi_layer_kv_transfer


class CudaDeviceOps:
    """LMCache's object after the enums had moved: kernels, and no ``EngineKVFormat``."""

    def __getattr__(self, name):
        if name in KERNELS:
            return lambda *a, **k: None
        raise AttributeError(f"'CudaDeviceOps' object has no attribute '{name}'")


def test_regression_kernels_without_enums_crashed_the_save_hook(lmcache, monkeypatch, caplog):
    package = lmcache()
    package.c_ops = CudaDeviceOps()
    monkeypatch.setitem(sys.modules, "lmcache.c_ops", package.c_ops)
    # What the connector did in the forward pass:
    with pytest.raises(AttributeError, match="'CudaDeviceOps' object has no attribute 'EngineKVFormat'"):
        package.c_ops.EngineKVFormat.NL_X_TWO_NB_BS_NH_HS  # noqa: B018
    # What it gets now:
    with caplog.at_level(logging.INFO, "maru_kv_ops"):
        assert resolve_ops(LMCACHE) is None
    assert "without reachable enums" in caplog.text
    # And with the enums where they went:
    native = module("lmcache.lmcache_native", EngineKVFormat=Format, TransferDirection=Direction)
    monkeypatch.setitem(sys.modules, "lmcache.lmcache_native", native)
    assert resolve_ops(LMCACHE).EngineKVFormat is Format


def test_an_object_that_raises_anything_is_not_available(lmcache):
    class Hostile:
        def __getattr__(self, name):
            raise RuntimeError("CUDA driver is too old")

    package = lmcache()
    sys.modules["lmcache.c_ops"] = package.c_ops = Hostile()
    assert resolve_ops(LMCACHE) is None


def test_a_format_missing_from_the_enum(lmcache):
    lmcache(c_ops=module("lmcache.c_ops", EngineKVFormat=Format, TransferDirection=Direction, **kernels()))
    assert resolve_ops(LMCACHE, formats=[FORMAT]).supports(FORMAT)
    assert resolve_ops(LMCACHE, formats=[FORMAT, "NL_X_NB_NH_BS_TWO_HS"]) is None
    assert not resolve_ops(LMCACHE).supports("NL_X_NB_NH_BS_TWO_HS")


def test_half_an_enum_is_none(lmcache):
    class NoD2H:
        H2D = 0

    lmcache(c_ops=module("lmcache.c_ops", EngineKVFormat=Format, TransferDirection=NoD2H, **kernels()))
    assert resolve_ops(LMCACHE) is None


def test_nothing_installed(lmcache, imports, caplog):
    with caplog.at_level(logging.INFO, "maru_kv_ops"):
        assert resolve_ops(LMCACHE) is None
    assert "lmcache.c_ops" in caplog.text and imports


@pytest.mark.parametrize("failure", (ImportError("undefined symbol"), OSError("libc10.so"), RuntimeError("ABI"), KeyError("x")))
def test_an_installed_build_that_does_not_load(monkeypatch, failure):
    class Broken(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == "lmcache":
                raise failure
            return None

    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    assert resolve_ops(LMCACHE) is None


@pytest.mark.parametrize("key", ("maru_use_native_kernels", "maru_use_lmcache_kernels"))
@pytest.mark.parametrize("more", ({}, LMCACHE))
def test_switched_off_means_never_imported(lmcache, imports, key, more, monkeypatch):
    monkeypatch.setattr(resolve._native, "unavailable", lambda *a: pytest.fail("the driver was asked"), raising=True)
    assert resolve_ops({key: False, **more}) is None
    assert imports == []


def test_ours_never_imports_lmcache(imports):
    resolve_ops({})
    resolve_ops()
    assert imports == []


def test_ours_where_it_can_run(monkeypatch):
    monkeypatch.setattr(resolve._native, "unavailable", lambda ordinal=0: None)
    ops = resolve_ops({"maru_enable_fused_load": True, "maru_device": "cuda:1"})
    assert ops.source == "maru" and ops.enable_fused_load
    for name in (*KERNELS, "EngineKVFormat", "TransferDirection", "PageBufferShapeDesc"):
        assert getattr(ops, name) is getattr(m, name)
    assert resolve_ops({}, formats=["NL_X_NB_BSV_BSS"]) is None
    assert resolve_ops({"maru_use_native_kernels": True}).source == "maru"


def test_ours_where_it_cannot_run(monkeypatch, caplog):
    monkeypatch.setattr(resolve._native, "unavailable", lambda ordinal=0: ("not_available", "no NVIDIA driver"))
    with caplog.at_level(logging.INFO, "maru_kv_ops"):
        assert resolve_ops({"maru_enable_fused_load": True}) is None
    assert "maru_enable_fused_load needs kernels and is disabled: the native kernel cannot run: no NVIDIA driver" in caplog.text
    assert resolve_ops({"maru_device": "host"}) is None


def test_fused_load_with_kernels_off_warns(caplog):
    with caplog.at_level(logging.INFO, "maru_kv_ops"):
        assert resolve_ops({"maru_use_native_kernels": False, "maru_enable_fused_load": True}) is None
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1 and "enable_fused_load" in warnings[0]


def test_the_old_switch_is_deprecated(caplog):
    with caplog.at_level(logging.INFO, "maru_kv_ops"):
        resolve_ops({"maru_use_lmcache_kernels": False})
    assert "maru_use_native_kernels" in caplog.text


def test_a_wrong_configuration_is_an_error():
    for config in ({"maru_kernel_source": "theirs"}, {"maru_kernel_sauce": "maru"}, {"maru_use_native_kernels": "yes"}):
        with pytest.raises(m.ConfigError):
            resolve_ops(config)
    assert resolve_ops({"maru_my_own": 3, "maru_use_native_kernels": False}, foreign=["maru_my_own"]) is None
