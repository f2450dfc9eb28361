"""Moves an LLM server's KV cache between paged memory and slabs in shared memory.

A drop-in for the compiled modules that KV connectors call (:func:`multi_layer_kv_transfer`,
:func:`single_layer_kv_transfer`, :func:`multi_layer_block_kv_transfer`), and an object API on the same engine
(:class:`Engine`, :class:`PagedCache`, :class:`Region`). Importing needs no GPU, driver, PyTorch or NumPy.
"""

from __future__ import annotations

import atexit as _atexit
import logging as _logging

from . import _errors as _errors
from ._enums import EngineKVFormat, TransferDirection
from ._errors import (
    AmbiguousLayoutError,
    ArgumentTypeError,
    ArgumentValueError,
    ConfigError,
    DtypeMismatchError,
    InternalError,
    LayoutMismatchError,
    MaruError,
    NotAvailableError,
    NumberOverflowError,
    SlotRangeError,
    StateError,
    TransferFailedError,
    UnsupportedFormatError,
)
from ._native import (
    ChunkKeys,
    Engine,
    PageBufferShapeDesc,
    PagedCache,
    Pool,
    Region,
    Slab,
    Transfer,
    multi_layer_block_kv_transfer,
    multi_layer_kv_transfer,
    single_layer_kv_transfer,
    slots_from_blocks,
    synchronize,
)
from ._native import unavailable as _unavailable
from ._native import version as _version
from .resolve import Ops, resolve_ops

__version__: str = _version()

__all__ = [
    "AmbiguousLayoutError",
    "ArgumentTypeError",
    "ArgumentValueError",
    "ChunkKeys",
    "ConfigError",
    "DtypeMismatchError",
    "Engine",
    "EngineKVFormat",
    "InternalError",
    "LayoutMismatchError",
    "MaruError",
    "NotAvailableError",
    "NumberOverflowError",
    "Ops",
    "PageBufferShapeDesc",
    "PagedCache",
    "Pool",
    "Region",
    "Slab",
    "SlotRangeError",
    "StateError",
    "Transfer",
    "TransferDirection",
    "TransferFailedError",
    "UnsupportedFormatError",
    "import_error",
    "is_available",
    "multi_layer_block_kv_transfer",
    "multi_layer_kv_transfer",
    "resolve_ops",
    "single_layer_kv_transfer",
    "slots_from_blocks",
    "synchronize",
]


def import_error() -> Exception | None:
    """Why the native kernel cannot run in this process, or ``None`` if it can."""
    reason = _unavailable()
    if reason is None:
        return None
    kind, message = reason
    return _errors.class_of_kind(kind)(message, kind)


def is_available() -> bool:
    """Whether the native kernel can run in this process. Host memory can be moved in any case."""
    return _unavailable() is None


def _at_exit() -> None:
    # The memory of transfers in flight must outlive them; errors have nobody left to go to but the log.
    try:
        synchronize()
    except MaruError as error:
        _logging.getLogger(__name__).error("a transfer failed before the interpreter's exit: %s", error)


_atexit.register(_at_exit)
