from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from os import PathLike
from typing import Any, Protocol, final

from .resolve import Ops as Ops
from .resolve import resolve_ops as resolve_ops

__version__: str
__all__: list[str]

class _HasArrayInterface(Protocol):
    @property
    def __array_interface__(self) -> Mapping[str, Any]: ...

class _HasCudaArrayInterface(Protocol):
    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]: ...

class _HasDlpack(Protocol):
    def __dlpack__(self) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class _HasPointer(Protocol):
    def data_ptr(self) -> int: ...

_Array = _HasArrayInterface | _HasCudaArrayInterface | _HasDlpack | _HasPointer
"""A tensor of torch or NumPy, or anything with their methods, an array interface or DLPack."""
_Slots = _Array | Sequence[int]
"""int64, one axis."""
_Layers = int | tuple[int, int] | range
"""A layer, ``(first, count)``, or a range."""
_Stream = int | Any
"""A raw handle, or a stream object of torch, CuPy, Numba or the CUDA bindings."""
_Event = int | Any
"""The same for a recorded event."""

class TransferDirection(IntEnum):
    H2D = 0
    D2H = 1

class EngineKVFormat(IntEnum):
    NB_NL_TWO_BS_NH_HS = 0
    NL_X_TWO_NB_BS_NH_HS = 1
    NL_X_NB_TWO_BS_NH_HS = 2
    NL_X_NB_BS_HS = 3
    TWO_X_NL_X_NBBS_NH_HS = 4
    NL_X_NBBS_ONE_HS = 5
    NL_X_TWO_NB_NH_BS_HS = 6
    NL_X_NB_TWO_NH_BS_HS = 7
    NB_NL_TWO_NH_BS_HS = 8
    TWO_X_NL_X_NB_BS_NH_HS = 9
    NL_X_NB_NH_BS_TWO_HS = 10
    NL_X_NB_BS_NH_TWO_HS = 11
    NL_X_NB_NH_BS_CS = 12
    NL_X_NB_BS_NH_CS = 13
    NL_X_NB_BSV_BSS = 14
    NL_X_TWO_NB_NH_ONE_BS_HS = 15
    NL_X_TWO_X_NB_BS_NH_HS = 16
    NL_X_NP_X_NB_BS_ONE_HS = 17
    NL_X_NB_BS_NH_HS = 18

class MaruError(Exception):
    kind: str
    def __init__(self, message: str = "", kind: str = "internal") -> None: ...

class ArgumentValueError(MaruError, ValueError): ...
class ArgumentTypeError(MaruError, TypeError): ...
class NumberOverflowError(MaruError, OverflowError): ...
class SlotRangeError(MaruError, IndexError): ...
class LayoutMismatchError(MaruError, ValueError): ...
class AmbiguousLayoutError(LayoutMismatchError): ...
class DtypeMismatchError(MaruError, TypeError): ...
class UnsupportedFormatError(MaruError, ValueError): ...
class ConfigError(MaruError, ValueError): ...
class NotAvailableError(MaruError, RuntimeError): ...
class StateError(MaruError, RuntimeError): ...
class TransferFailedError(MaruError, RuntimeError): ...
class InternalError(MaruError, RuntimeError): ...

def is_available() -> bool: ...
def import_error() -> Exception | None: ...
def synchronize() -> None: ...
def slots_from_blocks(blocks: _Slots, block_size: int, start: int, stop: int) -> list[int]: ...
def multi_layer_kv_transfer(
    key_value: _Array,
    key_value_ptrs: _Slots,
    slot_mapping: _Slots,
    paged_memory_device: Any,
    page_buffer_size: int,
    direction: TransferDirection | int,
    engine_kv_format: EngineKVFormat | int,
    block_size: int = 0,
    head_size: int = 0,
    skip_prefix_n_tokens: int = 0,
    block_stride_elems: int = 0,
) -> None: ...
def single_layer_kv_transfer(
    lmc_key_value_cache: _Array,
    vllm_key_value_cache: _Array,
    slot_mapping: _Slots,
    direction: TransferDirection | int,
    engine_kv_format: EngineKVFormat | int,
    token_major: bool = False,
) -> None: ...
def multi_layer_block_kv_transfer(
    paged_buffer_ptrs_tensor: _Slots,
    lmcache_objects_ptrs: _Slots,
    block_ids: _Slots,
    device: Any,
    direction: TransferDirection | int,
    shape_desc: PageBufferShapeDesc,
    lmcache_chunk_size: int,
    engine_kv_format: EngineKVFormat | int,
    skip_prefix_n_blocks: int = 0,
) -> None: ...
@final
class PageBufferShapeDesc:
    kv_size: int
    nl: int
    nb: int
    bs: int
    nh: int
    hs: int
    element_size: int
    block_stride_elems: int
    def __init__(
        self,
        kv_size: int = 0,
        nl: int = 0,
        nb: int = 0,
        bs: int = 0,
        nh: int = 0,
        hs: int = 0,
        element_size: int = 0,
        block_stride_elems: int = 0,
    ) -> None: ...

@final
class PagedCache:
    def __init__(
        self,
        tensors: _Array | Sequence[_Array] | Mapping[str, _Array],
        *,
        v_tensors: Sequence[_Array] | None = None,
        block_size: int | None = None,
        num_kv_heads: int | None = None,
        head_size: int | None = None,
        axes: Sequence[str] | str | None = None,
        mla: bool = False,
        num_layers: int | None = None,
        num_blocks: int | None = None,
        backend_head_size: int | None = None,
        dtype: Any = None,
    ) -> None: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def kv_planes(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_size(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def axes(self) -> list[str]: ...
    @property
    def token_bytes(self) -> int: ...
    @property
    def tensors(self) -> tuple[Any, ...]: ...
    @property
    def byte_strides(self) -> dict[str, int | None]: ...
    def slab_bytes(self, tokens: int) -> int: ...
    def slab_shape(self, tokens: int) -> tuple[int, int, int, int]: ...
    def fingerprint(self, tokens: int) -> int: ...

@final
class Region:
    @staticmethod
    def open(
        path: str | PathLike[str],
        *,
        offset: int = 0,
        size: int = 0,
        create: bool = False,
        read_only: bool = False,
        prefault: bool = True,
    ) -> Region: ...
    @staticmethod
    def anonymous(size: int) -> Region: ...
    def slab(self, offset: int, nbytes: int) -> Slab: ...
    def register(self, device: Any = 0, *, required: bool = True) -> bool: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def is_registered(self) -> bool: ...
    @property
    def read_only(self) -> bool: ...
    @property
    def path(self) -> str | None: ...
    def __len__(self) -> int: ...

@final
class Slab:
    @property
    def nbytes(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def read_only(self) -> bool: ...
    @property
    def is_registered(self) -> bool: ...
    @property
    def __array_interface__(self) -> dict[str, Any]: ...
    def data_ptr(self) -> int: ...
    def span(self, offset: int, nbytes: int) -> Slab: ...
    def read(self, offset: int = 0, nbytes: int | None = None) -> bytes: ...
    def write(self, data: bytes | bytearray, offset: int = 0) -> None: ...
    def checksum(self) -> int: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __dlpack__(self, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

@final
class Transfer:
    def wait(self) -> None: ...
    def wait_layer(self, layer: int) -> None: ...
    def done(self) -> bool: ...
    def layer_done(self, layer: int) -> bool: ...
    def order_before(self, stream: _Stream | None = None, layer: int | None = None) -> None: ...
    def order_before_layer(self, layer: int, stream: _Stream | None = None) -> None: ...
    @property
    def backend(self) -> str: ...
    @property
    def strategy(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def captured(self) -> bool: ...

@final
class Engine:
    def __init__(
        self,
        config: Mapping[str, Any] | str | PathLike[str] | None = None,
        *,
        foreign: Sequence[str] = (),
    ) -> None: ...
    def store(
        self,
        cache: PagedCache,
        slots: _Slots,
        slab: Slab | _Array,
        *,
        skip_tokens: int = 0,
        partial: bool = False,
        layers: _Layers | None = None,
        by_layer: bool = False,
        after: Iterable[_Event | None] | None = None,
        slab_tokens: int | None = None,
        fingerprint: int | None = None,
        raw: bool = False,
        stream: _Stream | None = None,
    ) -> Transfer: ...
    def load(
        self,
        cache: PagedCache,
        slots: _Slots,
        slab: Slab | _Array,
        *,
        skip_tokens: int = 0,
        partial: bool = False,
        layers: _Layers | None = None,
        by_layer: bool = False,
        after: Iterable[_Event | None] | None = None,
        slab_tokens: int | None = None,
        fingerprint: int | None = None,
        raw: bool = False,
        stream: _Stream | None = None,
    ) -> Transfer: ...
    def store_many(
        self,
        cache: PagedCache,
        items: Iterable[tuple[_Slots, Slab | _Array]],
        *,
        partial: bool = False,
        layers: _Layers | None = None,
        by_layer: bool = False,
        after: Iterable[_Event | None] | None = None,
        slab_tokens: int | None = None,
        fingerprint: int | None = None,
        raw: bool = False,
        stream: _Stream | None = None,
    ) -> Transfer: ...
    def load_many(
        self,
        cache: PagedCache,
        items: Iterable[tuple[_Slots, Slab | _Array]],
        *,
        partial: bool = False,
        layers: _Layers | None = None,
        by_layer: bool = False,
        after: Iterable[_Event | None] | None = None,
        slab_tokens: int | None = None,
        fingerprint: int | None = None,
        raw: bool = False,
        stream: _Stream | None = None,
    ) -> Transfer: ...
    def register(self, cache: PagedCache) -> None: ...
    def create_pool(
        self,
        slab_bytes: int,
        path: str | PathLike[str] | None = None,
        *,
        size: int | None = None,
        offset: int | None = None,
        replace: bool = False,
    ) -> Pool: ...
    def open_pool(
        self,
        path: str | PathLike[str] | None = None,
        *,
        writable: bool = False,
        size: int | None = None,
        offset: int | None = None,
    ) -> Pool: ...
    @property
    def backend(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def chunk_tokens(self) -> int: ...
    @property
    def config(self) -> str: ...

@final
class Pool:
    def alloc(self) -> Slab | None: ...
    def publish(self, slab: Slab, key: bytes, *, fingerprint: int, nbytes: int | None = None) -> None: ...
    def lookup(self, key: bytes) -> tuple[Slab, int] | None: ...
    def withdraw(self, key: bytes) -> bool: ...
    def stats(self) -> dict[str, int]: ...
    @property
    def slab_bytes(self) -> int: ...
    @property
    def writable(self) -> bool: ...
    @property
    def is_registered(self) -> bool: ...

@final
class ChunkKeys:
    def __init__(self, namespace: str, fingerprint: int) -> None: ...
    def chunk(self, tokens: Sequence[int]) -> bytes: ...
