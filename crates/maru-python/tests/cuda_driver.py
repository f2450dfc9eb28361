"""The CUDA driver through ctypes, and arrays in its memory: tensors of no library, for tests without torch."""

from __future__ import annotations

import ctypes
import os

import numpy as np
import pytest


def load():
    """The driver with a current context, or the reason why there is none."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        try:
            library = ctypes.CDLL("libcuda.so")
        except OSError as error:
            return None, f"no CUDA driver: {error}"
    count = ctypes.c_int()
    if library.cuInit(0) != 0 or library.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return None, "the CUDA driver sees no device"
    return Driver(library), ""


def required() -> Driver:
    driver, reason = load()
    if driver is None:
        for demand in ("MARU_REQUIRE_GPU", "MARU_SIMULATED"):
            if os.environ.get(demand) == "1":
                pytest.fail(f"{demand}=1, but {reason}", pytrace=False)
        pytest.skip(reason, allow_module_level=True)
    return driver


class Driver:
    def __init__(self, library):
        self.library = library
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuDeviceGet", ctypes.byref(device), 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.context = context
        self("cuCtxSetCurrent", context)

    def __call__(self, name, *args):
        code = getattr(self.library, name)(*args)
        assert code == 0, f"{name} failed with code {code}"

    def alloc(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value

    def free(self, address: int) -> None:
        self("cuMemFree_v2", ctypes.c_uint64(address))

    def upload(self, address: int, array: np.ndarray) -> None:
        array = np.ascontiguousarray(array)
        self("cuMemcpyHtoD_v2", ctypes.c_uint64(address), ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes))
        # Of pageable memory the copy may go on after the call, and streams that do not block would not wait for it.
        self("cuCtxSynchronize")

    def download(self, address: int, like: np.ndarray) -> np.ndarray:
        self("cuCtxSynchronize")
        out = np.empty_like(like)
        self("cuMemcpyDtoH_v2", ctypes.c_void_p(out.ctypes.data), ctypes.c_uint64(address), ctypes.c_size_t(out.nbytes))
        return out

    def stream(self) -> int:
        stream = ctypes.c_void_p()
        self("cuStreamCreate", ctypes.byref(stream), 1)
        return stream.value

    def event(self, stream: int) -> int:
        """Recorded on a stream."""
        event = ctypes.c_void_p()
        self("cuEventCreate", ctypes.byref(event), 2)
        self("cuEventRecord", event, ctypes.c_void_p(stream))
        return event.value

    def pinned(self, shape, dtype=np.uint16) -> np.ndarray:
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        pointer = ctypes.c_void_p()
        self("cuMemHostAlloc", ctypes.byref(pointer), ctypes.c_size_t(max(nbytes, 1)), 3)
        memory = (ctypes.c_uint8 * nbytes).from_address(pointer.value)
        return np.frombuffer(memory, dtype).reshape(shape)


class Gate:
    """Holds streams back until it is opened."""

    def __init__(self, driver: Driver):
        self.driver, self.word = driver, driver.pinned((1,), np.uint32)
        self.word[0] = 0

    def hold(self, stream: int) -> None:
        address = ctypes.c_uint64(self.word.ctypes.data)
        self.driver("cuStreamWaitValue32_v2", ctypes.c_void_p(stream), address, ctypes.c_uint32(1), 0)

    def open(self) -> None:
        self.word[0] = 1


NAMES = {"int64": "torch.int64", "uint16": "torch.uint16", "float16": "torch.float16", "uint8": "torch.uint8"}


class DeviceArray:
    """A device array with torch's methods."""

    def __init__(self, driver: Driver, array: np.ndarray):
        self.driver, self.like = driver, np.array(array)
        self.address = driver.alloc(max(array.nbytes, 16))
        driver.upload(self.address, array)
        self.shape, self.dtype, self.device = array.shape, NAMES[array.dtype.name], "cuda:0"
        self.strides = tuple(s // array.itemsize for s in np.ascontiguousarray(array).strides)

    def data_ptr(self) -> int:
        return self.address

    def stride(self):
        return self.strides

    def element_size(self) -> int:
        return self.like.itemsize

    def numpy(self) -> np.ndarray:
        return self.driver.download(self.address, self.like)

    def __del__(self):
        self.driver.free(self.address)


class CudaInterface:
    """The same through ``__cuda_array_interface__`` only."""

    def __init__(self, array: DeviceArray):
        self.array = array

    @property
    def __cuda_array_interface__(self):
        a = self.array
        return {"shape": a.shape, "typestr": a.like.dtype.str, "data": (a.address, False), "version": 3, "strides": None}
