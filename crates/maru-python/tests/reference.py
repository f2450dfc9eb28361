"""Index-by-index references: the address table of the engine formats, written out, one element at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

H2D, D2H = 0, 1

# Formats by what their pointers are.
PER_LAYER = (0, 1, 2, 3, 5, 6, 7, 10, 11, 12, 13)
PLANE_MAJOR = (4, 9)
LAYER_MAJOR = (16,)
ONE_PLANE = (3, 5, 10, 11, 12, 13)
TOKEN_FORMATS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16)
BLOCK_FORMATS = TOKEN_FORMATS
REFUSED = (14, 15, 17, 18)


@dataclass
class Cache:
    """A paged cache of one format in NumPy arrays of 16-bit words, every word different."""

    fmt: int
    layers: int = 3
    blocks: int = 5
    block_size: int = 4
    heads: int = 2
    head_size: int = 6
    pad: int = 0
    """Elements behind each block, for formats whose blocks are outermost."""
    block_op: bool = False
    arrays: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        words = self.tensor_elements
        first = 1
        for _ in range(self.tensor_count):
            values = (np.arange(first, first + words, dtype=np.uint64) % 65521).astype(np.uint16)
            self.arrays.append(values)
            first += words

    # The shape of things -------------------------------------------------------------------------------------

    @property
    def planes(self) -> int:
        return 1 if self.fmt in ONE_PLANE else 2

    @property
    def row(self) -> int:
        """Elements of a token in one plane."""
        if self.fmt in (3, 5):
            return self.head_size
        if self.fmt in (10, 11):
            return self.heads * 2 * self.head_size
        return self.heads * self.head_size

    @property
    def content(self) -> int:
        return self.row // self.heads if self.fmt not in (3, 5) else self.row

    @property
    def slots(self) -> int:
        return self.blocks * self.block_size

    @property
    def is_one_tensor(self) -> bool:
        return self.fmt == 8 or (self.fmt == 0 and self.block_op)

    @property
    def tensor_count(self) -> int:
        if self.is_one_tensor:
            return 1
        return self.layers * (2 if self.fmt in PLANE_MAJOR + LAYER_MAJOR else 1)

    @property
    def tight_block(self) -> int:
        """Elements of a block in a tensor whose blocks are outermost."""
        size = self.block_size * self.row
        if self.is_one_tensor:
            return size * 2 * self.layers
        return size * 2 if self.fmt in (2, 7) else size

    @property
    def block_step(self) -> int:
        return self.tight_block + self.pad

    @property
    def tensor_elements(self) -> int:
        if self.fmt in (1, 6) or (self.fmt == 0 and not self.block_op):
            return 2 * self.slots * self.row
        return self.blocks * self.block_step

    @property
    def pointers(self) -> np.ndarray:
        return np.array([a.ctypes.data for a in self.arrays], dtype=np.int64)

    def place(self, kv: int, layer: int, slot: int, i: int) -> tuple[int, int]:
        """``(tensor, element)`` of element ``i`` of a token's row, from the table of the formats."""
        f, bs, h, nb, n_layers = self.fmt, self.block_size, self.row, self.blocks, self.layers
        b, o = divmod(slot, bs)
        n, d = divmod(i, self.content)
        c = self.content
        if self.is_one_tensor:
            unit = b * self.block_step + (layer * 2 + kv) * bs * h
            return 0, unit + (n * bs * c + o * c + d if f == 8 else o * h + i)
        if f in (0, 1):
            return layer, kv * nb * bs * h + slot * h + i
        if f == 2:
            return layer, b * self.block_step + kv * bs * h + o * h + i
        if f in (3, 5):
            return layer, b * self.block_step + o * h + i
        if f in (4, 9):
            return kv * n_layers + layer, b * self.block_step + o * h + i
        if f == 6:
            return layer, kv * nb * bs * h + b * bs * h + n * bs * c + o * c + d
        if f == 7:
            return layer, b * self.block_step + kv * bs * h + n * bs * c + o * c + d
        if f in (10, 12):
            return layer, b * self.block_step + n * bs * c + o * c + d
        if f in (11, 13):
            return layer, b * self.block_step + o * h + i
        if f == 16:
            return 2 * layer + kv, b * self.block_step + o * h + i
        raise AssertionError(f"no formula for format {f}")

    # What a transfer must do ---------------------------------------------------------------------------------

    def slab(self, tokens: int, fill: int = 0) -> np.ndarray:
        return np.full((self.planes, self.layers, tokens, self.row), fill, dtype=np.uint16)

    def moved(self, slots: list[int], skip: int = 0):
        """Every element that moves: ``(slab index, tensor, element)``."""
        for kv in range(self.planes):
            for layer in range(self.layers):
                for t, slot in enumerate(slots):
                    if t < skip or slot == -1:
                        continue
                    for i in range(self.row):
                        yield (kv, layer, t, i), *self.place(kv, layer, slot, i)

    def gather(self, slab: np.ndarray, slots: list[int], skip: int = 0) -> int:
        count = 0
        for at, tensor, element in self.moved(slots, skip):
            slab[at] = self.arrays[tensor][element]
            count += 1
        return count

    def scatter(self, slab: np.ndarray, slots: list[int], skip: int = 0) -> int:
        count = 0
        for at, tensor, element in self.moved(slots, skip):
            self.arrays[tensor][element] = slab[at]
            count += 1
        return count

    def expected_count(self, slots: list[int], skip: int = 0) -> int:
        tokens = sum(1 for t, s in enumerate(slots) if t >= skip and s != -1)
        return tokens * self.row * self.planes * self.layers

    def copy(self) -> list[np.ndarray]:
        return [a.copy() for a in self.arrays]

    def legacy(self, slab, slots, direction, **more):
        """Positional arguments of ``multi_layer_kv_transfer``."""
        given = dict(
            key_value=slab,
            key_value_ptrs=self.pointers,
            slot_mapping=np.array(slots, dtype=np.int64),
            paged_memory_device="cpu",
            page_buffer_size=self.slots,
            direction=direction,
            engine_kv_format=self.fmt,
            block_size=self.block_size,
            head_size=self.head_size if self.fmt not in (12, 13) else self.content,
            skip_prefix_n_tokens=0,
            block_stride_elems=self.block_step if self.pad else 0,
        )
        given.update(more)
        return given
