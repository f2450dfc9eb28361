"""Device memory without torch: against a real driver where there is one, else against the simulated driver that
``ci.sh`` puts in its place. Skipped where there is neither."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import sys
import threading
from pathlib import Path

import cuda_driver
import maru_kv_ops as m
import numpy as np
import pytest
from cuda_driver import CudaInterface, DeviceArray
from reference import BLOCK_FORMATS, D2H, H2D, TOKEN_FORMATS, Cache

driver = cuda_driver.required()
SLOTS = [5, 6, 7, 0, -1, 19, 12, 3]


class OnDevice:
    """A cache of the reference, uploaded."""

    def __init__(self, cache: Cache):
        self.cache = cache
        self.tensors = [DeviceArray(driver, a) for a in cache.arrays]

    @property
    def pointers(self) -> np.ndarray:
        return np.array([t.address for t in self.tensors], np.int64)

    def arguments(self, slab, slots, direction, **more):
        given = dict(key_value_ptrs=self.pointers, paged_memory_device="cuda:0")
        return self.cache.legacy(slab, slots, direction, **(given | more))

    def equals(self, arrays) -> bool:
        return all(np.array_equal(t.numpy(), a) for t, a in zip(self.tensors, arrays))


@pytest.fixture(autouse=True)
def current_context():
    driver("cuCtxSetCurrent", driver.context)
    yield
    current = ctypes.c_void_p()
    driver("cuCtxGetCurrent", ctypes.byref(current))
    assert current.value == driver.context.value, "a call left another context current"


def test_the_native_kernel_runs():
    assert m.is_available() and m.import_error() is None
    assert m.Engine({}).backend == "native" and m.Engine({"maru_device": "cuda:0"}).device == "cuda:0"


@pytest.mark.parametrize("where", ("pinned", "device"))
@pytest.mark.parametrize("slots_on", ("host", "device"))
@pytest.mark.parametrize("fmt", TOKEN_FORMATS)
def test_multi_layer_both_ways(fmt, slots_on, where):
    cache = Cache(fmt)
    there = OnDevice(cache)
    slots = DeviceArray(driver, np.array(SLOTS)) if slots_on == "device" else np.array(SLOTS)
    expected = cache.slab(8, 0xAAAA)
    assert cache.gather(expected, SLOTS) == cache.expected_count(SLOTS)
    if where == "pinned":
        slab = driver.pinned(expected.shape)
        slab[...] = 0xAAAA
        read = lambda: slab  # noqa: E731
    else:
        slab = DeviceArray(driver, np.full_like(expected, 0xAAAA))
        read = slab.numpy
    m.multi_layer_kv_transfer(**there.arguments(slab, [], D2H, slot_mapping=slots))
    m.synchronize()
    assert np.array_equal(read(), expected)
    # Back, into an empty cache and other blocks.
    other = Cache(fmt)
    for a in other.arrays:
        a[...] = 0xBBBB
    empty = OnDevice(other)
    back = SLOTS[::-1]
    other.scatter(expected, back)
    m.multi_layer_kv_transfer(**empty.arguments(slab, back, H2D))
    m.synchronize()
    assert empty.equals(other.arrays)


def test_device_pointer_lists_are_read_once_and_kept():
    cache = Cache(2)
    there = OnDevice(cache)
    expected = cache.slab(8)
    cache.gather(expected, SLOTS)
    pointers = DeviceArray(driver, there.pointers)
    for _ in range(3):
        slab = driver.pinned(expected.shape)
        slab[...] = 0
        m.multi_layer_kv_transfer(**there.arguments(slab, SLOTS, D2H, key_value_ptrs=pointers))
        m.synchronize()
        assert np.array_equal(slab, expected)


def test_memory_the_device_does_not_reach_goes_through_the_fallback_with_one_warning(caplog):
    cache = Cache(7)
    there = OnDevice(cache)
    expected = cache.slab(8)
    cache.gather(expected, SLOTS)
    with caplog.at_level(logging.INFO, "maru_kv_ops"):
        for _ in range(3):
            slab = cache.slab(8)
            m.multi_layer_kv_transfer(**there.arguments(slab, SLOTS, D2H))
            m.synchronize()
            assert np.array_equal(slab, expected)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1 and "not registered" in warnings[0], warnings


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
@pytest.mark.parametrize("ids_on", ("host", "device"))
def test_blocks_both_ways(fmt, ids_on):
    cache = Cache(fmt, blocks=6, block_op=True)
    there = OnDevice(cache)
    blocks = [4, 1, 0, 5]
    ids = DeviceArray(driver, np.array(blocks)) if ids_on == "device" else np.array(blocks)
    shape = m.PageBufferShapeDesc(cache.planes, cache.layers, 6, 4, 1 if fmt in (3, 5) else cache.heads, cache.head_size, 2)
    wanted = [cache.slab(8), cache.slab(8)]
    slots = [b * 4 + o for b in blocks for o in range(4)]
    for k in range(2):
        cache.gather(wanted[k], slots[8 * k : 8 * k + 8])
    slabs = [driver.pinned(wanted[0].shape), driver.pinned(wanted[0].shape)]
    addresses = [s.ctypes.data for s in slabs]
    m.multi_layer_block_kv_transfer(there.pointers, addresses, ids, "cuda:0", D2H, shape, 8, fmt, 0)
    m.synchronize()
    assert all(np.array_equal(a, b) for a, b in zip(slabs, wanted))
    other = Cache(fmt, blocks=6, block_op=True)
    for a in other.arrays:
        a[...] = 0
    empty = OnDevice(other)
    for k in range(2):
        other.scatter(wanted[k], slots[8 * k : 8 * k + 8], 4 if k == 0 else 0)
    m.multi_layer_block_kv_transfer(empty.pointers, addresses, ids, "cuda:0", H2D, shape, 8, fmt, 1)
    m.synchronize()
    assert empty.equals(other.arrays)


@pytest.mark.parametrize("fmt", (1, 2, 6, 7))
@pytest.mark.parametrize("nh,bs", ((2, 4), (4, 4)))
def test_single_layer(fmt, nh, bs):
    cache = Cache(fmt, layers=1, heads=nh, block_size=bs)
    there = OnDevice(cache)
    tensor = there.tensors[0]
    order = {1: (2, 5, bs, nh, 6), 2: (5, 2, bs, nh, 6), 6: (2, 5, nh, bs, 6), 7: (5, 2, nh, bs, 6)}[fmt]
    strides = np.zeros(order, np.uint8).strides
    tensor.shape, tensor.strides = order, strides
    expected = cache.slab(8)
    cache.gather(expected, SLOTS)
    forms = [(order, strides)]
    if fmt in (6, 7):
        swap = lambda t: (*t[:2], t[3], t[2], t[4])  # noqa: E731
        forms.append((swap(order), swap(strides)))
    for tensor.shape, tensor.strides in forms:
        slab = driver.pinned((2, 8, cache.row))
        m.single_layer_kv_transfer(slab, tensor, DeviceArray(driver, np.array(SLOTS)), D2H, fmt)
        m.synchronize()
        assert np.array_equal(np.delete(slab, 4, axis=1), np.delete(expected[:, 0], 4, axis=1))


def test_objects_on_a_registered_region():
    cache = Cache(2)
    there = OnDevice(cache)
    for t in there.tensors:
        t.shape, t.strides = (5, 2, 4, 2, 6), np.zeros((5, 2, 4, 2, 6), np.uint8).strides
    paged = m.PagedCache([CudaInterface(t) if i else t for i, t in enumerate(there.tensors)], block_size=4, num_kv_heads=2)
    assert paged.device == "cuda:0"
    engine = m.Engine({"maru_device": "cuda:0"})
    region = m.Region.anonymous(1 << 20)
    assert region.register("cuda:0") and region.is_registered
    slab = region.slab(0, paged.slab_bytes(8))
    stream = driver.stream()
    transfer = engine.store(paged, SLOTS, slab, slab_tokens=8, stream=stream)
    later = driver.stream()
    transfer.order_before(later)
    transfer.wait()
    assert transfer.backend == "native" and transfer.done()
    expected = cache.slab(8)
    cache.gather(expected, SLOTS)
    assert bytes(slab)[:48] == expected.tobytes()[:48]
    # The same span by address, as an old caller would pass it: found in the region.
    view = np.asarray(slab).view(np.uint16).reshape(expected.shape)
    skipped = expected.copy()
    skipped[:, :, 4] = view[:, :, 4]
    assert np.array_equal(view, skipped)
    view[...] = 0
    m.multi_layer_kv_transfer(**there.arguments(view, SLOTS, D2H))
    m.synchronize()
    assert np.array_equal(np.delete(view, 4, axis=2), np.delete(expected, 4, axis=2))
    loads = engine.load(paged, SLOTS, slab, slab_tokens=8, by_layer=True, stream=stream)
    for layer in range(3):
        loads.wait_layer(layer)
        assert loads.layer_done(layer)
        loads.order_before(later, layer)
        loads.order_before_layer(layer)
    assert loads.done()
    with pytest.raises(m.NotAvailableError, match="not registered"):
        native = m.Engine({"maru_device": "cuda:0", "maru_backend": "native"})
        native.store(paged, SLOTS, m.Region.anonymous(4096).slab(0, paged.slab_bytes(8)), slab_tokens=8)
    fallback = m.Engine({"maru_device": "cuda:0", "maru_backend": "fallback"})
    moved = fallback.store(paged, SLOTS, slab, slab_tokens=8)
    moved.wait()
    assert moved.backend == "fallback"


def test_a_bad_slot_in_device_memory_is_told_later():
    cache = Cache(1)
    there = OnDevice(cache)
    slab = driver.pinned(cache.slab(3).shape)
    slab[...] = 0x1234
    m.multi_layer_kv_transfer(**there.arguments(slab, [], D2H, slot_mapping=DeviceArray(driver, np.array([5, 2**40 + 17, 19]))))
    with pytest.raises(IndexError, match="token 1"):
        m.synchronize()
    assert (slab[:, :, 1] == 0x1234).all()
    m.synchronize()


def test_objects_live_until_the_device_is_done():
    import weakref

    cache = Cache(1)
    there = OnDevice(cache)
    slab = driver.pinned(cache.slab(8).shape)
    slots = DeviceArray(driver, np.array(SLOTS))
    alive = weakref.ref(slots)
    m.multi_layer_kv_transfer(**there.arguments(slab, [], D2H, slot_mapping=slots))
    del slots
    m.synchronize()
    expected = cache.slab(8)
    cache.gather(expected, SLOTS)
    assert np.array_equal(np.delete(slab, 4, axis=2), np.delete(expected, 4, axis=2))
    assert alive() is None


def test_what_finished_transfers_held_is_given_back():
    """Also without a wait: by later calls, and at once where a pool needs it."""
    import gc
    import tempfile
    import weakref

    cache = Cache(1)
    paged = tensors_as_cache(OnDevice(cache), 1)
    engine = m.Engine({"maru_device": "cuda:0", "maru_kv_chunk_tokens": 8})
    slab = driver.pinned(cache.slab(8).shape)
    alive = []
    for _ in range(20):
        slots = DeviceArray(driver, np.array(SLOTS))
        alive.append(weakref.ref(slots))
        engine.store(paged, slots, slab)
        del slots
        driver("cuCtxSynchronize")
    assert sum(a() is not None for a in alive) <= 5
    engine.store(paged, SLOTS, slab).wait()
    gc.collect()
    assert sum(a() is not None for a in alive) <= 1
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        pool = engine.create_pool(paged.slab_bytes(8), f"{folder}/pool", size=8 << 20)
        slabs = [pool.alloc() for _ in range(pool.stats()["free"])]
        assert pool.alloc() is None
        engine.store(paged, SLOTS, slabs.pop())
        driver("cuCtxSynchronize")
        assert pool.alloc() is not None
        del slabs, pool


@pytest.mark.parametrize("fmt,waits", ((1, False), (9, False), (6, True)))
def test_block_ids_on_the_device_are_not_read_here_where_blocks_are_rows(fmt, waits):
    cache = Cache(fmt, blocks=6, block_op=True)
    there = OnDevice(cache)
    shape = m.PageBufferShapeDesc(2, 3, 6, 4, 2, 6, 2)
    slab = driver.pinned(cache.slab(8).shape)
    ids = DeviceArray(driver, np.array([1, 6]))
    call = lambda: m.multi_layer_block_kv_transfer(there.pointers, [slab.ctypes.data], ids, "cuda:0", D2H, shape, 8, fmt, 0)  # noqa: E731
    if waits:
        with pytest.raises(IndexError, match=r"block_ids\[1\] is 6"):
            call()
    else:
        slab[...] = 0x1234
        call()
        with pytest.raises(IndexError, match="slot 6 of token 1"):
            m.synchronize()
        assert (slab[:, :, 4:] == 0x1234).all() and not (slab[:, :, :4] == 0x1234).any()


def test_a_captured_call_is_replayed():
    cache = Cache(1)
    there = OnDevice(cache)
    paged = tensors_as_cache(there, 1)
    engine = m.Engine({"maru_device": "cuda:0"})
    region = m.Region.anonymous(1 << 20)
    region.register()
    slab = region.slab(0, paged.slab_bytes(8))
    engine.store(paged, SLOTS, slab, slab_tokens=8).wait()
    stream = driver.stream()
    driver("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), 2)
    transfer = engine.store(paged, SLOTS, slab, slab_tokens=8, stream=stream)
    graph, ready = ctypes.c_void_p(), ctypes.c_void_p()
    driver("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
    assert transfer.captured
    driver("cuGraphInstantiateWithFlags", ctypes.byref(ready), graph, ctypes.c_uint64(0))
    np.asarray(slab)[...] = 0
    driver("cuGraphLaunch", ready, ctypes.c_void_p(stream))
    driver("cuCtxSynchronize")
    expected = cache.slab(8)
    cache.gather(expected, SLOTS)
    assert bytes(slab) == expected.tobytes()


def tensors_as_cache(there: OnDevice, fmt: int) -> m.PagedCache:
    shape = {1: (2, 5, 4, 2, 6), 2: (5, 2, 4, 2, 6)}[fmt]
    for t in there.tensors:
        t.shape, t.strides = shape, np.zeros(shape, np.uint8).strides
    return m.PagedCache(there.tensors, block_size=4, num_kv_heads=2)


def test_threads_that_never_called_the_driver():
    cache = Cache(1)
    there = OnDevice(cache)
    paged = tensors_as_cache(there, 1)
    engine = m.Engine({"maru_device": "cuda:0"})
    expected = cache.slab(8)
    cache.gather(expected, SLOTS)
    failures = []

    def work():
        try:
            slab = pinned.pop()
            for _ in range(10):
                engine.store(paged, SLOTS, slab).wait()
                m.multi_layer_kv_transfer(**there.arguments(slab, SLOTS, D2H))
                m.synchronize()
            assert np.array_equal(slab, expected)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    pinned = [driver.pinned(expected.shape) for _ in range(3)]
    for p in pinned:
        p[...] = 0
    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
        assert not t.is_alive()
    assert not failures


def test_planes_and_slabs_outside_their_allocation_are_refused():
    cache = Cache(1)
    there = OnDevice(cache)
    slab = driver.pinned(cache.slab(8).shape)
    for change, text in (
        (dict(page_buffer_size=2**20), "layer 0 plane 0 needs .* bytes|share memory"),
        (dict(page_buffer_size=24), "layer . plane . needs .* bytes|share memory"),
        (dict(key_value_ptrs=np.array([4096, 8192, 12288])), "no memory that cuda:0 knows"),
        (dict(key_value_ptrs=np.array([slab.ctypes.data] * 3) + [0, 64, 128]), "host memory|share memory"),
        (dict(paged_memory_device="cpu"), "are no memory|is on cuda:0"),
        (dict(slot_mapping=DeviceArray(driver, np.zeros(8, np.uint16))), "int64 is needed"),
    ):
        with pytest.raises((ValueError, TypeError), match=text):
            m.multi_layer_kv_transfer(**there.arguments(slab, SLOTS, D2H, **change))
    short = DeviceArray(driver, cache.slab(2))
    short.shape, short.strides = cache.slab(8).shape, np.zeros(cache.slab(8).shape, np.uint8).strides
    with pytest.raises(ValueError, match="key_value: the slab at .* needs"):
        m.multi_layer_kv_transfer(**there.arguments(short, SLOTS, D2H))
    host = DeviceArray(driver, np.array(SLOTS))
    host.device = "cuda:1"
    with pytest.raises(ValueError, match="slot_mapping is on cuda:1, the paged cache is on cuda:0"):
        m.multi_layer_kv_transfer(**there.arguments(slab, [], D2H, slot_mapping=host))


STREAM_OF_TORCH = """
import sys, types
import numpy as np
sys.path.insert(0, sys.argv[1])
import cuda_driver, maru_kv_ops as m
from reference import Cache
from test_device import OnDevice, driver, tensors_as_cache

there = OnDevice(Cache(1))
paged = tensors_as_cache(there, 1)
asked, stream = [], driver.stream()
torch = types.ModuleType("torch")
torch.Tensor, torch.device = type("Tensor", (), {}), type("device", (), {})
torch.cuda = types.SimpleNamespace(initialized=False, is_initialized=lambda: torch.cuda.initialized)
torch._C = types.SimpleNamespace(_cuda_getCurrentRawStream=lambda n: asked.append(n) or stream)
sys.modules["torch"] = torch
slab = driver.pinned((2, 3, 8, 12))
engine = m.Engine({"maru_device": "cuda:0"})
transfer = engine.store(paged, np.array([5, 6, 7, 0, -1, 19, 12, 3]), slab, slab_tokens=8)
transfer.order_before()
transfer.order_before_layer(1)
assert asked == [], asked
torch.cuda.initialized = True
engine.store(paged, np.array([5, 6, 7, 0, -1, 19, 12, 3]), slab, slab_tokens=8).order_before()
assert asked == [0], asked
m.synchronize()
"""


def test_torch_is_asked_for_its_stream_only_once_it_uses_cuda():
    here = str(Path(__file__).parent)
    subprocess.run([sys.executable, "-c", STREAM_OF_TORCH, here], check=True, timeout=60)
