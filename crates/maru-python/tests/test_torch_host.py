"""Torch tensors in host memory: caches, slabs, slots and pointers, in every form that torch hands out. Skipped without
torch; no GPU is needed."""

from __future__ import annotations

import maru_kv_ops as m
import numpy as np
import pytest
from reference import D2H, H2D, Cache

torch = pytest.importorskip("torch", reason="torch is not installed")
SLOTS = [5, 6, 7, 0, -1, 19, 12, 3]


def tensors_of(cache: Cache) -> list:
    return [torch.from_numpy(a.view(np.int16)) for a in cache.arrays]


def stored(cache: Cache, slots=SLOTS) -> np.ndarray:
    slab = cache.slab(len(slots))
    cache.gather(slab, slots)
    return slab


@pytest.mark.parametrize("fmt", (1, 2, 3, 6))
def test_the_old_call(fmt):
    cache = Cache(fmt)
    ptrs = torch.tensor([t.data_ptr() for t in tensors_of(cache)], dtype=torch.int64)
    slab = torch.zeros(cache.slab(8).shape, dtype=torch.int16)
    device = torch.device("cpu")
    for _ in range(2):
        slab.zero_()
        given = dict(key_value_ptrs=ptrs, slot_mapping=torch.tensor(SLOTS), paged_memory_device=device)
        m.multi_layer_kv_transfer(**cache.legacy(slab, [], D2H, **given))
        assert np.array_equal(slab.numpy().view(np.uint16), stored(cache))
    other = Cache(fmt)
    for a in other.arrays:
        a[...] = 0x1111
    wanted = Cache(fmt)
    for a in wanted.arrays:
        a[...] = 0x1111
    wanted.scatter(stored(cache), SLOTS[::-1])
    back = torch.tensor(SLOTS[::-1])
    ptrs = torch.tensor([t.data_ptr() for t in tensors_of(other)], dtype=torch.int64)
    given = dict(key_value_ptrs=ptrs, slot_mapping=back, paged_memory_device=torch.device("cpu"))
    m.multi_layer_kv_transfer(**other.legacy(slab, [], H2D, **given))
    assert all(np.array_equal(a, b) for a, b in zip(other.arrays, wanted.arrays))


FORMS = {
    "tensor": lambda s: torch.tensor(s),
    "view of every second": lambda s: torch.tensor([x for slot in s for x in (slot, 10**6)])[::2],
    "inference tensor": lambda s: torch.inference_mode()(torch.tensor)(s),
    "parameter": lambda s: torch.nn.Parameter(torch.tensor(s), requires_grad=False),
    "with an offset": lambda s: torch.tensor([10**6, *s])[1:],
    "NumPy's": lambda s: torch.from_numpy(np.array(s)),
}


@pytest.mark.parametrize("form", FORMS)
def test_slots_in_every_form(host_engine, form):
    source = Cache(1)
    cache = m.PagedCache([t.view(2, 5, 4, 2, 6) for t in tensors_of(source)], block_size=4, num_kv_heads=2)
    slab = torch.zeros(cache.slab_shape(8), dtype=torch.int16)
    transfer = host_engine.store(cache, FORMS[form](SLOTS), slab)
    transfer.wait()
    assert np.array_equal(slab.numpy().view(np.uint16), stored(source))


DTYPES = {
    torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.uint8: "u8", torch.int8: "i8",
    torch.int16: "raw16", torch.int32: "raw32", torch.float64: "raw64", torch.int64: "raw64",
    torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2",
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_element_types(host_engine, dtype):
    bits = torch.randint(0, 256, (2, 5, 4, 2, 8 * dtype.itemsize), dtype=torch.uint8)
    layer = bits.view(dtype)
    cache = m.PagedCache([layer], block_size=4, num_kv_heads=2, axes="kv,block,token,head,dim")
    assert cache.dtype == DTYPES[dtype]
    slab = torch.zeros(cache.slab_shape(20), dtype=torch.uint8 if dtype.itemsize == 1 else dtype).view(dtype)
    host_engine.store(cache, range(20), slab).wait()
    assert torch.equal(slab.view(torch.uint8).flatten(), bits.flatten())


def test_a_transposed_cache_and_gradients(host_engine):
    layer = torch.randn(2, 5, 2, 4, 6, requires_grad=True)
    cache = m.PagedCache([layer.transpose(2, 3)], block_size=4, num_kv_heads=2)
    slab = torch.zeros(cache.slab_shape(20))
    host_engine.store(cache, torch.arange(20), slab).wait()
    assert torch.equal(slab[:, 0], layer.detach().transpose(2, 3).reshape(2, 20, 12))


def test_what_is_no_memory_is_refused(host_engine):
    cache = m.PagedCache([torch.zeros(2, 5, 4, 2, 6)], block_size=4, num_kv_heads=2)
    slab = torch.zeros(cache.slab_shape(8))
    empty = torch.arange(8)
    empty.untyped_storage().resize_(0)
    gone = torch.zeros(cache.slab_shape(8))
    gone.untyped_storage().resize_(0)
    complex_ = torch.zeros(cache.slab_shape(8)[:3] + (12,), dtype=torch.complex64)
    for slots, target, error in (
        (empty, slab, m.MaruError), (torch.arange(8), gone, m.MaruError), (torch.arange(8, device="meta"), slab, Exception),
        (torch.arange(8, dtype=torch.int32), slab, TypeError), (torch.arange(8.0), slab, TypeError),
        (torch.zeros(2, 4, dtype=torch.int64), slab, ValueError), (torch.tensor(3), slab, ValueError),
        (torch.arange(8), slab.to_sparse(), Exception), (torch.arange(8), slab.transpose(1, 2), ValueError),
        (torch.arange(8), complex_, TypeError), (torch.arange(8), slab.half(), TypeError),
    ):  # fmt: skip
        with pytest.raises(error):
            host_engine.store(cache, slots, target)
    host_engine.store(cache, torch.arange(8), slab).wait()


def test_layers_are_ordered_without_a_gpu(host_engine):
    """Torch is loaded but serves no GPU: the current stream is the default one."""
    cache = m.PagedCache([torch.zeros(2, 5, 4, 2, 6)], block_size=4, num_kv_heads=2)
    transfer = host_engine.store(cache, torch.arange(8), torch.zeros(cache.slab_shape(8)), by_layer=True)
    transfer.order_before_layer(0)
    transfer.order_before()
    transfer.wait()
