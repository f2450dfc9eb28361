"""single_layer_kv_transfer on host memory: addresses come from strides."""

from __future__ import annotations

import maru_kv_ops as m
import numpy as np
import pytest
from reference import D2H, H2D

NB, HS = 5, 6
SLOTS = [5, 6, 7, 0, -1, 19, 12, 3]
KV_FIRST = {1: True, 2: False, 6: True, 7: False}


def content(bs: int, nh: int) -> np.ndarray:
    """``[kv][block][token][head][dim]``, every word different."""
    return np.arange(2 * NB * bs * nh * HS, dtype=np.uint16).reshape(2, NB, bs, nh, HS)


def paged(fmt: int, values: np.ndarray, form: str) -> np.ndarray:
    """The tensor of a format in memory order, shown token-major ("engine"), or head axis moved ("moved")."""
    hnd = fmt in (6, 7)
    logical = values if KV_FIRST[fmt] else values.swapaxes(0, 1)
    memory = np.ascontiguousarray(logical.swapaxes(2, 3) if hnd else logical)
    if form == "moved":
        return memory if hnd else memory.swapaxes(2, 3)
    return memory.swapaxes(2, 3) if hnd else memory


def by_hand(values: np.ndarray, slots: list[int], token_major: bool) -> tuple[np.ndarray, int]:
    bs, nh = values.shape[2:4]
    slab = np.full((2, len(slots), nh * HS), 0xAAAA, np.uint16)
    count = 0
    for kv in range(2):
        for t, slot in enumerate(slots):
            if slot == -1:
                continue
            for n in range(nh):
                for d in range(HS):
                    slab[kv, t, n * HS + d] = values[kv, slot // bs, slot % bs, n, d]
                    count += 1
    return (np.ascontiguousarray(slab.swapaxes(0, 1)) if token_major else slab), count


@pytest.mark.parametrize("token_major", (False, True))
@pytest.mark.parametrize("form", ("engine", "moved"))
@pytest.mark.parametrize("bs,nh", ((4, 2), (4, 4), (4, 1), (2, 8), (1, 3)))
@pytest.mark.parametrize("fmt", (1, 2, 6, 7))
def test_both_forms_give_the_right_bytes_both_ways(fmt, bs, nh, form, token_major):
    values = content(bs, nh)
    slots = [s % (NB * bs) if s >= 0 else s for s in SLOTS] if bs == 4 else list(range(NB * bs))[::-1]
    expected, count = by_hand(values, slots, token_major)
    assert count == 2 * nh * HS * sum(s >= 0 for s in slots)
    tensor = paged(fmt, values, form)
    slab = np.full_like(expected, 0xAAAA)
    m.single_layer_kv_transfer(slab, tensor, np.array(slots), D2H, fmt, token_major)
    assert np.array_equal(slab, expected)
    # And back into an empty cache: only the named slots change, to what they were.
    empty = paged(fmt, np.full_like(values, 0xBBBB), form)
    m.single_layer_kv_transfer(slab, empty, np.array(slots), H2D, fmt, token_major=token_major)
    wanted = np.full_like(values, 0xBBBB)
    for slot in slots:
        if slot >= 0:
            wanted[:, slot // bs, slot % bs] = values[:, slot // bs, slot % bs]
    assert np.array_equal(empty, paged(fmt, wanted, form))


@pytest.mark.parametrize("fmt", (1, 2))
def test_flattened_heads(fmt):
    values = content(4, 2)
    tensor = paged(fmt, values, "engine").reshape(*((2, NB) if fmt == 1 else (NB, 2)), 4, 12)
    expected, _ = by_hand(values, SLOTS, False)
    slab = np.full_like(expected, 0xAAAA)
    m.single_layer_kv_transfer(slab, tensor, np.array(SLOTS), D2H, fmt)
    assert np.array_equal(slab, expected)


@pytest.mark.parametrize("shape", ((NB, 4, 12), (NB, 1, 4, 12), (NB * 4, 1, 12)))
def test_one_plane(shape):
    tensor = np.arange(NB * 4 * 12, dtype=np.uint16).reshape(shape)
    expected = np.full((8, 12), 0xAAAA, np.uint16)
    for t, slot in enumerate(SLOTS):
        if slot >= 0:
            expected[t] = tensor.reshape(-1, 12)[slot]
    for slab in (np.full((8, 12), 0xAAAA, np.uint16), np.full((1, 8, 12), 0xAAAA, np.uint16)):
        m.single_layer_kv_transfer(slab, tensor, np.array(SLOTS), D2H, 3)
        assert np.array_equal(slab.reshape(8, 12), expected)


def test_a_strided_slice_of_a_packed_slab():
    values = content(4, 2)
    expected, _ = by_hand(values, SLOTS, False)
    packed = np.full((2, 3, 8, 12), 0xAAAA, np.uint16)
    m.single_layer_kv_transfer(packed[:, 1], paged(6, values, "engine"), np.array(SLOTS), D2H, 6)
    assert np.array_equal(packed[:, 1], expected)
    assert (packed[:, 0] == 0xAAAA).all() and (packed[:, 2] == 0xAAAA).all()


def test_padded_blocks_are_read_by_their_strides():
    values = content(4, 2)
    padded = np.full((NB, 2 * 4 * 12 + 32), 0xCCCC, np.uint16)
    view = padded[:, : 2 * 4 * 12].reshape(NB, 2, 4, 2, 6)
    view[...] = paged(2, values, "engine")
    assert np.shares_memory(view, padded)
    expected, _ = by_hand(values, SLOTS, False)
    slab = np.full_like(expected, 0xAAAA)
    m.single_layer_kv_transfer(slab, view, np.array(SLOTS), D2H, 2)
    assert np.array_equal(slab, expected)


def test_c19_other_types_of_the_same_width():
    tensor = np.zeros((2, NB, 4, 2, 6), np.float16)
    with pytest.raises(TypeError, match="u8.*f16"):
        m.single_layer_kv_transfer(np.zeros((2, 8, 24), np.uint8), tensor, np.array(SLOTS), D2H, 1)

    class Bf16:
        """Torch's names without torch."""

        def __init__(self, array):
            self.array, self.shape, self.dtype, self.device = array, array.shape, "torch.bfloat16", "cpu"

        def data_ptr(self):
            return self.array.ctypes.data

        def stride(self):
            return tuple(s // 2 for s in self.array.strides)

        def element_size(self):
            return 2

    slab = np.zeros((2, 8, 12), np.float16)
    with pytest.raises(TypeError, match="f16.*bf16"):
        m.single_layer_kv_transfer(slab, Bf16(tensor), np.array(SLOTS), D2H, 1)
    # Declared raw on one side (NumPy's 16-bit integers): exact.
    bits = np.zeros((2, 8, 12), np.uint16)
    tensor[...] = 0.1621
    m.single_layer_kv_transfer(bits, Bf16(tensor), np.array(SLOTS), D2H, 1)
    assert bits[0, 0, 0] == tensor.view(np.uint16)[0, 0, 0, 0, 0] != 0


WRONG = {
    "a block-first tensor for a K/V-first format": (dict(fmt=1, shape=(NB, 2, 4, 2, 6)), "is needed for format"),
    "a K/V-first tensor for a block-first format": (dict(fmt=2, shape=(2, NB, 4, 2, 6)), "is needed for format"),
    "heads that are not there": (dict(slab=(2, 8, 18)), "3 head"),
    "rows of no whole head": (dict(slab=(2, 8, 13)), "no whole number of heads"),
    "a slab of 4 axes": (dict(slab=(2, 1, 8, 12)), "lmc_key_value_cache has shape"),
    "other tokens": (dict(slab=(2, 9, 12)), "8 slots, the slab has 9 tokens"),
    "token-major not said": (dict(slab=(8, 2, 12)), "lmc_key_value_cache has shape"),
    "a format without this call": (dict(fmt=9), "no single-layer call"),
    "an axis of nothing": (dict(shape=(2, 0, 4, 2, 6)), "length 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case):
    change, text = WRONG[case]
    tensor = np.zeros(change.get("shape", (2, NB, 4, 2, 6)), np.uint16)
    slab = np.zeros(change.get("slab", (2, 8, 12)), np.uint16)
    with pytest.raises((ValueError, TypeError), match=text):
        m.single_layer_kv_transfer(slab, tensor, np.array(SLOTS), D2H, change.get("fmt", 1))


def test_read_only_sides_are_not_written():
    tensor, slab = np.zeros((2, NB, 4, 2, 6), np.uint16), np.zeros((2, 8, 12), np.uint16)
    tensor.flags.writeable = False
    m.single_layer_kv_transfer(slab, tensor, np.array(SLOTS), D2H, 1)
    with pytest.raises(ValueError, match="vllm_key_value_cache is read-only"):
        m.single_layer_kv_transfer(slab, tensor, np.array(SLOTS), H2D, 1)


def test_slots_outside_the_cache():
    tensor, slab = np.zeros((2, NB, 4, 2, 6), np.uint16), np.zeros((2, 1, 12), np.uint16)
    with pytest.raises(IndexError, match="slot 20"):
        m.single_layer_kv_transfer(slab, tensor, np.array([20]), D2H, 1)


def test_more_layers_and_lengths_than_are_remembered():
    """Whatever was forgotten meanwhile is worked out again: a second round gives the same bytes as the first."""
    rng = np.random.default_rng(5)
    layers = [rng.integers(0, 1 << 16, (2, NB, 4, 2, HS), np.uint16) for _ in range(530)]
    for _ in range(2):
        for i, layer in enumerate(layers):
            slots = rng.permutation(NB * 4)[: 1 + i % (NB * 4)]
            expected, _ = by_hand(layer, slots.tolist(), False) if i % 53 == 0 else (None, 0)
            slab = np.full((2, len(slots), 2 * HS), 0xAAAA, np.uint16)
            m.single_layer_kv_transfer(slab, layer, slots, D2H, 1)
            assert np.array_equal(slab, layer.reshape(2, NB * 4, 2 * HS)[:, slots])
            assert expected is None or np.array_equal(slab, expected)
    # More geometries of a slab than are remembered, of one layer.
    layer = layers[0].reshape(2, NB * 4, 2 * HS)
    for _ in range(2):
        for tokens in range(1, 21):
            for gap in range(1, 6):
                room = np.full((2, tokens * gap, 2 * HS), 0xAAAA, np.uint16)
                m.single_layer_kv_transfer(room[:, ::gap], layers[0], np.arange(tokens), D2H, 1)
                assert np.array_equal(room[:, ::gap], layer[:, :tokens])
                assert all((room[:, k::gap] == 0xAAAA).all() for k in range(1, gap))
