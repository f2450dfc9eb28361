"""Compiles CUDA C++ to PTX: nvrtc.py LIBNVRTC OUTPUT ARCH SOURCE [HEADER ...]"""
import ctypes
import os
import sys

library, output, arch, source, *headers = sys.argv[1:]
nvrtc = ctypes.CDLL(library)


def read(path):
    with open(path, "rb") as file:
        return file.read()


def text(size_of, get):
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    get(program, buffer)
    return buffer.value


def strings(items):
    return (ctypes.c_char_p * len(items))(*items)


# Bare names only: paths would end up in the output.
name = os.path.basename(source).encode()
names = strings([os.path.basename(header).encode() for header in headers])
program = ctypes.c_void_p()
created = nvrtc.nvrtcCreateProgram(
    ctypes.byref(program), read(source), name, len(headers), strings([read(h) for h in headers]), names
)
if created:
    sys.exit("nvrtcCreateProgram: error %d" % created)
options = [b"--gpu-architecture=" + arch.encode(), b"--std=c++17"]
compiled = nvrtc.nvrtcCompileProgram(program, len(options), strings(options))
if compiled:
    sys.exit(text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode())
with open(output, "wb") as file:
    file.write(text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX))
