"""Every public call with wrong types, negative, huge, freed and foreign arguments: an exception, never a crash."""

from __future__ import annotations

import ctypes
import itertools
import random

import maru_kv_ops as m
import numpy as np
import pytest
from reference import Cache


class Lies:
    """A tensor by its methods, whose answers are given."""

    def __init__(self, **answers):
        self.answers = dict(ptr=0, shape=(4,), stride=(1,), size=8, dtype="torch.int64", device="cpu") | answers
        self.shape, self.dtype, self.device = (self.answers[k] for k in ("shape", "dtype", "device"))

    def data_ptr(self):
        return self.answers["ptr"]

    def stride(self):
        return self.answers["stride"]

    def element_size(self):
        return self.answers["size"]


class Raises:
    def __getattr__(self, name):
        raise ZeroDivisionError(name)


class BadInterface:
    def __init__(self, value):
        self.__array_interface__ = value


class BadIndex:
    def __index__(self):
        raise ZeroDivisionError


def given_back() -> int:
    """Memory that may be touched no more and that nothing else will be put into: the address of an array that is gone
    would soon be a thread's stack or a library, which a call may well write to."""
    no_access, private_anonymous = 0, 0x22
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    address = libc.mmap(None, 1 << 24, no_access, private_anonymous, -1, 0)
    assert address not in (None, ctypes.c_void_p(-1).value), ctypes.get_errno()
    return address + 16


FREED_AT = given_back()

ODD = [
    None, True, 0, 1, -1, 7, 2**31, 2**63 - 1, -(2**63), 2**64, 2**200, 1.5, float("nan"), float("inf"), 1j,
    "", "cpu", "cuda:0", "cuda:99999999999", "meta", b"bytes", bytearray(3), [], [1, 2], [None], ["x"], [[1]], [2**80],
    (), (1, 2), {}, {"a": 1}, set(), range(3), range(-3, 0), range(2**40), object(), int, print, iter([1]), Raises(), BadIndex(),
    np.zeros(()), np.zeros(0), np.zeros((0, 3)), np.zeros(3, np.int64), np.zeros((2, 2, 2, 2), np.uint16),
    np.zeros((2,) * 12, np.uint8), np.array(["a"]), np.array([object()]), np.zeros(3, "M8[s]"), np.zeros(3, ">i8"),
    np.broadcast_to(np.zeros(1, np.uint16), (2, 3, 4, 5)), np.zeros((4, 4), np.uint16)[::-1], np.float32(1), np.int64(-5),
    Lies(), Lies(ptr=4096), Lies(ptr=FREED_AT), Lies(ptr=2**64 - 8), Lies(ptr=-1), Lies(ptr="x"), Lies(shape=None), Lies(shape=range(2**40)),
    Lies(shape=(2**62, 2**62), stride=(1, 1)), Lies(shape=(-1,)), Lies(stride=(1, 1)), Lies(stride=None), Lies(size=0),
    Lies(device="cuda:0", ptr=4096), Lies(device=None), Lies(dtype="torch.complex64", size="x"), Lies(dtype=None),
    Lies(shape=(2, 3, 8, 12), stride=(288, 96, 12, 1), dtype="torch.bfloat16", size=2, ptr=FREED_AT),
    Lies(shape=(2, 5, 4, 2, 6), stride=(240, 48, 12, 6, 1), dtype="torch.bfloat16", size=2, ptr=4096),
    BadInterface(None), BadInterface({}), BadInterface({"shape": (3,), "typestr": "<i8", "data": (0, False), "version": 3}),
    BadInterface({"shape": (2**62,), "typestr": "<i8", "data": (4096, False), "version": 3}),
    BadInterface({"shape": (3,), "typestr": "", "data": (4096, False)}),
    BadInterface({"shape": (3,), "typestr": "<i8", "data": (FREED_AT, False), "strides": (2**62,)}),
    m.TransferDirection.H2D, m.EngineKVFormat.NL_X_NB_BS_HS, m.PageBufferShapeDesc(), m.Region.anonymous(64).slab(0, 64),
]  # fmt: skip

ALLOWED = (m.MaruError, TypeError, ValueError, OverflowError, IndexError, ZeroDivisionError, OSError, AttributeError, BufferError)


def calls():
    cache = Cache(1)
    slab = cache.slab(8)
    slots = np.array([5, 6, 7, 0, -1, 19, 12, 3])
    multi = cache.legacy(slab, slots, 1)
    single = dict(
        lmc_key_value_cache=np.zeros((2, 8, 12), np.uint16),
        vllm_key_value_cache=np.zeros((2, 5, 4, 2, 6), np.uint16),
        slot_mapping=slots,
        direction=1,
        engine_kv_format=1,
        token_major=False,
    )
    block = dict(
        paged_buffer_ptrs_tensor=cache.pointers,
        lmcache_objects_ptrs=[slab.ctypes.data],
        block_ids=np.array([1, 2]),
        device="cpu",
        direction=1,
        shape_desc=m.PageBufferShapeDesc(2, 3, 5, 4, 2, 6, 2, 0),
        lmcache_chunk_size=8,
        engine_kv_format=1,
        skip_prefix_n_blocks=0,
    )
    engine = m.Engine({"maru_device": "host", "maru_kv_chunk_tokens": 8})
    layers = [np.zeros((2, 5, 4, 2, 6), np.uint16) for _ in range(3)]
    paged = m.PagedCache(layers, block_size=4, num_kv_heads=2)
    region = m.Region.anonymous(1 << 16)
    ours = region.slab(0, 4096)
    transfer = engine.store(paged, slots, slab)
    opts = dict(skip_tokens=0, partial=False, layers=None, by_layer=False, after=None, slab_tokens=None, fingerprint=None, raw=False, stream=None)
    many = {k: v for k, v in opts.items() if k != "skip_tokens"}
    spec = dict(v_tensors=None, block_size=4, num_kv_heads=2, head_size=6, axes=None, mla=False, num_layers=3,
                num_blocks=5, backend_head_size=None, dtype=None)  # fmt: skip
    keep = (cache, layers)
    return {
        "multi_layer_kv_transfer": (m.multi_layer_kv_transfer, multi),
        "single_layer_kv_transfer": (m.single_layer_kv_transfer, single),
        "multi_layer_block_kv_transfer": (m.multi_layer_block_kv_transfer, block),
        "PagedCache": (m.PagedCache, dict(tensors=layers, **spec)),
        "PagedCache.slab_bytes": (paged.slab_bytes, dict(tokens=8)),
        "PagedCache.fingerprint": (paged.fingerprint, dict(tokens=8)),
        "Engine": (m.Engine, dict(config={"maru_device": "host"}, foreign=[])),
        "Engine.store": (engine.store, dict(cache=paged, slots=slots, slab=slab, **opts)),
        "Engine.load": (engine.load, dict(cache=paged, slots=slots, slab=slab, **opts)),
        "Engine.store_many": (engine.store_many, dict(cache=paged, items=[(slots, slab)], **many)),
        "Engine.load_many": (engine.load_many, dict(cache=paged, items=[(slots, slab)], **many)),
        "Engine.register": (engine.register, dict(cache=paged)),
        "Region.anonymous": (m.Region.anonymous, dict(size=4096)),
        "Region.open": (m.Region.open, dict(path="/nonexistent/pool", offset=0, size=0, create=False, read_only=True, prefault=False)),
        "Region.slab": (region.slab, dict(offset=0, nbytes=64)),
        "Region.register": (region.register, dict(device=0, required=True)),
        "Slab.read": (ours.read, dict(offset=0, nbytes=8)),
        "Slab.write": (ours.write, dict(data=b"x", offset=0)),
        "Slab.span": (ours.span, dict(offset=0, nbytes=8)),
        "Transfer.wait_layer": (transfer.wait_layer, dict(layer=0)),
        "Transfer.layer_done": (transfer.layer_done, dict(layer=0)),
        "Transfer.order_before_layer": (transfer.order_before_layer, dict(layer=0, stream=0)),
        "Transfer.order_before": (transfer.order_before, dict(stream=0, layer=0)),
        "slots_from_blocks": (m.slots_from_blocks, dict(blocks=[1, 2], block_size=4, start=0, stop=8)),
        "resolve_ops": (m.resolve_ops, dict(config={"maru_use_native_kernels": False}, formats=[], foreign=[])),
        "PageBufferShapeDesc": (m.PageBufferShapeDesc, dict(kv_size=2, nl=1)),
        "ChunkKeys.chunk": (m.ChunkKeys("x", 1).chunk, dict(tokens=[1, 2, 3])),
        "ChunkKeys": (m.ChunkKeys, dict(namespace="x", fingerprint=1)),
    }, keep  # fmt: skip


CALLS, KEEP = calls()
# Sizes that are legal and large would really be allocated or listed.
TOO_WILLING = {("Region.anonymous", "size"), ("slots_from_blocks", "stop")}


@pytest.mark.parametrize("name", CALLS)
def test_one_odd_argument(name):
    call, good = CALLS[name]
    for key, odd in itertools.product(good, ODD):
        if (name, key) in TOO_WILLING and isinstance(odd, int) and 2**30 < odd < 2**63:
            continue
        try:
            call(**{**good, key: odd})
        except ALLOWED:
            pass


@pytest.mark.parametrize("name", CALLS)
def test_several_odd_arguments(name):
    call, good = CALLS[name]
    rng = random.Random(name)
    for _ in range(300):
        keys = rng.sample(list(good), rng.randint(1, len(good)))
        odd = {key: rng.choice(ODD) for key in keys}
        if any((name, k) in TOO_WILLING and isinstance(v, int) and 2**30 < v < 2**63 for k, v in odd.items()):
            continue
        try:
            call(**{**good, **odd})
        except ALLOWED:
            pass


def test_memory_that_was_given_back_is_refused():
    """The right shape at addresses that are gone."""
    slab = Lies(shape=(2, 3, 8, 12), stride=(288, 96, 12, 1), dtype="torch.uint16", size=2, ptr=FREED_AT)
    for name, argument in (("multi_layer_kv_transfer", "key_value"), ("Engine.store", "slab"), ("Engine.load", "slab")):
        call, good = CALLS[name]
        with pytest.raises(ValueError, match="are no memory"):
            call(**{**good, argument: slab})
    call, good = CALLS["multi_layer_block_kv_transfer"]
    with pytest.raises(ValueError, match="are no memory"):
        call(**{**good, "lmcache_objects_ptrs": [FREED_AT]})
    with pytest.raises(ValueError, match="are no memory"):
        call(**{**good, "paged_buffer_ptrs_tensor": [FREED_AT, FREED_AT + 4096, FREED_AT + 8192]})


@pytest.mark.parametrize("name", CALLS)
def test_the_good_arguments_are_good(name):
    if name in ("Region.open", "Region.register"):
        pytest.skip("needs a file or a GPU")
    call, good = CALLS[name]
    call(**good)


@pytest.mark.parametrize("name", CALLS)
def test_missing_and_unknown_arguments(name):
    call, good = CALLS[name]
    with pytest.raises(TypeError):
        call(**good, no_such_argument=1)
    if name not in ("Engine", "resolve_ops", "PageBufferShapeDesc", "Slab.read", "Region.register", "Transfer.order_before"):
        with pytest.raises(TypeError):
            call()


def test_random_numbers_for_every_number():
    """Numbers only, near the edges: an error, or exactly what the reference says would be touched."""
    rng = random.Random(4)
    edges = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 20, 2**31, 2**32, 2**40 + 17, 2**62, 2**63 - 1, -1, -2]
    cache = Cache(1)
    for _ in range(3000):
        given = cache.legacy(cache.slab(8), [rng.randrange(-1, 20) for _ in range(8)], 1)
        for key in rng.sample(["page_buffer_size", "block_size", "head_size", "skip_prefix_n_tokens", "block_stride_elems", "engine_kv_format"], 2):
            given[key] = rng.choice(edges)
        # A larger cache than there is would be read beyond its end: the caller's promise, not a check.
        if given["page_buffer_size"] > 20 or given["engine_kv_format"] not in (1, 0, 99, -1, 14):
            given["page_buffer_size"] = 20
            given["engine_kv_format"] = 1
        try:
            m.multi_layer_kv_transfer(**given)
        except m.MaruError:
            pass
