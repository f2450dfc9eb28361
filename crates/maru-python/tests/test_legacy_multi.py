"""multi_layer_kv_transfer on host memory."""

from __future__ import annotations

import maru_kv_ops as m
import numpy as np
import pytest
from reference import D2H, H2D, REFUSED, TOKEN_FORMATS, Cache

SLOTS = [5, 6, 7, 0, -1, 19, 12, 3]
GEOMETRIES = {
    "NH!=BS": dict(heads=2, block_size=4),
    "NH==BS": dict(heads=4, block_size=4),
    "one head": dict(heads=1, block_size=4),
    "two blocks": dict(heads=2, blocks=2, block_size=16),
}


def slots_for(cache: Cache) -> list[int]:
    return [s if s < cache.slots else s % cache.slots for s in SLOTS]


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("fmt", TOKEN_FORMATS)
def test_store_equals_the_reference(fmt, geometry):
    cache = Cache(fmt, **GEOMETRIES[geometry])
    slots = slots_for(cache)
    before = cache.copy()
    expected, found = cache.slab(len(slots), 0xAAAA), cache.slab(len(slots), 0xAAAA)
    assert cache.gather(expected, slots) == cache.expected_count(slots)
    m.multi_layer_kv_transfer(**cache.legacy(found, slots, D2H))
    assert np.array_equal(found, expected)
    assert all(np.array_equal(a, b) for a, b in zip(cache.arrays, before))


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("fmt", TOKEN_FORMATS)
def test_load_equals_the_reference(fmt, geometry):
    cache, other = Cache(fmt, **GEOMETRIES[geometry]), Cache(fmt, **GEOMETRIES[geometry])
    slots = slots_for(cache)
    slab = cache.slab(len(slots))
    slab[...] = np.arange(slab.size, dtype=np.uint16).reshape(slab.shape) ^ 0x5A5A
    assert other.scatter(slab, slots) == other.expected_count(slots)
    m.multi_layer_kv_transfer(**cache.legacy(slab.copy(), slots, H2D))
    assert all(np.array_equal(a, b) for a, b in zip(cache.arrays, other.arrays))


@pytest.mark.parametrize("fmt", (2, 3, 4, 5, 7, 8, 9, 10, 11, 12, 13, 16))
@pytest.mark.parametrize("direction", (D2H, H2D))
def test_padded_pages(fmt, direction):
    cache, other = Cache(fmt, pad=10), Cache(fmt, pad=10)
    expected = cache.slab(len(SLOTS))
    expected[...] = np.arange(expected.size, dtype=np.uint16).reshape(expected.shape)
    found = expected.copy()
    (other.gather if direction == D2H else other.scatter)(expected, SLOTS)
    m.multi_layer_kv_transfer(**cache.legacy(found, SLOTS, direction))
    assert np.array_equal(found, expected)
    assert all(np.array_equal(a, b) for a, b in zip(cache.arrays, other.arrays))


@pytest.mark.parametrize("fmt", (1, 6))
def test_padded_pages_where_v_would_be_anywhere_are_refused(fmt):
    cache = Cache(fmt)
    with pytest.raises(ValueError, match="block_stride_elems"):
        m.multi_layer_kv_transfer(**cache.legacy(cache.slab(8), SLOTS, D2H, block_stride_elems=500))


@pytest.mark.parametrize("fmt", TOKEN_FORMATS)
def test_round_trip_into_other_blocks_touches_nothing_else(fmt):
    cache = Cache(fmt)
    slots, others = [0, 1, 2, 3, 8], [17, 4, 18, 5, 11]
    slab, again = cache.slab(5), cache.slab(5)
    before = cache.copy()
    m.multi_layer_kv_transfer(**cache.legacy(slab, slots, D2H))
    m.multi_layer_kv_transfer(**cache.legacy(slab, others, H2D))
    m.multi_layer_kv_transfer(**cache.legacy(again, others, D2H))
    assert np.array_equal(slab, again) and slab.any()
    touched = {place for _at, *place in ((a, t, e) for a, t, e in cache.moved(others)) for place in [tuple(place)]}
    for tensor, (now, then) in enumerate(zip(cache.arrays, before)):
        changed = {(tensor, int(i)) for i in np.flatnonzero(now != then)}
        assert changed <= touched


def test_layouts_of_the_same_content_give_the_same_slab():
    """K/V first, blocks first, split lists, NHD, HND: one byte image."""
    images = []
    content = None
    for fmt in (0, 1, 2, 4, 6, 7, 8, 9, 16):
        cache = Cache(fmt)
        slots = list(range(cache.slots))
        if content is None:
            content = cache.slab(cache.slots)
            content[...] = np.arange(content.size, dtype=np.uint16).reshape(content.shape)
        cache.scatter(content, slots)
        slab = cache.slab(8)
        m.multi_layer_kv_transfer(**cache.legacy(slab, SLOTS, D2H))
        images.append(slab.tobytes())
    assert len(set(images)) == 1


@pytest.mark.parametrize("skip", (0, 3, 8))
def test_skipped_tokens_do_not_shift_the_rest(skip):
    cache = Cache(7)
    expected, found = cache.slab(8, 0xBEEF), cache.slab(8, 0xBEEF)
    assert cache.gather(expected, SLOTS, skip) == cache.expected_count(SLOTS, skip)
    m.multi_layer_kv_transfer(**cache.legacy(found, SLOTS, D2H, skip_prefix_n_tokens=skip))
    assert np.array_equal(found, expected)


def test_more_to_skip_than_there_is_is_an_error():
    cache = Cache(1)
    with pytest.raises(ValueError, match="9.*8 tokens"):
        m.multi_layer_kv_transfer(**cache.legacy(cache.slab(8), SLOTS, D2H, skip_prefix_n_tokens=9))


def test_positional_arguments_and_defaults():
    cache = Cache(3)
    slab, expected = cache.slab(8), cache.slab(8)
    cache.gather(expected, SLOTS)
    m.multi_layer_kv_transfer(
        slab,
        cache.pointers,
        np.array(SLOTS),
        "cpu",
        cache.slots,
        m.TransferDirection.D2H,
        m.EngineKVFormat.NL_X_NB_BS_HS,
    )
    assert np.array_equal(slab, expected)


@pytest.mark.parametrize("fmt", (0, 1, 2, 4, 9, 11, 13, 16))
def test_head_size_is_optional_where_a_tokens_heads_are_side_by_side(fmt):
    cache = Cache(fmt)
    slab, expected = cache.slab(8), cache.slab(8)
    cache.gather(expected, SLOTS)
    m.multi_layer_kv_transfer(**cache.legacy(slab, SLOTS, D2H, head_size=0))
    assert np.array_equal(slab, expected)


@pytest.mark.parametrize("bad", (64, -2, 2**40 + 17, 20))
@pytest.mark.parametrize("direction", (D2H, H2D))
def test_c04_slots_outside_the_cache(bad, direction):
    cache = Cache(1)
    before, slab = cache.copy(), cache.slab(3, 0xCAFE)
    with pytest.raises(IndexError, match=f"slot {bad} of token 1"):
        m.multi_layer_kv_transfer(**cache.legacy(slab, [5, bad, 17], direction))
    assert (slab == 0xCAFE).all()
    assert all(np.array_equal(a, b) for a, b in zip(cache.arrays, before))


def test_a_slot_written_twice_is_refused():
    cache = Cache(1)
    with pytest.raises(ValueError, match="slot 5 is written by token 0 and token 2"):
        m.multi_layer_kv_transfer(**cache.legacy(cache.slab(3), [5, 1, 5], H2D))


def test_c13_slots_of_another_type():
    cache = Cache(1)
    for dtype in (np.int32, np.uint64, np.float64, np.int16, np.bool_):
        with pytest.raises(TypeError, match="slot_mapping has dtype .*, int64 is needed"):
            m.multi_layer_kv_transfer(
                **cache.legacy(cache.slab(4), [0], D2H, slot_mapping=np.array([0, 1, 0, 1]).astype(dtype))
            )
    with pytest.raises(TypeError, match="slot_mapping"):
        swapped = np.array([0, 1, 2, 3], dtype=np.dtype(np.int64).newbyteorder())
        m.multi_layer_kv_transfer(**cache.legacy(cache.slab(4), [0], D2H, slot_mapping=swapped))


def test_c13_strided_slots_are_honoured():
    cache = Cache(1)
    slots = np.arange(8, dtype=np.int64)[::2]
    backwards = np.arange(8, dtype=np.int64)[::-2]
    for given in (slots, backwards):
        slab, expected = cache.slab(4), cache.slab(4)
        cache.gather(expected, given.tolist())
        m.multi_layer_kv_transfer(**cache.legacy(slab, [], D2H, slot_mapping=given))
        assert np.array_equal(slab, expected)


def test_c13_slots_on_another_device():
    class Elsewhere:
        shape, dtype, device = (4,), "torch.int64", "cuda:0"

        def data_ptr(self):
            return 4096

        def stride(self):
            return (1,)

        def element_size(self):
            return 8

    cache = Cache(1)
    with pytest.raises(ValueError, match="slot_mapping is on cuda:0, the paged cache is on host"):
        m.multi_layer_kv_transfer(**cache.legacy(cache.slab(4), [], D2H, slot_mapping=Elsewhere()))


def test_native_tensors_without_a_gpu_say_what_is_missing():
    if m.is_available():
        pytest.skip("this machine has a GPU")
    cache = Cache(1)
    with pytest.raises(RuntimeError, match="cuda:0.*NVIDIA driver"):
        m.multi_layer_kv_transfer(**cache.legacy(cache.slab(8), SLOTS, D2H, paged_memory_device="cuda:0"))


@pytest.mark.parametrize("fmt", REFUSED)
def test_formats_that_are_not_moved_are_refused_by_name(fmt):
    cache = Cache(1)
    name = m.EngineKVFormat(fmt).name
    with pytest.raises(m.UnsupportedFormatError, match=name):
        m.multi_layer_kv_transfer(**cache.legacy(cache.slab(8), SLOTS, D2H, engine_kv_format=fmt))


WRONG = {
    "a rank of 3": (dict(key_value=np.zeros((2, 3, 96), np.uint16)), ValueError, "key_value has shape .* 4 axes"),
    "a slab of other layers": (dict(key_value=np.zeros((2, 2, 8, 12), np.uint16)), ValueError, "3 tensor pointers .* needs 2"),
    "one plane": (dict(key_value=np.zeros((1, 3, 8, 12), np.uint16)), ValueError, r"1 plane\(s\).*needs 2"),
    "other tokens": (dict(key_value=np.zeros((2, 3, 9, 12), np.uint16)), ValueError, "8 slots, the slab has 9 tokens"),
    "a strided slab": (dict(key_value=np.zeros((2, 3, 8, 24), np.uint16)[..., ::2]), ValueError, "must be contiguous"),
    "a transposed slab": (dict(key_value=np.zeros((3, 2, 8, 12), np.uint16).swapaxes(0, 1)), ValueError, "contiguous"),
    "heads that do not divide": (dict(head_size=5), ValueError, "head_size is 5.*12 elements"),
    "blocks that do not divide": (dict(block_size=3), ValueError, "page_buffer_size is 20.*block_size 3"),
    "no block size": (dict(block_size=0), ValueError, "block_size is 0"),
    "no slots": (dict(page_buffer_size=0), ValueError, "page_buffer_size is 0"),
    "a null pointer": (dict(key_value_ptrs=np.array([0, 1, 2])), ValueError, r"key_value_ptrs\[0\] is 0"),
    "too few pointers": (dict(key_value_ptrs=np.array([8, 8])), ValueError, "2 tensor pointers .* needs 3"),
    "pointers to nothing": (dict(key_value_ptrs=np.array([4096, 8192, 12288])), ValueError, "are no memory"),
    "huge pointers": (dict(key_value_ptrs=np.array([-1, -2, -3])), (ValueError, OverflowError), "."),
    "int32 pointers": (dict(key_value_ptrs=np.array([8, 8, 8], np.int32)), TypeError, "key_value_ptrs has dtype int32"),
    "a direction of 2": (dict(direction=2), ValueError, "direction is 2"),
    "a format of 99": (dict(engine_kv_format=99), ValueError, "engine format 99"),
    "a negative skip": (dict(skip_prefix_n_tokens=-1), ValueError, "skip_prefix_n_tokens is -1"),
    "a huge size": (dict(page_buffer_size=2**62), (ValueError, OverflowError), "."),
    "beyond 64 bits": (dict(page_buffer_size=2**64), OverflowError, "page_buffer_size"),
    "a float": (dict(block_size=4.0), TypeError, "block_size is a float, an int is needed"),
    "a bool": (dict(block_size=True), TypeError, "block_size is a bool"),
    "text": (dict(direction="D2H"), TypeError, "direction is a str"),
    "no device": (dict(paged_memory_device="tpu:0"), ValueError, "paged_memory_device is .tpu:0"),
    "no slab": (dict(key_value=None), TypeError, "key_value is a NoneType; a tensor is needed"),
    "a list of slots with text": (dict(slot_mapping=["a"] * 8), TypeError, "slot_mapping"),
    "slots beyond 64 bits": (dict(slot_mapping=[2**64] * 8), OverflowError, "slot_mapping"),
    "two axes of slots": (dict(slot_mapping=np.zeros((8, 1), np.int64)), ValueError, "slot_mapping has shape"),
    "complex elements": (dict(key_value=np.zeros((2, 3, 8, 12), np.complex64)), TypeError, "key_value: elements of 8"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case):
    change, error, text = WRONG[case]
    cache = Cache(1)
    before, slab = cache.copy(), cache.slab(8, 0x1234)
    with pytest.raises(error, match=text) as caught:
        m.multi_layer_kv_transfer(**{**cache.legacy(slab, SLOTS, D2H), **change})
    assert isinstance(caught.value, m.MaruError)
    assert (slab == 0x1234).all()
    assert all(np.array_equal(a, b) for a, b in zip(cache.arrays, before))


def test_a_read_only_slab_is_not_written():
    cache = Cache(1)
    slab = cache.slab(8)
    slab.flags.writeable = False
    with pytest.raises(ValueError, match="key_value is read-only"):
        m.multi_layer_kv_transfer(**cache.legacy(slab, SLOTS, D2H))
    m.multi_layer_kv_transfer(**cache.legacy(slab, SLOTS, H2D))


def test_a_head_that_is_needed():
    for fmt in (6, 7, 8, 10, 12):
        cache = Cache(fmt)
        with pytest.raises(ValueError, match="head_size is 0"):
            m.multi_layer_kv_transfer(**cache.legacy(cache.slab(8), SLOTS, D2H, head_size=0))


def test_element_widths():
    for dtype in (np.uint8, np.float16, np.float32, np.float64, np.int64):
        layers = [np.arange(2 * 5 * 4 * 12).astype(dtype).reshape(2, 5, 4, 12) + i for i in range(2)]
        slab = np.zeros((2, 2, 3, 12), dtype)
        m.multi_layer_kv_transfer(
            slab, np.array([a.ctypes.data for a in layers]), np.array([19, 0, 7]), "cpu", 20, 1, 1, block_size=4
        )
        flat = [a.reshape(2, 20, 12) for a in layers]
        assert np.array_equal(slab, np.stack([f[:, [19, 0, 7]] for f in flat], axis=1))


def test_no_tokens_is_no_work():
    cache = Cache(1)
    m.multi_layer_kv_transfer(**cache.legacy(cache.slab(0), [], D2H))


def test_a_known_cache_that_is_given_back_is_noticed():
    import mmap

    cache = Cache(1)
    memory = [mmap.mmap(-1, 1 << 16) for _ in cache.arrays]
    addresses = []
    for mapped, array in zip(memory, cache.arrays):
        view = np.frombuffer(mapped, np.uint16)
        view[: array.size] = array
        addresses.append(view.ctypes.data)
        del view
    slab, slots = cache.slab(8), [5, 6, 7, 0, -1, 19, 12, 3]
    given = cache.legacy(slab, slots, D2H, key_value_ptrs=np.array(addresses))
    expected = cache.slab(8)
    cache.gather(expected, slots)
    for _ in range(2):
        slab[...] = 0
        m.multi_layer_kv_transfer(**given)
        assert np.array_equal(slab, expected)
    memory[1].close()
    with pytest.raises(ValueError, match="layer 1 plane 0: .* no memory any more"):
        m.multi_layer_kv_transfer(**given)


@pytest.mark.parametrize("odd", ("ints", "numpy ints", "bool", "too large", "too small", "float", "none"))
@pytest.mark.parametrize("kind", (list, tuple))
def test_lists_of_numbers(kind, odd):
    """Plain ints are read by a way of their own; anything else in the list takes the general one."""
    cache, slab = Cache(1), Cache(1).slab(8)
    slots = list(SLOTS)
    given = lambda: cache.legacy(slab, [], D2H, slot_mapping=kind(slots))  # noqa: E731
    expected = cache.slab(8)
    if odd in ("ints", "numpy ints", "bool"):
        slots[3] = {"ints": 0, "numpy ints": np.int64(0), "bool": False}[odd]
        cache.gather(expected, SLOTS)
        m.multi_layer_kv_transfer(**given())
        assert np.array_equal(slab, expected)
        return
    slots[3], error = {
        "too large": (2**63, OverflowError), "too small": (-(2**63) - 1, OverflowError), "float": (0.0, TypeError), "none": (None, TypeError),
    }[odd]  # fmt: skip
    with pytest.raises(error, match="slot_mapping"):
        m.multi_layer_kv_transfer(**given())
    assert not slab.any()
