"""multi_layer_block_kv_transfer on host memory."""

from __future__ import annotations

import maru_kv_ops as m
import numpy as np
import pytest
from reference import BLOCK_FORMATS, D2H, H2D, Cache


def desc(cache: Cache, **more) -> m.PageBufferShapeDesc:
    fields = dict(
        kv_size=cache.planes,
        nl=cache.layers,
        nb=cache.blocks,
        bs=cache.block_size,
        nh=1 if cache.fmt in (3, 5) else cache.heads,
        hs=cache.head_size,
        element_size=2,
        block_stride_elems=cache.block_step if cache.pad else 0,
    )
    fields.update(more)
    return m.PageBufferShapeDesc(**fields)


def arguments(cache: Cache, slabs, blocks, direction, **more) -> dict:
    given = dict(
        paged_buffer_ptrs_tensor=cache.pointers,
        lmcache_objects_ptrs=[s.ctypes.data for s in slabs],
        block_ids=np.array(blocks, np.int64),
        device="cpu",
        direction=direction,
        shape_desc=desc(cache),
        lmcache_chunk_size=slabs[0].shape[2],
        engine_kv_format=cache.fmt,
        skip_prefix_n_blocks=0,
    )
    given.update(more)
    return given


def slots_of(cache: Cache, blocks) -> list[int]:
    return [b * cache.block_size + o for b in blocks for o in range(cache.block_size)]


def expected_slabs(cache: Cache, blocks, count: int, skip: int = 0, fill: int = 0xAAAA):
    per = len(blocks) // count
    slabs = []
    for k in range(count):
        slab = cache.slab(per * cache.block_size, fill)
        local = max(0, min(per, skip - k * per)) * cache.block_size
        slots = slots_of(cache, blocks[k * per : (k + 1) * per])
        assert cache.gather(slab, slots, local) == cache.expected_count(slots, local)
        slabs.append(slab)
    return slabs


@pytest.mark.parametrize("pad", (0, 10))
@pytest.mark.parametrize("heads", (2, 4))
@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
def test_store_and_load_equal_the_reference(fmt, heads, pad):
    if pad and fmt in (1, 6):
        pytest.skip("padded pages leave open where V's plane begins in K/V-first formats")
    cache = Cache(fmt, heads=heads, pad=pad, block_op=True, blocks=6)
    blocks = [4, 1, 0, 5]
    wanted = expected_slabs(cache, blocks, 2)
    slabs = [np.full_like(s, 0xAAAA) for s in wanted]
    m.multi_layer_block_kv_transfer(**arguments(cache, slabs, blocks, D2H))
    assert all(np.array_equal(a, b) for a, b in zip(slabs, wanted))
    other = Cache(fmt, heads=heads, pad=pad, block_op=True, blocks=6)
    target = Cache(fmt, heads=heads, pad=pad, block_op=True, blocks=6)
    others = [2, 3, 5, 0]
    for k in range(2):
        other.scatter(wanted[k], slots_of(cache, others[2 * k : 2 * k + 2]))
    m.multi_layer_block_kv_transfer(**arguments(target, slabs, others, H2D))
    assert all(np.array_equal(a, b) for a, b in zip(target.arrays, other.arrays))


@pytest.mark.parametrize("count", (1, 2, 4, 6))
def test_any_number_of_slabs(count):
    cache = Cache(2, blocks=13, block_op=True)
    blocks = list(range(12))[::-1]
    wanted = expected_slabs(cache, blocks, count)
    slabs = [np.full_like(s, 0xAAAA) for s in wanted]
    m.multi_layer_block_kv_transfer(**arguments(cache, slabs, blocks, D2H))
    assert all(np.array_equal(a, b) for a, b in zip(slabs, wanted))


@pytest.mark.parametrize("skip", (0, 1, 2, 3, 4))
def test_skipped_blocks_are_of_the_whole_list(skip):
    cache = Cache(7, blocks=6, block_op=True)
    blocks = [4, 1, 0, 5]
    wanted = expected_slabs(cache, blocks, 2, skip)
    slabs = [np.full_like(s, 0xAAAA) for s in wanted]
    m.multi_layer_block_kv_transfer(**arguments(cache, slabs, blocks, D2H, skip_prefix_n_blocks=skip))
    assert all(np.array_equal(a, b) for a, b in zip(slabs, wanted))


def test_a_shape_of_another_module_does():
    class Theirs:
        kv_size, nl, nb, bs, nh, hs, element_size, block_stride_elems = 2, 3, 5, 4, 2, 6, 2, 0

    cache = Cache(1, block_op=True)
    wanted = expected_slabs(cache, [3, 0], 1)
    slabs = [np.zeros_like(wanted[0])]
    m.multi_layer_block_kv_transfer(**arguments(cache, slabs, [3, 0], D2H, shape_desc=Theirs()))
    assert np.array_equal(slabs[0], wanted[0])


CACHE = Cache(1, block_op=True)
WRONG = {
    "a block beyond the cache": (dict(block_ids=np.array([0, 5])), IndexError, r"block_ids\[1\] is 5; allowed: 0 to 4"),
    "a negative block": (dict(block_ids=np.array([-1, 0])), IndexError, r"block_ids\[0\] is -1"),
    "a huge block": (dict(block_ids=np.array([2**62, 0])), IndexError, "block_ids"),
    "too few blocks": (dict(block_ids=np.array([0])), ValueError, "block_ids has 1 blocks.*need 2 blocks"),
    "no whole chunk": (dict(lmcache_chunk_size=7), ValueError, "lmcache_chunk_size is 7.*blocks of 4"),
    "int32 blocks": (dict(block_ids=np.array([0, 1], np.int32)), TypeError, "block_ids has dtype int32"),
    "more to skip": (dict(skip_prefix_n_blocks=3), ValueError, "skip_prefix_n_blocks is 3"),
    "another plane count": (dict(shape_desc=desc(CACHE, kv_size=1)), ValueError, "kv_size is 1.*needs 2"),
    "no layers": (dict(shape_desc=desc(CACHE, nl=0)), ValueError, "shape_desc.nl is 0"),
    "a negative size": (dict(shape_desc=desc(CACHE, hs=-6)), ValueError, "shape_desc.hs is -6"),
    "an odd element": (dict(shape_desc=desc(CACHE, element_size=3)), ValueError, "element_size is 3"),
    "no shape": (dict(shape_desc=(2, 3)), TypeError, "shape_desc is a tuple without kv_size"),
    "a null slab": (dict(lmcache_objects_ptrs=[0]), ValueError, r"lmcache_objects_ptrs\[0\] is 0"),
    "a slab that is no memory": (dict(lmcache_objects_ptrs=[4096]), ValueError, r"lmcache_objects_ptrs\[0\].*no memory"),
    "a huge slab": (dict(shape_desc=desc(CACHE, hs=2**40)), (ValueError, OverflowError), "."),
    "pointers for other layers": (dict(shape_desc=desc(CACHE, nl=2)), ValueError, "3 tensor pointers"),
    "no list": (dict(lmcache_objects_ptrs=None), TypeError, "lmcache_objects_ptrs is a NoneType"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case):
    change, error, text = WRONG[case]
    slab = CACHE.slab(8, 0x1234)
    with pytest.raises(error, match=text) as caught:
        m.multi_layer_block_kv_transfer(**{**arguments(CACHE, [slab], [0, 1], D2H), **change})
    assert isinstance(caught.value, m.MaruError)
    assert (slab == 0x1234).all()
