// Copies of one, two and three dimensions, and batches of them.
#include "sim.h"

namespace sim {

namespace {

struct Shape {
    u64 width = 0, height = 1, depth = 1;

    u64 rows() const { return height * depth; }
    u64 bytes() const { return width * rows(); }
};

struct Side {
    u64 address = 0, pitch = 0, slice = 0;
    bool device = false;  // the caller says that this is a device address

    u64 extent(const Shape &shape) const {
        return (shape.depth - 1) * slice + (shape.height - 1) * pitch + shape.width;
    }
};

// When the source is read, for entries of a batch.
enum class Read { Usual, InStream, DuringCall };

struct Ends {
    Span to, from;
};

Result run_copy(const Ends &ends, const Side &to, const Side &from, const Shape &shape) {
    for (const Span *span : {&ends.to, &ends.from}) {
        if (span->range && !span->range->alive) return kIllegalAddress;
    }
    for (u64 z = 0; z < shape.depth; ++z) {
        for (u64 y = 0; y < shape.height; ++y) {
            u8 *const at = ends.to.bytes + z * to.slice + y * to.pitch;
            const u8 *const source = ends.from.bytes + z * from.slice + y * from.pitch;
            if (!copy_bytes(at, source, shape.width)) return kIllegalAddress;
        }
    }
    return kSuccess;
}

// Reads the source now; what is returned copies from there.
bool stage(Ends &ends, Side &from, const Shape &shape, std::shared_ptr<std::vector<u8>> &keep) {
    keep = std::make_shared<std::vector<u8>>(shape.bytes());
    Ends ahead{ends.to, ends.from};
    ahead.to = Span{};
    ahead.to.bytes = keep->data();
    const Side packed{0, shape.width, shape.width * shape.height, false};
    if (run_copy(ahead, packed, from, shape) != kSuccess) return false;
    ends.from = Span{};
    ends.from.bytes = keep->data();
    from = packed;
    return true;
}

Result check(const Side &to, const Side &from, const Shape &shape, Ends &ends) {
    constexpr u64 kMaxPitch = 0x7fffffff;
    for (const Side *side : {&to, &from}) {
        if (side->address == 0) return kInvalidValue;
        if (shape.height > 1 && (side->pitch < shape.width || side->pitch > kMaxPitch)) return kInvalidValue;
        if (shape.depth > 1 && side->slice < side->pitch * shape.height) return kInvalidValue;
    }
    if (const Result code = locate(to.address, to.extent(shape), ends.to)) return code;
    if (const Result code = locate(from.address, from.extent(shape), ends.from)) return code;
    if ((to.device && !ends.to.range) || (from.device && !ends.from.range)) return kInvalidValue;
    if (ends.to.range && ends.to.range->read_only()) return kInvalidValue;
    return kSuccess;
}

void log_copy(const char *function, const Ends &ends, const Side &to, const Side &from, const Shape &shape,
              const Stream &stream) {
    const bool to_device = ends.to.place == Place::Device, from_device = ends.from.place == Place::Device;
    Record record{};
    record.kind = from_device ? (to_device ? 2 : 1) : (to_device ? 0 : 3);
    record.pageable = (ends.from.place == Place::Pageable ? 1u : 0u) | (ends.to.place == Place::Pageable ? 2u : 0u);
    record.bytes = shape.bytes();
    record.rows = shape.rows();
    record.source = from.address;
    record.destination = to.address;
    record.stream = stream.handle;
    log(record, function);
}

Result copy(const char *function, const Side &to, Side from, const Shape &shape, Handle handle, bool async,
            Read read = Read::Usual) {
    Lock lock(state().mutex);
    StreamPtr stream;
    if (const Result code = stream_for_work(lock, handle, stream)) return code;
    if (shape.bytes() == 0) return kSuccess;
    Ends ends;
    if (const Result code = check(to, from, shape, ends)) return code;
    const bool from_pageable = ends.from.place == Place::Pageable, to_pageable = ends.to.place == Place::Pageable;
    if (capturing(*stream) && !async) {
        invalidate(*stream->capture);
        return kCaptureUnsupported;
    }
    const bool lazy = capturing(*stream) || read == Read::InStream || (async && setting(Setting::PageableLazy) != 0);
    const bool both_device = ends.to.place == Place::Device && ends.from.place == Place::Device;
    log_copy(function, ends, to, from, shape, *stream);
    std::shared_ptr<std::vector<u8>> keep;
    bool staged = false;
    if (read == Read::DuringCall || (from_pageable && !to_pageable && !lazy)) {
        if (!async) {
            // What is queued before is waited for before the host memory is read.
            Done before;
            if (const Result code = enqueue(lock, stream, nullptr, {}, &before)) return code;
            wait(lock, before);
        }
        if (!stage(ends, from, shape, keep)) return kInvalidValue;
        staged = true;
    }
    Done done;
    const Side source = from;
    const auto run = [ends, to, source, shape, keep] { return run_copy(ends, to, source, shape); };
    if (const Result code = enqueue(lock, stream, run, {}, &done)) return code;
    // Pageable destinations are complete when the call returns; of synchronous copies those are not that
    // the host cannot look at, nor uploads of pageable memory.
    const bool waits = async ? to_pageable && !lazy : !both_device && !staged;
    if (!waits) return kSuccess;
    const ContextPtr context = stream->context;
    wait(lock, done);
    return context->sticky;
}

Side host(const void *address) { return Side{reinterpret_cast<u64>(address), 0, 0, false}; }
Side device(u64 address) { return Side{address, 0, 0, true}; }
Side any(u64 address) { return Side{address, 0, 0, false}; }
Shape flat(u64 bytes) { return Shape{bytes, 1, 1}; }

}  // namespace
}  // namespace sim

using namespace sim;

constexpr u32 kCopy = kInit | kCurrent;

SIM_API cuMemcpyHtoD_v2(u64 to, const void *from, std::size_t bytes) {
    SIM_ENTER(kCopy | kUnsafe);
    return copy(__func__, device(to), host(from), flat(bytes), nullptr, false);
}
SIM_API cuMemcpyDtoH_v2(void *to, u64 from, std::size_t bytes) {
    SIM_ENTER(kCopy | kUnsafe);
    return copy(__func__, host(to), device(from), flat(bytes), nullptr, false);
}
SIM_API cuMemcpyDtoD_v2(u64 to, u64 from, std::size_t bytes) {
    SIM_ENTER(kCopy | kUnsafe);
    return copy(__func__, device(to), device(from), flat(bytes), nullptr, false);
}
SIM_API cuMemcpy(u64 to, u64 from, std::size_t bytes) {
    SIM_ENTER(kCopy | kUnsafe);
    return copy(__func__, any(to), any(from), flat(bytes), nullptr, false);
}
SIM_API cuMemcpyHtoDAsync_v2(u64 to, const void *from, std::size_t bytes, Handle stream) {
    SIM_ENTER(kCopy);
    return copy(__func__, device(to), host(from), flat(bytes), stream, true);
}
SIM_API cuMemcpyDtoHAsync_v2(void *to, u64 from, std::size_t bytes, Handle stream) {
    SIM_ENTER(kCopy);
    return copy(__func__, host(to), device(from), flat(bytes), stream, true);
}
SIM_API cuMemcpyDtoDAsync_v2(u64 to, u64 from, std::size_t bytes, Handle stream) {
    SIM_ENTER(kCopy);
    return copy(__func__, device(to), device(from), flat(bytes), stream, true);
}
SIM_API cuMemcpyAsync(u64 to, u64 from, std::size_t bytes, Handle stream) {
    SIM_ENTER(kCopy);
    return copy(__func__, any(to), any(from), flat(bytes), stream, true);
}
SIM_API cuMemcpyPeerAsync(u64 to, Handle, u64 from, Handle, std::size_t bytes, Handle stream) {
    SIM_ENTER(kCopy);
    return copy(__func__, device(to), device(from), flat(bytes), stream, true);
}

namespace {

struct Memcpy2D {
    std::size_t src_x, src_y;
    u32 src_type;
    const void *src_host;
    u64 src_device;
    Handle src_array;
    std::size_t src_pitch;
    std::size_t dst_x, dst_y;
    u32 dst_type;
    void *dst_host;
    u64 dst_device;
    Handle dst_array;
    std::size_t dst_pitch;
    std::size_t width, height;
};
static_assert(sizeof(Memcpy2D) == 128, "CUDA_MEMCPY2D");

struct Memcpy3D {
    std::size_t src_x, src_y, src_z, src_lod;
    u32 src_type;
    const void *src_host;
    u64 src_device;
    Handle src_array, reserved0;
    std::size_t src_pitch, src_height;
    std::size_t dst_x, dst_y, dst_z, dst_lod;
    u32 dst_type;
    void *dst_host;
    u64 dst_device;
    Handle dst_array, reserved1;
    std::size_t dst_pitch, dst_height;
    std::size_t width, height, depth;
};
static_assert(sizeof(Memcpy3D) == 200, "CUDA_MEMCPY3D");

struct Location {
    u32 type;
    i32 id;
};
struct BatchAttributes {
    u32 order;
    Location source, destination;
    u32 flags;
};
static_assert(sizeof(BatchAttributes) == 24, "CUmemcpyAttributes");

Result side(Side &out, u32 type, const void *host_address, u64 device_address, u64 pitch, u64 slice, u64 x, u64 y,
            u64 z) {
    if (type == 3) return kNotSupported;
    if (type < 1 || type > 4) return kInvalidValue;
    out.device = type == 2;
    const u64 first = type == 1 ? reinterpret_cast<u64>(host_address) : device_address;
    if (first == 0) return kInvalidValue;
    out.address = first + z * slice + y * pitch + x;
    out.pitch = pitch;
    out.slice = slice;
    return kSuccess;
}

Result copy_2d(const char *function, const Memcpy2D *c, Handle stream, bool async) {
    if (!c) return kInvalidValue;
    Side to, from;
    if (const Result code = side(to, c->dst_type, c->dst_host, c->dst_device, c->dst_pitch, 0, c->dst_x, c->dst_y, 0)) return code;
    if (const Result code = side(from, c->src_type, c->src_host, c->src_device, c->src_pitch, 0, c->src_x, c->src_y, 0)) return code;
    return copy(function, to, from, Shape{c->width, c->height, 1}, stream, async);
}

Result copy_3d(const char *function, const Memcpy3D *c, Handle stream, bool async) {
    if (!c || c->src_lod != 0 || c->dst_lod != 0) return kInvalidValue;
    Side to, from;
    if (const Result code = side(to, c->dst_type, c->dst_host, c->dst_device, c->dst_pitch, c->dst_pitch * c->dst_height, c->dst_x,
                                 c->dst_y, c->dst_z)) {
        return code;
    }
    if (const Result code = side(from, c->src_type, c->src_host, c->src_device, c->src_pitch, c->src_pitch * c->src_height, c->src_x,
                                 c->src_y, c->src_z)) {
        return code;
    }
    return copy(function, to, from, Shape{c->width, c->height, c->depth}, stream, async);
}

Result batch(const char *function, u64 *to, u64 *from, std::size_t *sizes, std::size_t count,
             const BatchAttributes *attributes, const std::size_t *first_of, std::size_t kinds, std::size_t *failed,
             Handle stream) {
    // More than this hangs or crashes some drivers.
    constexpr std::size_t kMost = 50'000;
    std::size_t none = 0;
    std::size_t &fail = failed ? *failed : none;
    fail = SIZE_MAX;
    if (!to || !from || !sizes || count == 0 || count > kMost) return kInvalidValue;
    if (!attributes || !first_of || kinds == 0 || kinds > count || first_of[0] != 0) return kInvalidValue;
    // The legacy default stream is refused.
    if (reinterpret_cast<u64>(stream) <= 1) return kInvalidValue;
    for (std::size_t k = 0; k < kinds; ++k) {
        if (attributes[k].order < 1 || attributes[k].order > 3) return kInvalidValue;
        if (k > 0 && (first_of[k] <= first_of[k - 1] || first_of[k] >= count)) return kInvalidValue;
    }
    {
        Lock lock(state().mutex);
        StreamPtr found;
        if (const Result code = stream_for_work(lock, stream, found)) return code;
        if (capturing(*found)) {
            invalidate(*found->capture);
            return kCaptureUnsupported;
        }
    }
    // All entries are looked at before the first is queued.
    for (std::size_t i = 0; i < count; ++i) {
        Ends ends;
        if (sizes[i] == 0 || check(any(to[i]), any(from[i]), flat(sizes[i]), ends) != kSuccess) {
            fail = i;
            return kInvalidValue;
        }
    }
    std::size_t kind = 0;
    const Result later = take_later_fault();
    for (std::size_t i = 0; i < count; ++i) {
        if (kind + 1 < kinds && first_of[kind + 1] == i) kind += 1;
        // A source that may be read at any time is read at the worst one: before the work queued ahead of it.
        const Read read = attributes[kind].order == 1 ? Read::InStream : Read::DuringCall;
        if (const Result code = copy(function, any(to[i]), any(from[i]), flat(sizes[i]), stream, true, read)) {
            fail = i;
            return code;
        }
    }
    if (later == kSuccess) return kSuccess;
    Lock lock(state().mutex);
    return enqueue(lock, find_stream(stream), [later] { return later; });
}

}  // namespace

SIM_API cuMemcpy2D_v2(const Memcpy2D *c) {
    SIM_ENTER(kCopy | kUnsafe);
    return copy_2d(__func__, c, nullptr, false);
}
SIM_API cuMemcpy2DUnaligned_v2(const Memcpy2D *c) {
    SIM_ENTER(kCopy | kUnsafe);
    return copy_2d(__func__, c, nullptr, false);
}
SIM_API cuMemcpy2DAsync_v2(const Memcpy2D *c, Handle stream) {
    SIM_ENTER(kCopy);
    return copy_2d(__func__, c, stream, true);
}
SIM_API cuMemcpy3D_v2(const Memcpy3D *c) {
    SIM_ENTER(kCopy | kUnsafe);
    return copy_3d(__func__, c, nullptr, false);
}
SIM_API cuMemcpy3DAsync_v2(const Memcpy3D *c, Handle stream) {
    SIM_ENTER(kCopy);
    return copy_3d(__func__, c, stream, true);
}

SIM_API cuMemcpyBatchAsync(u64 *to, u64 *from, std::size_t *sizes, std::size_t count, BatchAttributes *attributes,
                           std::size_t *first_of, std::size_t kinds, std::size_t *failed, Handle stream) {
    SIM_ENTER(kCopy);
    return batch(__func__, to, from, sizes, count, attributes, first_of, kinds, failed, stream);
}
SIM_API cuMemcpyBatchAsync_v2(u64 *to, u64 *from, std::size_t *sizes, std::size_t count, BatchAttributes *attributes,
                              std::size_t *first_of, std::size_t kinds, Handle stream) {
    SIM_ENTER(kCopy);
    return batch(__func__, to, from, sizes, count, attributes, first_of, kinds, nullptr, stream);
}
