"""The object API on NumPy caches."""

from __future__ import annotations

import gc
import weakref

import maru_kv_ops as m
import numpy as np
import pytest

L, NB, BS, NH, HS = 3, 5, 4, 2, 6
SLOTS = [5, 6, 7, 0, -1, 19, 12, 3]


def values() -> np.ndarray:
    """``[layer][kv][block][token][head][dim]``."""
    return np.arange(L * 2 * NB * BS * NH * HS, dtype=np.uint16).reshape(L, 2, NB, BS, NH, HS)


def slab_by_hand(v: np.ndarray, slots=SLOTS, fill=0) -> np.ndarray:
    slab = np.full((2, L, len(slots), NH * HS), fill, np.uint16)
    count = 0
    for kv in range(2):
        for layer in range(L):
            for t, slot in enumerate(slots):
                for n in range(NH if slot >= 0 else 0):
                    for d in range(HS):
                        slab[kv, layer, t, n * HS + d] = v[layer, kv, slot // BS, slot % BS, n, d]
                        count += 1
    assert count == 2 * L * NH * HS * sum(s >= 0 for s in slots)
    return slab


def kv_first(v):
    return [np.ascontiguousarray(x) for x in v], {}


def blocks_first(v):
    return [np.ascontiguousarray(x.swapaxes(0, 1)) for x in v], {}


def hnd(v):
    return [np.ascontiguousarray(x.swapaxes(2, 3)).swapaxes(2, 3) for x in v], {}


def fused(v):
    return [np.ascontiguousarray(x.transpose(1, 3, 2, 0, 4)).reshape(NB, NH, BS, 2 * HS) for x in v], {}


def lists(v):
    return [np.ascontiguousarray(x[0]) for x in v], {"v_tensors": [np.ascontiguousarray(x[1]) for x in v]}


def slot_lists(v):
    k, more = lists(v)
    flat = lambda x: x.reshape(NB * BS, NH, HS)  # noqa: E731
    return [flat(x) for x in k], {"v_tensors": [flat(x) for x in more["v_tensors"]]}


def cross_layer(v):
    return np.ascontiguousarray(v.transpose(2, 0, 1, 3, 4, 5)), {}


def by_name(v):
    return {f"model.layers.{i}.attn": t for i, t in enumerate(kv_first(v)[0])}, {}


def shared_allocation(v):
    """Layers as views of one buffer, block outermost."""
    one = cross_layer(v)[0]
    return [one[:, layer] for layer in range(L)], {}


LAYOUTS = (kv_first, blocks_first, hnd, fused, lists, slot_lists, cross_layer, by_name, shared_allocation)


def cache_of(layout, v) -> tuple[m.PagedCache, object]:
    tensors, more = layout(v)
    return m.PagedCache(tensors, block_size=BS, num_kv_heads=NH, head_size=HS, **more), (tensors, more)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_store_then_load_elsewhere(host_engine, layout):
    cache, _tensors = cache_of(layout, values())
    assert (cache.num_layers, cache.kv_planes, cache.num_blocks, cache.block_size) == (L, 2, NB, BS)
    assert (cache.num_kv_heads, cache.head_size, cache.num_slots, cache.device) == (NH, HS, NB * BS, "host")
    assert cache.slab_shape(8) == (2, L, 8, NH * HS) and cache.slab_bytes(8) == 2 * L * 8 * NH * HS * 2
    slab = np.zeros(cache.slab_shape(8), np.uint16)
    stored = host_engine.store(cache, SLOTS, slab)
    stored.wait()
    assert (stored.backend, stored.strategy, stored.done()) == ("fallback", "host", True)
    assert stored.nbytes == 7 * cache.token_bytes
    assert np.array_equal(slab, slab_by_hand(values()))
    # Into an empty cache of the same layout, in another order.
    other, held = cache_of(layout, np.full_like(values(), 0xBBBB))
    host_engine.load(other, SLOTS[::-1], slab_by_hand(values(), SLOTS)[:, :, ::-1].copy()).wait()
    wanted = np.full_like(values(), 0xBBBB)
    for s in SLOTS:
        if s >= 0:
            wanted[:, :, s // BS, s % BS] = values()[:, :, s // BS, s % BS]
    again, _ = cache_of(layout, wanted)
    a, b = np.zeros(cache.slab_shape(20), np.uint16), np.ones(cache.slab_shape(20), np.uint16)
    host_engine.store(other, range(20), a).wait()
    host_engine.store(again, range(20), b).wait()
    assert np.array_equal(a, b)
    del held


def test_c02_one_layer_of_a_shared_allocation(host_engine):
    one = cross_layer(values())[0]
    before = one.copy()
    cache = m.PagedCache([one[:, 1]], block_size=BS, num_kv_heads=NH)
    slab = np.full((2, 1, 20, NH * HS), 0x7777, np.uint16)
    host_engine.load(cache, np.arange(20), slab).wait()
    assert (one[:, 1] == 0x7777).all()
    assert np.array_equal(one[:, [0, 2]], before[:, [0, 2]])


def test_a_region_slab_and_what_others_see_of_it(host_engine):
    cache, _ = cache_of(kv_first, values())
    region = m.Region.anonymous(1 << 20)
    slab = region.slab(4096, cache.slab_bytes(8))
    host_engine.store(cache, SLOTS, slab, slab_tokens=8).wait()
    wanted = slab_by_hand(values())
    seen = {
        "array interface": np.asarray(slab),
        "buffer protocol": np.frombuffer(slab, np.uint8),
        "DLPack": np.from_dlpack(slab),
        "memoryview": np.array(memoryview(slab)),
        "read": np.frombuffer(slab.read(), np.uint8),
    }
    for name, found in seen.items():
        assert found.tobytes() == wanted.tobytes(), name
    # Views are of the memory itself and keep it alive.
    view = seen["DLPack"]
    del slab, region
    gc.collect()
    seen["array interface"][0] ^= 0xFF
    assert view[0] == seen["buffer protocol"][0] == seen["array interface"][0]


def test_dlpack_arrays_are_caches_and_slabs(host_engine):
    class OnlyDlpack:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self):
            return self.array.__dlpack__()

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    tensors, _ = kv_first(values())
    cache = m.PagedCache([OnlyDlpack(t) for t in tensors], block_size=BS, num_kv_heads=NH)
    slab = np.zeros(cache.slab_shape(8), np.uint16)
    host_engine.store(cache, OnlyDlpack(np.array(SLOTS)), OnlyDlpack(slab)).wait()
    assert np.array_equal(slab, slab_by_hand(values()))
    hnd_tensors, _ = hnd(values())
    cache = m.PagedCache([OnlyDlpack(t) for t in hnd_tensors], block_size=BS, num_kv_heads=NH)
    again = np.zeros_like(slab)
    host_engine.store(cache, SLOTS, again).wait()
    assert np.array_equal(slab, again)


def test_tensors_live_as_long_as_the_cache():
    tensors = [np.zeros((2, NB, BS, NH, HS), np.float16) for _ in range(2)]
    alive = weakref.ref(tensors[1])
    cache = m.PagedCache(tensors, block_size=BS)
    assert cache.tensors[1] is tensors[1]
    del tensors
    gc.collect()
    assert alive() is not None
    del cache
    gc.collect()
    assert alive() is None


def test_skip_partial_and_layers(host_engine):
    cache, _ = cache_of(blocks_first, values())
    slab = np.full(cache.slab_shape(8), 0xAAAA, np.uint16)
    host_engine.store(cache, SLOTS, slab, skip_tokens=3).wait()
    wanted = slab_by_hand(values(), fill=0xAAAA)
    wanted[:, :, :3] = 0xAAAA
    assert np.array_equal(slab, wanted)
    with pytest.raises(ValueError, match="5 slots were given for a slab of 8 tokens"):
        host_engine.store(cache, SLOTS[:5], slab)
    host_engine.store(cache, SLOTS[:5], slab, partial=True).wait()
    for layers, chosen in ((1, [1]), ((1, 2), [1, 2]), (range(0, 2), [0, 1])):
        slab = np.full(cache.slab_shape(8), 0xAAAA, np.uint16)
        host_engine.store(cache, SLOTS, slab, layers=layers).wait()
        wanted = slab_by_hand(values(), fill=0xAAAA)
        for layer in set(range(L)) - set(chosen):
            wanted[:, layer] = 0xAAAA
        assert np.array_equal(slab, wanted)
    for layers in (3, (2, 2), range(0), range(0, 3, 2), (0, 0)):
        with pytest.raises(ValueError, match="layers"):
            host_engine.store(cache, SLOTS, slab, layers=layers)


def test_a_host_transfer_by_layer_has_all_layers_at_once(host_engine):
    cache, _ = cache_of(kv_first, values())
    slab = np.zeros(cache.slab_shape(8), np.uint16)
    for options in ({"by_layer": True}, {"after": []}, {"after": (None, None)}, {"after": [None] * L}):
        slab[...] = 0
        transfer = host_engine.store(cache, SLOTS, slab, **options)
        for layer in range(L):
            assert transfer.layer_done(layer)
            transfer.wait_layer(layer)
            transfer.order_before(layer=layer)
            transfer.order_before_layer(layer)
        assert transfer.done() and transfer.layer_done(L - 1) and transfer.nbytes == 7 * cache.token_bytes
        transfer.wait_layer(0)
        transfer.order_before_layer(0, stream=0)
        assert np.array_equal(slab, slab_by_hand(values()))
    one = host_engine.store(cache, SLOTS, slab, by_layer=True, layers=1)
    assert one.nbytes == 7 * cache.token_bytes // L and all(one.layer_done(layer) for layer in range(L))


def test_layers_that_the_cache_does_not_have(host_engine):
    cache, _ = cache_of(kv_first, values())
    slab = np.zeros(cache.slab_shape(8), np.uint16)
    for transfer in (host_engine.store(cache, SLOTS, slab, by_layer=True), host_engine.store_many(cache, [])):
        for ask in (transfer.layer_done, transfer.wait_layer, transfer.order_before_layer):
            for layer, error, text in (
                (L, ValueError, f"{L}"), (2**40, ValueError, f"{L}"), (-1, ValueError, "0 or more"),
                (2**64, OverflowError, "layer"), (None, TypeError, "layer"), ("0", TypeError, "layer"), (True, TypeError, "layer"),
            ):  # fmt: skip
                with pytest.raises(error, match=text):
                    ask(layer)
        with pytest.raises(ValueError, match=f"{L}"):
            transfer.order_before(0, L)


class Recorded:
    """An event as a library may hand it out."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class AsInt:
    def __init__(self, number):
        self.number = number

    def __int__(self):
        return self.number


class Protocol:
    def __cuda_event__(self):
        return (0, 0xBEEF)


def test_events_need_streams(host_engine):
    cache, _ = cache_of(kv_first, values())
    slab = np.zeros(cache.slab_shape(8), np.uint16)
    import ctypes

    for event in (
        0xBEEF, np.int64(0xBEEF), Recorded(cuda_event=0xBEEF), Recorded(ptr=0xBEEF), Recorded(handle=AsInt(0xBEEF)),
        Recorded(handle=ctypes.c_void_p(0xBEEF)), Recorded(event_id=0xBEEF), Protocol(),
    ):  # fmt: skip
        with pytest.raises(m.NotAvailableError, match="events of layers.*host memory"):
            host_engine.store(cache, SLOTS, slab, after=[None, event])
        with pytest.raises(m.NotAvailableError):
            host_engine.load_many(cache, [(SLOTS, slab)], after=iter([event]))
    assert not slab.any()


def test_events_that_are_none(host_engine):
    cache, _ = cache_of(kv_first, values())
    slab = np.zeros(cache.slab_shape(8), np.uint16)
    import ctypes
    import itertools

    for null in (0, Recorded(cuda_event=0), Recorded(handle=ctypes.c_void_p())):
        with pytest.raises(ValueError, match=r"after\[1\] is an event without a handle: it was never recorded"):
            host_engine.store(cache, SLOTS, slab, after=[None, null])
    for after in (3, object(), Recorded(cuda_event=7)):
        with pytest.raises(TypeError, match="after is .*; a list is needed"):
            host_engine.store(cache, SLOTS, slab, after=after)
    for item in (True, 1.5, "x", object(), Recorded(cuda_event=None), Recorded(ptr=1.5)):
        with pytest.raises(TypeError, match=r"after\[0\] is"):
            host_engine.store(cache, SLOTS, slab, after=[item])
    for item, error in ((-5, ValueError), (2**70, OverflowError)):
        with pytest.raises(error, match=r"after\[0\] is"):
            host_engine.store(cache, SLOTS, slab, after=[item])
    with pytest.raises(ValueError, match=f"more than {L} items; the cache has {L} layers"):
        host_engine.store(cache, SLOTS, slab, after=itertools.repeat(None))
    assert not slab.any()


def test_batches(host_engine):
    cache, _ = cache_of(hnd, values())
    slabs = [np.zeros(cache.slab_shape(4), np.uint16) for _ in range(3)]
    parts = [[0, 1, 2, 3], [8, 9, 10, 11], [19, 18, 17, 16]]
    host_engine.store_many(cache, zip(parts, slabs)).wait()
    for part, slab in zip(parts, slabs):
        assert np.array_equal(slab, slab_by_hand(values(), part))
    empty, held = cache_of(hnd, np.zeros_like(values()))
    host_engine.load_many(empty, list(zip(parts, slabs))).wait()
    again = np.zeros(cache.slab_shape(12), np.uint16)
    host_engine.store(empty, sum(parts, []), again).wait()
    assert np.array_equal(again, slab_by_hand(values(), sum(parts, [])))
    # All are checked before the first is begun.
    before = [s.copy() for s in slabs]
    with pytest.raises(IndexError, match="slot 20"):
        host_engine.store_many(cache, [(parts[0][::-1], slabs[0]), ([20, 1, 2, 3], slabs[1])])
    assert all(np.array_equal(a, b) for a, b in zip(slabs, before))
    assert host_engine.store_many(cache, []).done()
    del held


def test_fingerprints_tie_slabs_to_their_geometry(host_engine):
    cache, _ = cache_of(kv_first, values())
    slab = np.zeros(cache.slab_shape(8), np.uint16)
    same, _ = cache_of(fused, values())
    assert cache.fingerprint(8) == same.fingerprint(8) != cache.fingerprint(4)
    host_engine.store(cache, SLOTS, slab, fingerprint=cache.fingerprint(8)).wait()
    with pytest.raises(m.LayoutMismatchError, match="geometry"):
        host_engine.load(cache, SLOTS, slab, fingerprint=cache.fingerprint(4))


def test_c19_types_of_the_same_width(host_engine):
    cache = m.PagedCache([np.zeros((2, NB, BS, NH, HS), np.float16)], block_size=BS, num_kv_heads=NH)
    wrong = np.zeros((2, 1, 8, NH * HS), np.uint8)
    with pytest.raises(TypeError, match="the slab holds u8, the paged cache f16"):
        host_engine.store(cache, SLOTS, wrong)
    twice = np.zeros(cache.slab_bytes(8), np.uint8)
    with pytest.raises(TypeError, match="raw=True"):
        host_engine.store(cache, SLOTS, twice, slab_tokens=8)
    host_engine.store(cache, SLOTS, twice, slab_tokens=8, raw=True).wait()
    with pytest.raises(m.DtypeMismatchError, match="holds f16, dtype states bf16"):
        m.PagedCache([np.zeros((2, NB, BS, NH, HS), np.float16)], block_size=BS, dtype="bf16")
    assert m.PagedCache([np.zeros((2, NB, BS, NH, HS), np.uint16)], block_size=BS, dtype="bf16").dtype == "bf16"


def test_c01_ambiguity_names_what_decides():
    tensor = np.zeros((2, 2, 16, 8, 128), np.uint16)
    for more in ({}, {"num_blocks": 2, "block_size": 16}):
        with pytest.raises(m.AmbiguousLayoutError, match="axes"):
            m.PagedCache([tensor], **more)
    first = m.PagedCache([tensor], axes=["kv", "block", "token", "head", "dim"])
    blocks = m.PagedCache([tensor], axes="block,kv,token,head,dim")
    assert first.byte_strides["kv"] == 65536 and blocks.byte_strides["kv"] == 32768
    cache = m.PagedCache([np.zeros((6, 2, 16, 2, 128), np.uint16)], block_size=16)
    assert (cache.num_blocks, cache.axes[1], cache.num_kv_heads) == (6, "kv", 2)


def test_c06_layers_that_differ_are_named():
    a, b = np.zeros((8, 64, 132), np.uint8), np.zeros((8, 64, 576), np.uint16)
    with pytest.raises(m.LayoutMismatchError, match="layer 1 has dtype"):
        m.PagedCache([a, b, a, b], block_size=64, mla=True)
    with pytest.raises(ValueError, match=r"4 layer\(s\) were registered where the model has 2"):
        m.PagedCache([b, b.copy(), b.copy(), b.copy()], block_size=64, mla=True, num_layers=2)
    with pytest.raises(TypeError, match=r"tensors\[1\] \(layer 1\) is a tuple"):
        m.PagedCache([b, (b, b)], block_size=64, mla=True)


def test_c09_a_two_in_front_is_no_kv_axis_of_mla():
    for shape, blocks, tokens in (((512, 64, 576), 512, 64), ((2, 64, 576), 2, 64), ((512, 2, 576), 512, 2)):
        cache = m.PagedCache([np.zeros(shape, np.uint16)])
        assert (cache.kv_planes, cache.num_blocks, cache.block_size, cache.token_bytes) == (1, blocks, tokens, 1152)
    with pytest.raises(m.LayoutMismatchError):
        m.PagedCache([np.zeros((64, 2, 16, 8, 128), np.uint16)], axes=["kv", "block", "token", "head", "dim"])


def test_read_only_tensors_are_not_written(host_engine):
    tensors, _ = kv_first(values())
    for t in tensors:
        t.flags.writeable = False
    cache = m.PagedCache(tensors, block_size=BS, num_kv_heads=NH)
    slab = np.zeros(cache.slab_shape(8), np.uint16)
    host_engine.store(cache, SLOTS, slab).wait()
    with pytest.raises(ValueError, match="read-only"):
        host_engine.load(cache, SLOTS, slab)
    slab.flags.writeable = False
    with pytest.raises(ValueError, match="slab is read-only"):
        host_engine.store(cache, SLOTS, slab)


def test_a_slab_inside_the_cache_is_refused(host_engine):
    memory = np.zeros(1 << 16, np.uint16)
    layer = memory[: 2 * NB * BS * NH * HS].reshape(2, NB, BS, NH, HS)
    cache = m.PagedCache([layer], block_size=BS, num_kv_heads=NH)
    with pytest.raises(ValueError, match="overlaps the paged cache"):
        host_engine.store(cache, [0, 1, 2, 3], memory[:96], slab_tokens=4)


def test_the_configuration_is_read_as_a_file_would_be(tmp_path):
    file = tmp_path / "maru.toml"
    file.write_text('[transfer]\ndevice = "host"\nkv_chunk_tokens = 32\n')
    assert m.Engine(file).chunk_tokens == m.Engine(str(file)).chunk_tokens == 32
    assert m.Engine({"maru_device": "host", "maru_kv_chunk_tokens": 64, "theirs": object()}).chunk_tokens == 64
    assert m.Engine({"transfer": {"device": "host", "kv_chunk_tokens": 8}}).chunk_tokens == 8
    assert m.Engine({"maru_device": "host", "maru_mine": 1}, foreign=["maru_mine"]).backend == "fallback"
    assert "kv_chunk_tokens = 64" in m.Engine({"maru_device": "host", "maru_kv_chunk_tokens": 64}).config
    for config, text in (
        ({"maru_kv_chunk_token": 3}, "maru_kv_chunk_token.*maru_kv_chunk_tokens"),
        ({"maru_device": None}, "`maru_device` is None"),
        ({"maru_device": "tpu"}, "tpu"),
        ({"maru_kv_chunk_tokens": 2**70}, "beyond 64 bits"),
        ({"maru_backend": "native", "maru_use_native_kernels": False}, "native"),
        ({"transfer": {1: 2}}, "key that is an int"),
        ({"maru_pool_path": object()}, "maru_pool_path"),
    ):
        with pytest.raises(m.ConfigError, match=text):
            m.Engine(config)
    with pytest.raises(m.MaruError, match="no.toml"):
        m.Engine(tmp_path / "no.toml")
    with pytest.raises(TypeError, match="the configuration is an int"):
        m.Engine(3)


def test_the_native_backend_by_name_says_why_it_cannot_run():
    if m.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(m.NotAvailableError, match="NVIDIA driver"):
        m.Engine({"maru_backend": "native"})
    assert m.Engine({}).backend == "fallback"


def test_regions_of_files(tmp_path):
    path = tmp_path / "region"
    region = m.Region.open(path, size=1 << 20, create=True)
    assert len(region) == 1 << 20 and region.path == str(path) and not region.is_registered
    region.slab(0, 16).write(b"sixteen bytes ok")
    again = m.Region.open(path, read_only=True)
    slab = again.slab(0, 16)
    assert slab.read() == b"sixteen bytes ok" and slab.read(8, 5) == b"bytes" and again.read_only
    with pytest.raises(ValueError):
        slab.write(b"x")
    assert np.asarray(slab).flags.writeable is False and memoryview(slab).readonly
    with pytest.raises(BufferError):
        slab.__dlpack__()
    with pytest.raises(ValueError, match="16"):
        slab.read(8, 9)
    with pytest.raises(ValueError):
        region.slab(1 << 20, 1)
    with pytest.raises(OverflowError):
        region.slab(2**63, 2**62)
    with pytest.raises((ValueError, OverflowError)):
        region.slab(2**63 - 1, 2**62)
    with pytest.raises(m.MaruError, match="nothing"):
        m.Region.open(tmp_path / "nothing")
    with pytest.raises(m.MaruError) as caught:
        m.Region.open(path, size=1 << 20, create=True)
    assert caught.value.kind == "already_exists"
    part = region.slab(0, 16).span(8, 8)
    assert part.offset == 8 and bytes(part) == b"bytes ok"


def test_a_pool_between_two_handles(tmp_path, host_engine):
    cache, _ = cache_of(kv_first, values())
    path = tmp_path / "pool"
    pool = host_engine.create_pool(cache.slab_bytes(8), path, size=8 << 20)
    keys = m.ChunkKeys("model@rev/rank0", cache.fingerprint(8))
    key = keys.chunk(list(range(8)))
    assert len(key) == 32 and key != keys.chunk(list(range(8)))
    slab = pool.alloc()
    host_engine.store(cache, SLOTS, slab, slab_tokens=8).wait()
    pool.publish(slab, key, fingerprint=cache.fingerprint(8), nbytes=cache.slab_bytes(8))
    assert pool.stats()["published"] == 1
    reader = host_engine.open_pool(path, size=8 << 20)
    assert reader.lookup(bytes(32)) is None and not reader.writable
    found, fingerprint = reader.lookup(key)
    assert fingerprint == cache.fingerprint(8) and found.nbytes == cache.slab_bytes(8)
    empty, held = cache_of(kv_first, np.zeros_like(values()))
    host_engine.load(empty, SLOTS, found, slab_tokens=8, fingerprint=fingerprint).wait()
    again = np.zeros(cache.slab_shape(8), np.uint16)
    host_engine.store(empty, SLOTS, again).wait()
    assert np.array_equal(again, slab_by_hand(values()))
    with pytest.raises(ValueError, match="5 bytes, 32"):
        reader.lookup(b"short")
    with pytest.raises(ValueError, match="Pool.alloc"):
        pool.publish(found, key, fingerprint=1)
    with pytest.raises(m.MaruError):
        host_engine.open_pool(path, writable=True, size=8 << 20)
    with pytest.raises(ValueError, match="maru_pool_path"):
        host_engine.open_pool()
    assert pool.withdraw(key) and not pool.withdraw(key)
    del held
