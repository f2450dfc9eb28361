"""The exceptions: one base, one class for each group of the library's error kinds."""

from __future__ import annotations


class MaruError(Exception):
    """Base of everything this package raises. ``kind`` is the stable snake_case name of what went wrong."""

    kind: str

    def __init__(self, message: str = "", kind: str = "internal") -> None:
        super().__init__(message)
        self.kind = kind

    def __reduce__(self) -> tuple[type[MaruError], tuple[str, str]]:
        return type(self), (str(self), self.kind)


class ArgumentValueError(MaruError, ValueError):
    """An argument has a value that is not allowed."""


class ArgumentTypeError(MaruError, TypeError):
    """An argument has the wrong type or dtype, or an object cannot be pickled."""


class NumberOverflowError(MaruError, OverflowError):
    """A number, or a size computed from the arguments, does not fit 63 (or 64) bits."""


class SlotRangeError(MaruError, IndexError):
    """A slot or block id is outside the cache."""


class LayoutMismatchError(MaruError, ValueError):
    """Tensor, slab and what was stated of them do not fit each other."""


class AmbiguousLayoutError(LayoutMismatchError):
    """A tensor can be read in several ways that move different bytes; the message says what decides."""


class DtypeMismatchError(MaruError, TypeError):
    """Cache and slab hold different element types."""


class UnsupportedFormatError(MaruError, ValueError):
    """An engine format that is not moved, or no format at all."""


class ConfigError(MaruError, ValueError):
    """The configuration is wrong; the message names the key."""


class NotAvailableError(MaruError, RuntimeError):
    """Something that was asked for does not exist on this machine."""


class StateError(MaruError, RuntimeError):
    """An object was used where it does not work, for example in a forked child."""


class TransferFailedError(MaruError, RuntimeError):
    """The system, the driver or the memory failed; ``kind`` says which."""


class InternalError(MaruError, RuntimeError):
    """A bug in this package."""


_CLASSES: dict[str, type[MaruError]] = {
    "ambiguous_layout": AmbiguousLayoutError,
    "config": ConfigError,
    "dtype_mismatch": DtypeMismatchError,
    "duplicate_slot": ArgumentValueError,
    "internal": InternalError,
    "invalid_argument": ArgumentValueError,
    "invalid_state": StateError,
    "layout_mismatch": LayoutMismatchError,
    "not_available": NotAvailableError,
    "overflow": NumberOverflowError,
    "slot_out_of_range": SlotRangeError,
    "unsupported_format": UnsupportedFormatError,
    "wrong_type": ArgumentTypeError,
}


def class_of_kind(kind: str) -> type[MaruError]:
    """The class of a kind; kinds without one of their own are failures at run time."""
    return _CLASSES.get(kind, TransferFailedError)
