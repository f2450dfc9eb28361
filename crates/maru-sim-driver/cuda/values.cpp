// Sets, and values that streams write and wait for.
#include "sim.h"

#include <type_traits>

namespace sim {
namespace {

Result set(const char *function, u64 address, u64 pitch, u64 value, u64 element, u64 width, u64 height,
           Handle handle) {
    Lock lock(state().mutex);
    StreamPtr stream;
    if (const Result code = stream_for_work(lock, handle, stream)) return code;
    const u64 row = width * element;
    if (row * height == 0) return kSuccess;
    if (address % element != 0) return kInvalidValue;
    if (height > 1 && pitch < row) return kInvalidValue;
    Span span;
    if (const Result code = locate(address, (height - 1) * pitch + row, span)) return code;
    if (!span.range || span.range->read_only()) return kInvalidValue;
    Record record{};
    record.kind = 5;
    record.bytes = row * height;
    record.rows = height;
    record.destination = address;
    record.stream = stream->handle;
    log(record, function);
    return enqueue(lock, stream, [=]() -> Result {
        if (!span.range->alive) return kIllegalAddress;
        for (u64 y = 0; y < height; ++y) {
            for (u64 x = 0; x < row; x += element) std::memcpy(span.bytes + y * pitch + x, &value, element);
        }
        return kSuccess;
    });
}

}  // namespace
}  // namespace sim

using namespace sim;

constexpr u32 kCopy = kInit | kCurrent;

#define SIM_SET(bits, type)                                                                                      \
    SIM_API cuMemsetD##bits##_v2(u64 to, type value, std::size_t count) {                                        \
        SIM_ENTER(kCopy | kUnsafe);                                                                              \
        return set(__func__, to, 0, value, (bits) / 8, count, 1, nullptr);                                       \
    }                                                                                                            \
    SIM_API cuMemsetD##bits##Async(u64 to, type value, std::size_t count, Handle stream) {                       \
        SIM_ENTER(kCopy);                                                                                        \
        return set(__func__, to, 0, value, (bits) / 8, count, 1, stream);                                        \
    }                                                                                                            \
    SIM_API cuMemsetD2D##bits##Async(u64 to, std::size_t pitch, type value, std::size_t width, std::size_t rows, \
                                     Handle stream) {                                                            \
        SIM_ENTER(kCopy);                                                                                        \
        return set(__func__, to, pitch, value, (bits) / 8, width, rows, stream);                                 \
    }
SIM_SET(8, std::uint8_t)
SIM_SET(16, std::uint16_t)
SIM_SET(32, std::uint32_t)

namespace {

template <class Word>
Result value_operation(Handle handle, u64 address, std::function<Result(volatile Word *)> run) {
    if (address % sizeof(Word) != 0) return kInvalidValue;
    Lock lock(state().mutex);
    StreamPtr stream;
    if (const Result code = stream_for_work(lock, handle, stream)) return code;
    Span span;
    if (const Result code = locate(address, sizeof(Word), span)) return code;
    if (!span.range) return kInvalidValue;
    return enqueue(lock, stream, [span, run]() -> Result {
        return span.range->alive ? run(reinterpret_cast<volatile Word *>(span.bytes)) : Result{kIllegalAddress};
    });
}

template <class Word>
Result wait_value(Handle stream, u64 address, Word value, u32 flags) {
    if ((flags & 0x3fffffffu) > 3) return kInvalidValue;
    return value_operation<Word>(stream, address, [=](volatile Word *at) -> Result {
        const double deadline = now_ms() + 20e3;
        for (;;) {
            std::atomic_thread_fence(std::memory_order_seq_cst);
            const Word found = *at;
            switch (flags & 3) {
                case 0: if (static_cast<std::make_signed_t<Word>>(found - value) >= 0) return kSuccess; break;
                case 1: if (found == value) return kSuccess; break;
                case 2: if ((found & value) != 0) return kSuccess; break;
                default: if (static_cast<Word>(~(found | value)) != 0) return kSuccess; break;
            }
            if (now_ms() > deadline) return kLaunchTimeout;
            std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
    });
}

template <class Word>
Result write_value(Handle stream, u64 address, Word value) {
    return value_operation<Word>(stream, address, [=](volatile Word *at) -> Result {
        std::atomic_thread_fence(std::memory_order_seq_cst);
        *at = value;
        return kSuccess;
    });
}

}  // namespace

SIM_API cuStreamWriteValue32_v2(Handle stream, u64 address, u32 value, u32) {
    SIM_ENTER(kCopy);
    return write_value<u32>(stream, address, value);
}
SIM_API cuStreamWriteValue64_v2(Handle stream, u64 address, u64 value, u32) {
    SIM_ENTER(kCopy);
    return write_value<u64>(stream, address, value);
}
SIM_API cuStreamWaitValue32_v2(Handle stream, u64 address, u32 value, u32 flags) {
    SIM_ENTER(kCopy);
    return wait_value<u32>(stream, address, value, flags);
}
SIM_API cuStreamWaitValue64_v2(Handle stream, u64 address, u64 value, u32 flags) {
    SIM_ENTER(kCopy);
    return wait_value<u64>(stream, address, value, flags);
}
