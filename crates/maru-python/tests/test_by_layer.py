"""Transfers layer by layer on the driver, real or simulated, without torch. Streams that wait for a gate make each
order of events certain."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
import weakref

import maru_kv_ops as m
import numpy as np
import pytest
from cuda_driver import DeviceArray, Gate
from reference import Cache
from test_device import OnDevice, current_context, driver  # noqa: F401

LAYERS, HEAD = 4, 512
# None is skipped: a store that leaves tokens out is not staged.
SLOTS = [5, 6, 7, 0, 9, 19, 12, 3]
# `direct` and `staged` are the native mover's; the fallback's copies have no such choice.
MOVERS = {"direct": ("native", "direct"), "staged": ("native", "staged"), "fallback": ("fallback", "copy_engine")}


class Event:
    """As torch has them: the handle goes with the object."""

    def __init__(self, stream: int):
        self.cuda_event = driver.event(stream)

    def __del__(self):
        driver("cuEventDestroy_v2", ctypes.c_void_p(self.cuda_event))


@pytest.fixture(params=MOVERS)
def rig(request):
    rig = Rig(request.param)
    yield rig
    for gate in rig.gates:
        gate.open()
    driver("cuCtxSynchronize")


class Rig:
    def __init__(self, mover: str):
        backend, strategy = MOVERS[mover]
        self.moved_by = (backend, strategy)
        config = {"maru_device": "cuda:0", "maru_backend": backend, "maru_kv_chunk_tokens": 8}
        if backend == "native":
            config["maru_strategy"] = strategy
        self.engine = m.Engine(config)
        self.cache = self.new_cache()
        self.there = OnDevice(self.cache)
        shape = (2, 5, 4, 2, HEAD)
        for t in self.there.tensors:
            t.shape, t.strides = shape, tuple(np.cumprod((1, *shape[:0:-1]))[::-1].tolist())
        self.paged = m.PagedCache(self.there.tensors, block_size=4, num_kv_heads=2)
        self.expected = self.cache.slab(8)
        self.cache.gather(self.expected, SLOTS)
        self.slab = driver.pinned(self.expected.shape)
        self.slab[...] = 0
        self.stream, self.other, self.gates = driver.stream(), driver.stream(), []
        self.gate = self.new_gate()
        # Warm: registered, and nothing below waits for the first time.
        self.engine.store(self.paged, SLOTS, self.slab, stream=self.stream).wait()
        self.slab[...] = 0

    @staticmethod
    def new_cache() -> Cache:
        return Cache(1, layers=LAYERS, head_size=HEAD)

    def new_gate(self) -> Gate:
        self.gates.append(Gate(driver))
        return self.gates[-1]

    def held_event(self) -> Event:
        """Of the other stream, which waits for the gate."""
        self.gate.hold(self.other)
        return Event(self.other)


def test_each_layer_alone(rig):
    transfer = rig.engine.store(rig.paged, SLOTS, rig.slab, by_layer=True, stream=rig.stream)
    for layer in range(LAYERS):
        transfer.wait_layer(layer)
        assert transfer.layer_done(layer)
        assert np.array_equal(rig.slab[:, layer], rig.expected[:, layer])
    transfer.wait()
    assert (transfer.backend, transfer.strategy) == rig.moved_by


def test_a_store_follows_the_forward_pass(rig):
    """Each layer is stored once its event is over, the first ones while later ones are not written yet."""
    written = np.full_like(rig.there.tensors[2].numpy(), 0x4321)
    rig.gate.hold(rig.other)
    third = rig.there.tensors[2]
    driver(
        "cuMemcpyHtoDAsync_v2", ctypes.c_uint64(third.address), ctypes.c_void_p(written.ctypes.data),
        ctypes.c_size_t(written.nbytes), ctypes.c_void_p(rig.other),
    )  # fmt: skip
    event = Event(rig.other)
    first = driver.event(driver.stream())
    transfer = rig.engine.store(rig.paged, SLOTS, rig.slab, after=[first, None, event], stream=rig.stream)
    transfer.wait_layer(1)
    assert transfer.layer_done(0) and transfer.layer_done(1)
    assert not transfer.layer_done(2) and not transfer.layer_done(3) and not transfer.done()
    for layer in (0, 1):
        assert np.array_equal(rig.slab[:, layer], rig.expected[:, layer])
    assert not rig.slab[:, 2:].any()
    rig.gate.open()
    transfer.wait()
    assert (transfer.backend, transfer.strategy) == rig.moved_by
    assert (rig.slab[:, 2] == 0x4321).all()
    assert np.array_equal(rig.slab[:, 3], rig.expected[:, 3])


@pytest.mark.parametrize("form", ("order_before", "order_before_layer", "stream object"))
def test_another_stream_waits_for_one_layer(rig, form):
    """It goes on when its layer is there, and not before; the last layer is held back."""

    class Stream:
        def __init__(self, handle):
            self.ptr = handle

    rig.slab[...] = 0x5555
    second, last = rig.new_gate(), rig.new_gate()
    waits = [driver.stream(), driver.stream()]
    second.hold(waits[0])
    last.hold(waits[1])
    after = [None, Event(waits[0]), None, Event(waits[1])]
    transfer = rig.engine.load(rig.paged, SLOTS, rig.slab, after=after, stream=rig.stream)
    if form == "order_before":
        transfer.order_before(rig.other, 1)
    else:
        transfer.order_before_layer(1, rig.other if form == "order_before_layer" else Stream(rig.other))
    seen = driver.pinned(rig.there.tensors[1].like.shape)
    seen[...] = 0
    driver(
        "cuMemcpyDtoHAsync_v2", ctypes.c_void_p(seen.ctypes.data), ctypes.c_uint64(rig.there.tensors[1].address),
        ctypes.c_size_t(seen.nbytes), ctypes.c_void_p(rig.other),
    )  # fmt: skip
    transfer.wait_layer(0)
    assert not seen.any() and not transfer.layer_done(1)
    second.open()
    driver("cuStreamSynchronize", ctypes.c_void_p(rig.other))
    wanted = rig.new_cache()
    wanted.scatter(np.full_like(rig.expected, 0x5555), SLOTS)
    assert np.array_equal(seen, wanted.arrays[1])
    assert not transfer.layer_done(3) and not transfer.done()
    last.open()
    transfer.wait()
    assert rig.there.equals(wanted.arrays)
    assert (transfer.backend, transfer.strategy) == rig.moved_by


def test_batches_by_layer(rig):
    """Layers of all slabs together: the first layer of the second slab is there before the last of the first."""
    halves = [driver.pinned((2, LAYERS, 4, rig.cache.row)) for _ in range(2)]
    parts = [SLOTS[:4], SLOTS[4:]]
    event = rig.held_event()
    for half in halves:
        half[...] = 0
    transfer = rig.engine.store_many(rig.paged, zip(parts, halves), after=[None] * 3 + [event], stream=rig.stream)
    transfer.wait_layer(2)
    assert not transfer.done()
    for half, part in zip(halves, parts):
        wanted = rig.cache.slab(4)
        rig.cache.gather(wanted, part)
        assert np.array_equal(half[:, :3], wanted[:, :3]) and not half[:, 3].any()
    rig.gate.open()
    transfer.wait()
    assert (transfer.backend, transfer.strategy) == rig.moved_by


@pytest.mark.parametrize("waits_for", ("all", "a layer"))
def test_others_ask_while_threads_wait(rig, waits_for):
    """Threads that wait hold nothing: the thread of the model orders its layers meanwhile."""
    # Made before: while a stream is held back a driver may not get to making another.
    compute = driver.stream()
    event = rig.held_event()
    transfer = rig.engine.store(rig.paged, SLOTS, rig.slab, after=[None, event], stream=rig.stream)
    over = []
    wait = transfer.wait if waits_for == "all" else lambda: transfer.wait_layer(2)
    threads = [threading.Thread(target=lambda: over.append(wait())) for _ in range(3)]
    for t in threads:
        t.start()
    transfer.wait_layer(0)
    begun = time.monotonic()
    for _ in range(50):
        transfer.order_before_layer(0, compute)
        assert transfer.layer_done(0) and not transfer.layer_done(1) and not transfer.done()
    driver("cuStreamSynchronize", ctypes.c_void_p(compute))
    assert time.monotonic() - begun < 5 and not over
    rig.gate.open()
    for t in threads:
        t.join(10)
        assert not t.is_alive()
    assert over == [None] * 3
    transfer.wait()
    assert np.array_equal(rig.slab, rig.expected)


@pytest.mark.parametrize("let_go", (False, True))
def test_events_live_as_long_as_the_transfer(rig, let_go):
    # What is collected later would wait for the device, which waits for the gate.
    gc.collect()
    event = rig.held_event()
    alive = weakref.ref(event)
    transfer = rig.engine.store(rig.paged, SLOTS, rig.slab, after=[event], stream=rig.stream)
    del event
    assert alive() is not None and not transfer.done() and not transfer.layer_done(0)
    if let_go:
        del transfer
        rig.gate.open()
        m.synchronize()
    else:
        rig.gate.open()
        transfer.wait()
    assert alive() is None
    assert np.array_equal(rig.slab, rig.expected)


def test_a_bad_slot_on_the_device_is_told_by_every_question(rig):
    if rig.moved_by[0] == "fallback":
        pytest.skip("its slots are read before anything is queued")
    slots = DeviceArray(driver, np.array([5, 6, 7, 0, 2**40 + 17, 19, 12, 3]))
    ask = {
        "wait": lambda t: t.wait(),
        "wait_layer": lambda t: t.wait_layer(0),
        "layer_done": lambda t: [t.layer_done(0) for _ in range(10**6)],
        "done": lambda t: [t.done() for _ in range(10**6)],
    }
    for question in ask.values():
        transfer = rig.engine.store(rig.paged, slots, rig.slab, by_layer=True, stream=rig.stream)
        for _ in range(2):
            with pytest.raises(IndexError, match="token 4"):
                question(transfer)
        with pytest.raises(IndexError, match="token 4"):
            transfer.order_before_layer(1, rig.other)
        del transfer
        m.synchronize()
        assert np.array_equal(np.delete(rig.slab, 4, axis=2), np.delete(rig.expected, 4, axis=2))


def test_a_captured_transfer_by_layer(rig):
    if rig.moved_by[0] == "fallback":
        pytest.skip("its slots are on the host; the native mover covers the seam")
    stream = ctypes.c_void_p(rig.stream)
    driver("cuStreamBeginCapture_v2", stream, 2)
    transfer = rig.engine.store(rig.paged, SLOTS, rig.slab, by_layer=True, stream=rig.stream)
    graph, ready = ctypes.c_void_p(), ctypes.c_void_p()
    driver("cuStreamEndCapture", stream, ctypes.byref(graph))
    assert transfer.captured and transfer.layer_done(LAYERS - 1) and transfer.done()
    driver("cuGraphInstantiateWithFlags", ctypes.byref(ready), graph, ctypes.c_uint64(0))
    assert not rig.slab.any()
    driver("cuGraphLaunch", ready, stream)
    driver("cuCtxSynchronize")
    assert np.array_equal(rig.slab, rig.expected)


def test_events_that_were_never_recorded(rig):
    class Torch:
        cuda_event = 0

    with pytest.raises(ValueError, match=r"after\[2\] .*never recorded"):
        rig.engine.store(rig.paged, SLOTS, rig.slab, after=[None, None, Torch()], stream=rig.stream)
    with pytest.raises(ValueError, match=f"more than {LAYERS} items"):
        rig.engine.store(rig.paged, SLOTS, rig.slab, after=[None] * (LAYERS + 1), stream=rig.stream)
    assert not rig.slab.any()
