// Allocations, host registrations, and where an address leads.
#include "sim.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <sys/mman.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

namespace sim {

namespace {

constexpr u64 kPage = 4096;

u64 pages(u64 bytes) { return (bytes + kPage - 1) / kPage * kPage; }

RangePtr find_in(const std::map<u64, RangePtr> &map, u64 address, bool by_host) {
    auto after = map.upper_bound(address);
    if (after == map.begin()) return nullptr;
    const RangePtr &range = std::prev(after)->second;
    const u64 first = by_host ? range->host : range->device;
    return address - first < range->size ? range : nullptr;
}

// Addresses that nobody can touch, with a page of them on either side.
u64 reserve(u64 bytes) {
    void *const at = mmap(nullptr, pages(bytes) + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? 0 : reinterpret_cast<u64>(at) + kPage;
}

void unreserve(u64 address, u64 bytes) {
    const u64 within = address % kPage;
    munmap(reinterpret_cast<void *>(address - within - kPage), pages(bytes + within) + 2 * kPage);
}

u8 *allocate(u64 bytes) {
    void *const at = mmap(nullptr, pages(bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return nullptr;
    // Whoever relies on zeroes is found out; of large memory only what is filled at once is really there.
    std::memset(at, 0xa5, std::min<u64>(bytes, u64{64} << 20));
    return static_cast<u8 *>(at);
}

void insert(const RangePtr &range) {
    State &s = state();
    const std::unique_lock<std::shared_mutex> lock(s.ranges_mutex);
    range->id = s.handle();
    s.by_device[range->device] = range;
    if (range->host != 0) s.by_host[range->host] = range;
}

struct Mapped {
    bool all = false;
    bool writable = true;
    bool on_disk = false;
};

bool is_disk(const std::string &path) {
    struct statfs info {};
    if (statfs(path.c_str(), &info) != 0) return false;
    const auto type = static_cast<u64>(info.f_type);
    // tmpfs, ramfs, hugetlbfs, devtmpfs and the like stay in memory.
    return type == 0xef53 || type == 0x58465342 || type == 0x9123683e || type == 0x794c7630 || type == 0xf2f52010;
}

Mapped mapped(u64 address, u64 size) {
    std::ifstream maps("/proc/self/maps");
    Mapped found;
    u64 at = address;
    for (std::string line; at < address + size && std::getline(maps, line);) {
        unsigned long first = 0, last = 0;
        char rights[5] = {};
        int path = 0;
        if (std::sscanf(line.c_str(), "%lx-%lx %4s %*s %*s %*s %n", &first, &last, rights, &path) < 3) continue;
        if (last <= at) continue;
        if (first > at || rights[0] != 'r') return found;
        found.writable = found.writable && rights[1] == 'w';
        if (rights[3] == 's' && path > 0 && line[static_cast<std::size_t>(path)] == '/') {
            found.on_disk = found.on_disk || is_disk(line.substr(static_cast<std::size_t>(path)));
        }
        at = last;
    }
    found.all = at >= address + size;
    return found;
}

Result host_alloc(void **host, std::size_t bytes, u32 flags) {
    if (!host || flags > 7) return kInvalidValue;
    if (bytes == 0) return kInvalidValue;
    auto range = std::make_shared<Range>();
    range->kind = Kind::HostAlloc;
    range->bytes = allocate(bytes);
    if (!range->bytes) return kOutOfMemory;
    range->host = reinterpret_cast<u64>(range->bytes);
    range->device = setting(Setting::Shift) != 0 ? reserve(bytes) : range->host;
    range->size = bytes;
    range->flags = flags | 3;
    const Lock lock(state().mutex);
    range->context = current();
    insert(range);
    *host = range->bytes;
    return kSuccess;
}

}  // namespace

RangePtr range_at(u64 address) {
    State &s = state();
    const std::shared_lock<std::shared_mutex> lock(s.ranges_mutex);
    return find_in(s.by_device, address, false);
}

RangePtr host_range_at(u64 address) {
    State &s = state();
    const std::shared_lock<std::shared_mutex> lock(s.ranges_mutex);
    return find_in(s.by_host, address, true);
}

void release_range(const RangePtr &range) {
    State &s = state();
    {
        const std::unique_lock<std::shared_mutex> lock(s.ranges_mutex);
        range->alive = false;
        s.by_device.erase(range->device);
        if (range->host != 0) s.by_host.erase(range->host);
    }
    if (range->kind == Kind::Device) {
        range->context->bytes -= range->size;
        unreserve(range->device, range->size);
    } else if (range->device != range->host) {
        unreserve(range->device, range->size);
    }
    if (range->kind != Kind::Registered) munmap(range->bytes, pages(range->size));
}

Result locate(u64 address, u64 size, Span &span) {
    span = Span{};
    span.address = address;
    RangePtr range = range_at(address);
    const bool by_device = range != nullptr;
    if (!range) range = host_range_at(address);
    if (!range) {
        // Pageable memory; it must not run into memory of the driver.
        State &s = state();
        const std::shared_lock<std::shared_mutex> lock(s.ranges_mutex);
        const auto ahead = s.by_host.lower_bound(address);
        if (ahead != s.by_host.end() && ahead->first - address < size) return kInvalidValue;
        const auto device = s.by_device.lower_bound(address);
        if (device != s.by_device.end() && device->first - address < size) return kInvalidValue;
        span.bytes = reinterpret_cast<u8 *>(address);
        return kSuccess;
    }
    const u64 offset = address - (by_device ? range->device : range->host);
    if (size > range->size - offset) return kInvalidValue;
    span.place = range->kind == Kind::Device ? Place::Device : Place::Host;
    span.bytes = range->bytes + offset;
    span.range = std::move(range);
    return kSuccess;
}

bool copy_bytes(u8 *to, const u8 *from, std::size_t bytes) {
    static std::atomic<bool> usable{true};
    while (bytes > 0 && usable) {
        const std::size_t part = std::min<std::size_t>(bytes, 1u << 30);
        const iovec local{to, part}, remote{const_cast<u8 *>(from), part};
        const ssize_t done = process_vm_readv(getpid(), &local, 1, &remote, 1, 0);
        if (done < 0) {
            if (errno == EFAULT) return false;
            usable = false;  // not allowed here; then without the safety net
            break;
        }
        if (done == 0) return false;
        to += done;
        from += done;
        bytes -= static_cast<std::size_t>(done);
    }
    if (bytes > 0) std::memcpy(to, from, bytes);
    return true;
}

}  // namespace sim

using namespace sim;

static Result device_alloc(u64 *address, std::size_t bytes) {
    if (!address || bytes == 0) return kInvalidValue;
    const ContextPtr context = current();
    State &s = state();
    const Lock lock(s.mutex);
    u64 used = 0;
    for (const auto &[handle, other] : s.contexts.live) {
        if (other->device == context->device) used += other->bytes;
    }
    if (bytes > setting(Setting::MemoryBytes) || used > setting(Setting::MemoryBytes) - bytes) return kOutOfMemory;
    auto range = std::make_shared<Range>();
    range->bytes = allocate(bytes);
    range->device = reserve(bytes);
    if (!range->bytes || range->device == 0) return kOutOfMemory;
    range->size = bytes;
    range->context = context;
    context->bytes += bytes;
    insert(range);
    *address = range->device;
    return kSuccess;
}

// Work that might use the memory is waited for, as the driver does.
static Result device_free(u64 address) {
    if (address == 0) return kSuccess;
    Lock lock(state().mutex);
    const RangePtr range = range_at(address);
    if (!range || range->kind != Kind::Device || range->device != address) return kInvalidValue;
    wait(lock, *range->context);
    if (range->context->sticky != kSuccess) return range->context->sticky;
    if (!range->alive) return kInvalidValue;
    release_range(range);
    return kSuccess;
}

SIM_API cuMemAlloc_v2(u64 *address, std::size_t bytes) {
    SIM_ENTER(kInit | kCurrent | kUnsafe);
    return device_alloc(address, bytes);
}

SIM_API cuMemAllocPitch_v2(u64 *address, std::size_t *pitch, std::size_t width, std::size_t height, u32) {
    SIM_ENTER(kInit | kCurrent | kUnsafe);
    if (!pitch || width == 0 || height == 0) return kInvalidValue;
    *pitch = (width + 511) / 512 * 512;
    return device_alloc(address, *pitch * height);
}

SIM_API cuMemFree_v2(u64 address) {
    SIM_ENTER(kInit | kCurrent | kUnsafe);
    return device_free(address);
}

SIM_API cuMemGetInfo_v2(std::size_t *free_bytes, std::size_t *total) {
    SIM_ENTER(kInit | kCurrent);
    if (!free_bytes || !total) return kInvalidValue;
    const Lock lock(state().mutex);
    *total = setting(Setting::MemoryBytes);
    *free_bytes = *total - std::min<u64>(*total, current()->bytes);
    return kSuccess;
}

SIM_API cuMemGetAddressRange_v2(u64 *first, std::size_t *size, u64 address) {
    SIM_ENTER(kInit);
    const RangePtr range = range_at(address);
    if (!range) return kNotFound;
    if (first) *first = range->device;
    if (size) *size = range->size;
    return kSuccess;
}

SIM_API cuMemHostAlloc(void **host, std::size_t bytes, u32 flags) {
    SIM_ENTER(kInit | kCurrent | kUnsafe);
    return host_alloc(host, bytes, flags);
}
SIM_API cuMemAllocHost_v2(void **host, std::size_t bytes) {
    SIM_ENTER(kInit | kCurrent | kUnsafe);
    return host_alloc(host, bytes, 0);
}

SIM_API cuMemFreeHost(void *host) {
    SIM_ENTER(kInit | kCurrent | kUnsafe);
    Lock lock(state().mutex);
    const RangePtr range = host_range_at(reinterpret_cast<u64>(host));
    if (!range || range->kind != Kind::HostAlloc || range->bytes != host) return kInvalidValue;
    // Usable from every context, so every one is waited for.
    if (!wait_all(lock)) return kLaunchTimeout;
    if (!range->alive) return kInvalidValue;
    release_range(range);
    return kSuccess;
}

SIM_API cuMemHostRegister_v2(void *host, std::size_t bytes, u32 flags) {
    SIM_ENTER(kInit | kCurrent | kUnsafe);
    const u64 address = reinterpret_cast<u64>(host);
    if (address == 0 || bytes == 0 || flags > 15 || address + bytes < address) return kInvalidValue;
    if (bytes >= setting(Setting::RegisterLimit)) return kOutOfMemory;
    const bool read_only = (flags & 8) != 0;
    if (read_only && setting(Setting::ReadOnlyRegister) == 0) return kNotSupported;
    State &s = state();
    const Lock lock(s.mutex);
    // Pages belong to one registration only.
    const u64 first = address / kPage * kPage, last = pages(address + bytes);
    {
        const std::shared_lock<std::shared_mutex> ranges(s.ranges_mutex);
        for (const auto &[at, range] : s.by_host) {
            if (at / kPage * kPage < last && first < pages(at + range->size)) return kHostMemoryAlreadyRegistered;
        }
    }
    const Mapped found = mapped(address, bytes);
    if (!found.all) return kInvalidValue;
    if (!found.writable && !read_only) return kInvalidValue;
    if (found.on_disk && setting(Setting::RejectDiskFiles) != 0) return kInvalidValue;
    auto range = std::make_shared<Range>();
    range->kind = Kind::Registered;
    range->bytes = static_cast<u8 *>(host);
    range->host = address;
    range->size = bytes;
    range->flags = flags;
    range->context = current();
    range->device = address;
    if (setting(Setting::Shift) != 0) {
        // The same offset in the page, as the hardware maps pages.
        const u64 within = address % kPage;
        const u64 reserved = reserve(bytes + within);
        if (reserved == 0) return kOutOfMemory;
        range->device = reserved + within;
    }
    insert(range);
    return kSuccess;
}

// Does not wait for work in flight: whoever unregisters too early is found out.
SIM_API cuMemHostUnregister(void *host) {
    SIM_ENTER(kInit | kCurrent | kUnsafe);
    const Lock lock(state().mutex);
    const RangePtr range = host_range_at(reinterpret_cast<u64>(host));
    if (!range || range->kind != Kind::Registered) return kHostMemoryNotRegistered;
    if (range->host != reinterpret_cast<u64>(host)) return kInvalidValue;
    release_range(range);
    return kSuccess;
}

SIM_API cuMemHostGetDevicePointer_v2(u64 *address, void *host, u32 flags) {
    SIM_ENTER(kInit | kCurrent);
    if (!address || flags != 0) return kInvalidValue;
    const RangePtr range = host_range_at(reinterpret_cast<u64>(host));
    if (!range) return kInvalidValue;
    if (!range->portable() && range->context != current()) return kInvalidValue;
    *address = range->device + (reinterpret_cast<u64>(host) - range->host);
    return kSuccess;
}

SIM_API cuMemHostGetFlags(u32 *flags, void *host) {
    SIM_ENTER(kInit | kCurrent);
    const RangePtr range = host_range_at(reinterpret_cast<u64>(host));
    if (!flags || !range) return kInvalidValue;
    *flags = range->flags;
    return kSuccess;
}

static Result pointer_attribute(void *out, int attribute, u64 address) {
    if (!out) return kInvalidValue;
    RangePtr range = range_at(address);
    u64 offset = range ? address - range->device : 0;
    if (!range && (range = host_range_at(address))) offset = address - range->host;
    if (!range) return kInvalidValue;
    switch (attribute) {
        case 1: *static_cast<Handle *>(out) = reinterpret_cast<Handle>(range->context->handle); return kSuccess;
        case 2: *static_cast<u32 *>(out) = range->kind == Kind::Device ? 2 : 1; return kSuccess;
        case 3: *static_cast<u64 *>(out) = range->device + offset; return kSuccess;
        case 4:
            if (range->host == 0) return kInvalidValue;
            *static_cast<u64 *>(out) = range->host + offset;
            return kSuccess;
        case 6: *static_cast<u32 *>(out) = 0; return kSuccess;
        case 7: *static_cast<u64 *>(out) = range->id; return kSuccess;
        case 8: *static_cast<u32 *>(out) = 0; return kSuccess;
        case 9: *static_cast<int *>(out) = range->context->device; return kSuccess;
        case 11: *static_cast<u64 *>(out) = range->device; return kSuccess;
        case 12: *static_cast<u64 *>(out) = range->size; return kSuccess;
        case 13: *static_cast<u32 *>(out) = 1; return kSuccess;
        default: return kNotSupported;
    }
}

SIM_API cuPointerGetAttribute(void *out, int attribute, u64 address) {
    SIM_ENTER(kInit);
    return pointer_attribute(out, attribute, address);
}

// Unlike the single one it succeeds for memory the driver does not know, with zeroes.
SIM_API cuPointerGetAttributes(u32 count, int *attributes, void **out, u64 address) {
    SIM_ENTER(kInit);
    if (count == 0 || !attributes || !out) return kInvalidValue;
    for (u32 i = 0; i < count; ++i) {
        const Result code = pointer_attribute(out[i], attributes[i], address);
        if (code == kNotSupported || !out[i]) return kInvalidValue;
        if (code == kSuccess) continue;
        const bool small = attributes[i] == 2 || attributes[i] == 6 || attributes[i] == 8 || attributes[i] == 13;
        if (attributes[i] == 9) {
            *static_cast<int *>(out[i]) = -2;
        } else {
            std::memset(out[i], 0, small ? 4 : 8);
        }
    }
    return kSuccess;
}
