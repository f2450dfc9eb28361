"""The enums of the old callers, numbered as they know them."""

from __future__ import annotations

from enum import IntEnum

from ._native import engine_formats as _engine_formats


class TransferDirection(IntEnum):
    """Which side is read."""

    H2D = 0
    """Slab to paged cache (load)."""
    D2H = 1
    """Paged cache to slab (store)."""


EngineKVFormat = IntEnum(  # type: ignore[misc]
    "EngineKVFormat",
    {name: number for number, name, _moved in _engine_formats()},
    module="maru_kv_ops",
)
EngineKVFormat.__doc__ = "How an engine's tensors lie in memory. The names are those of LMCache's enum."
