"""Which kernels a connector uses: ours, an installed LMCache's for comparison, or none."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from . import _native
from ._errors import ArgumentTypeError

logger = logging.getLogger("maru_kv_ops")

_KERNELS = ("multi_layer_kv_transfer", "single_layer_kv_transfer", "multi_layer_block_kv_transfer")
# Builds before the block call had the first two only.
_NEEDED_KERNELS = _KERNELS[:2]
_KERNEL_MODULES = ("lmcache.c_ops", "lmcache.cuda_ops")
_ENUM_MODULES = ("lmcache.c_ops", "lmcache.lmcache_native", "lmcache.cuda_ops")
# The enum was called GPUKVFormat before it was used for other engines.
_FORMAT_ENUMS = ("EngineKVFormat", "GPUKVFormat")


@dataclass(frozen=True)
class Ops:
    """The calls and enums a connector needs, from one source.

    ``multi_layer_block_kv_transfer`` and ``PageBufferShapeDesc`` are ``None`` where an old LMCache has none.
    """

    source: str
    """``maru`` or ``lmcache``."""
    multi_layer_kv_transfer: Callable[..., None]
    single_layer_kv_transfer: Callable[..., None]
    multi_layer_block_kv_transfer: Callable[..., None] | None
    EngineKVFormat: Any
    TransferDirection: Any
    PageBufferShapeDesc: Any
    enable_fused_load: bool = False

    def supports(self, engine_kv_format: str) -> bool:
        """Whether the source knows a format, by name."""
        return getattr(self.EngineKVFormat, engine_kv_format, None) is not None


class _Missing(Exception):
    """Something a source lacks; never leaves this module."""


def resolve_ops(
    config: Mapping[str, Any] | None = None,
    *,
    formats: Iterable[str] = (),
    foreign: Iterable[str] = (),
) -> Ops | None:
    """Chooses the kernels for a connector, or ``None`` if it has to use its own path.

    ``config`` is the connector's dict, such as vLLM's ``kv_connector_extra_config``. ``formats`` are names of
    ``EngineKVFormat`` members that the connector will ask for: a source that lacks one is not available.
    ``foreign`` are ``maru_`` keys that the connector reads itself.

    A configuration that is wrong is an error; whatever is wrong with an installed LMCache is not.
    """
    wanted = _names(formats)
    settings = _native.read_config(config, foreign)
    for warning in settings["warnings"]:
        logger.warning("%s", warning)
    ops, why = _choose(settings, wanted)
    if ops is None:
        if settings["enable_fused_load"]:
            logger.warning("maru_enable_fused_load needs kernels and is disabled: %s", why)
        logger.info("KV transfer kernels: none (%s)", why)
        return None
    logger.info("KV transfer kernels: %s (%s)", ops.source, why)
    return ops


def _names(formats: Iterable[str]) -> tuple[str, ...]:
    names: list[str] = []
    # One at a time: the first that is no name ends it, however many are claimed.
    for name in () if isinstance(formats, str) else formats:
        if not isinstance(name, str):
            raise ArgumentTypeError(f"formats holds {name!r}; names of EngineKVFormat members are needed", "wrong_type")
        names.append(name)
    return (formats,) if isinstance(formats, str) else tuple(names)


def _choose(settings: dict[str, Any], formats: tuple[str, ...]) -> tuple[Ops | None, str]:
    if settings["backend"] == "fallback":
        return None, "switched off by the configuration"
    try:
        if settings["kernel_source"] == "lmcache":
            return _lmcache(settings["enable_fused_load"], formats)
        return _maru(settings, formats)
    except _Missing as missing:
        return None, str(missing)


def _maru(settings: dict[str, Any], formats: tuple[str, ...]) -> tuple[Ops, str]:
    import maru_kv_ops as module

    device = settings["device"]
    if device == "host":
        raise _Missing("the configuration's device is the host")
    ordinal = int(device.removeprefix("cuda:")) if device.startswith("cuda:") else 0
    unavailable = _native.unavailable(ordinal)
    if unavailable is not None:
        raise _Missing(f"the native kernel cannot run: {unavailable[1]}")
    moved = {name for _number, name, moved in _native.engine_formats() if moved}
    for name in formats:
        if name not in moved:
            raise _Missing(f"format {name} is not supported")
    ops = Ops(
        source="maru",
        multi_layer_kv_transfer=module.multi_layer_kv_transfer,
        single_layer_kv_transfer=module.single_layer_kv_transfer,
        multi_layer_block_kv_transfer=module.multi_layer_block_kv_transfer,
        EngineKVFormat=module.EngineKVFormat,
        TransferDirection=module.TransferDirection,
        PageBufferShapeDesc=module.PageBufferShapeDesc,
        enable_fused_load=settings["enable_fused_load"],
    )
    return ops, f"the native kernel runs on cuda:{ordinal}"


def _lmcache(fused: bool, formats: tuple[str, ...]) -> tuple[Ops, str]:
    modules: dict[str, Any] = {}
    reasons: list[str] = []
    kernels = _first(_KERNEL_MODULES, modules, reasons, _has_kernels)
    if kernels is None:
        raise _Missing("LMCache has no usable kernels: " + "; ".join(reasons))
    enums = _first(_ENUM_MODULES, modules, reasons, _has_enums)
    if enums is None:
        raise _Missing(f"LMCache's kernels ({kernels}) come without reachable enums: " + "; ".join(reasons))
    kernel_module, enum_module = modules[kernels], modules[enums]
    format_enum = _format_enum(enum_module)
    for name in formats:
        if _get(format_enum, name) is None:
            raise _Missing(f"LMCache's {enums} does not know the format {name}")
    shape = next((s for m in modules.values() if (s := _get(m, "PageBufferShapeDesc")) is not None), None)
    ops = Ops(
        source="lmcache",
        multi_layer_kv_transfer=kernel_module.multi_layer_kv_transfer,
        single_layer_kv_transfer=kernel_module.single_layer_kv_transfer,
        multi_layer_block_kv_transfer=_get(kernel_module, "multi_layer_block_kv_transfer"),
        EngineKVFormat=format_enum,
        TransferDirection=enum_module.TransferDirection,
        PageBufferShapeDesc=shape,
        enable_fused_load=fused,
    )
    return ops, f"maru_kernel_source = lmcache; kernels of {kernels}, enums of {enums}"


def _first(
    names: tuple[str, ...],
    modules: dict[str, Any],
    reasons: list[str],
    fits: Callable[[Any], str | None],
) -> str | None:
    for name in names:
        if name not in modules:
            modules[name] = _load(name, reasons)
        if modules[name] is None:
            continue
        lacks = fits(modules[name])
        if lacks is None:
            return name
        reasons.append(f"{name} has no {lacks}")
    return None


def _load(name: str, reasons: list[str]) -> ModuleType | None:
    # A build for another torch or CUDA fails in whatever way its loader chooses.
    try:
        return importlib.import_module(name)
    except Exception as error:  # noqa: BLE001
        first = str(error).splitlines()[0] if str(error) else ""
        reasons.append(f"{name}: {type(error).__name__}: {first}")
    # c_ops may be an object that the package made, not a module that can be imported.
    package, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(package), attribute, None)
    except Exception:  # noqa: BLE001
        return None


def _get(source: Any, name: str) -> Any:
    # Objects with a __getattr__ of their own may raise anything.
    try:
        return getattr(source, name, None)
    except Exception:  # noqa: BLE001
        return None


def _format_enum(source: Any) -> Any:
    return next((enum for name in _FORMAT_ENUMS if (enum := _get(source, name)) is not None), None)


def _has_kernels(source: Any) -> str | None:
    return next((name for name in _NEEDED_KERNELS if not callable(_get(source, name))), None)


def _has_enums(source: Any) -> str | None:
    if _format_enum(source) is None:
        return "EngineKVFormat"
    direction = _get(source, "TransferDirection")
    if direction is None or _get(direction, "H2D") is None or _get(direction, "D2H") is None:
        return "TransferDirection"
    return None
