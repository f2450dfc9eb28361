// Names of the driver's errors.
#include "sim.h"

namespace {

struct Name {
    Result code;
    const char *name, *text;
};

#define SIM_ERROR(code, name, text) {code, "CUDA_" name, text}
constexpr Name kNames[] = {
    SIM_ERROR(0, "SUCCESS", "no error"),
    SIM_ERROR(1, "ERROR_INVALID_VALUE", "invalid argument"),
    SIM_ERROR(2, "ERROR_OUT_OF_MEMORY", "out of memory"),
    SIM_ERROR(3, "ERROR_NOT_INITIALIZED", "initialization error"),
    SIM_ERROR(4, "ERROR_DEINITIALIZED", "driver shutting down"),
    SIM_ERROR(46, "ERROR_DEVICE_UNAVAILABLE", "device busy or unavailable"),
    SIM_ERROR(100, "ERROR_NO_DEVICE", "no CUDA-capable device is detected"),
    SIM_ERROR(101, "ERROR_INVALID_DEVICE", "invalid device ordinal"),
    SIM_ERROR(200, "ERROR_INVALID_IMAGE", "device kernel image is invalid"),
    SIM_ERROR(201, "ERROR_INVALID_CONTEXT", "invalid device context"),
    SIM_ERROR(205, "ERROR_MAP_FAILED", "mapping of buffer object failed"),
    SIM_ERROR(209, "ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"),
    SIM_ERROR(214, "ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"),
    SIM_ERROR(218, "ERROR_INVALID_PTX", "a PTX JIT compilation failed"),
    SIM_ERROR(221, "ERROR_JIT_COMPILER_NOT_FOUND", "PTX JIT compiler library not found"),
    SIM_ERROR(222, "ERROR_UNSUPPORTED_PTX_VERSION", "the provided PTX was compiled with an unsupported toolchain."),
    SIM_ERROR(304, "ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"),
    SIM_ERROR(400, "ERROR_INVALID_HANDLE", "invalid resource handle"),
    SIM_ERROR(401, "ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"),
    SIM_ERROR(500, "ERROR_NOT_FOUND", "named symbol not found"),
    SIM_ERROR(600, "ERROR_NOT_READY", "device not ready"),
    SIM_ERROR(700, "ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"),
    SIM_ERROR(701, "ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"),
    SIM_ERROR(702, "ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"),
    SIM_ERROR(704, "ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"),
    SIM_ERROR(709, "ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"),
    SIM_ERROR(710, "ERROR_ASSERT", "device-side assert triggered"),
    SIM_ERROR(712, "ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped"),
    SIM_ERROR(713, "ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"),
    SIM_ERROR(715, "ERROR_ILLEGAL_INSTRUCTION", "an illegal instruction was encountered"),
    SIM_ERROR(716, "ERROR_MISALIGNED_ADDRESS", "misaligned address"),
    SIM_ERROR(719, "ERROR_LAUNCH_FAILED", "unspecified launch failure"),
    SIM_ERROR(800, "ERROR_NOT_PERMITTED", "operation not permitted"),
    SIM_ERROR(801, "ERROR_NOT_SUPPORTED", "operation not supported"),
    SIM_ERROR(900, "ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"),
    SIM_ERROR(901, "ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"),
    SIM_ERROR(902, "ERROR_STREAM_CAPTURE_MERGE", "operation would result in a merge of separate capture sequences"),
    SIM_ERROR(903, "ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not ended in the same stream as it began"),
    SIM_ERROR(904, "ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"),
    SIM_ERROR(905, "ERROR_STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work in another stream"),
    SIM_ERROR(906, "ERROR_STREAM_CAPTURE_IMPLICIT", "operation would make the legacy stream depend on a capturing blocking stream"),
    SIM_ERROR(907, "ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream"),
    SIM_ERROR(908, "ERROR_STREAM_CAPTURE_WRONG_THREAD", "attempt to terminate a thread-local capture sequence from another thread"),
    SIM_ERROR(999, "ERROR_UNKNOWN", "unknown error"),
};

Result look_up(Result code, const char **out, bool name) {
    if (!out) return sim::kInvalidValue;
    *out = nullptr;
    for (const Name &known : kNames) {
        if (known.code != code) continue;
        *out = name ? known.name : known.text;
        return sim::kSuccess;
    }
    return sim::kInvalidValue;
}

}  // namespace

SIM_API cuGetErrorName(Result code, const char **out) {
    SIM_ENTER(sim::kNothing);
    return look_up(code, out, true);
}
SIM_API cuGetErrorString(Result code, const char **out) {
    SIM_ENTER(sim::kNothing);
    return look_up(code, out, false);
}
