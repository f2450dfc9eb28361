// Streams, events, and the threads that run what is queued.
#include "sim.h"

#include <chrono>

namespace sim {

namespace {

bool held(State &s) {
    if (s.holds == 0) return false;
    if (now_ms() < s.hold_deadline) return true;
    s.holds = 0;
    s.holds_expired += 1;
    return false;
}

bool all_done(const std::vector<Done> &after) {
    for (const Done &done : after) {
        if (!done->done) return false;
    }
    return true;
}

// Waits for a condition that other threads change. The timeout only bounds a hold that nobody releases.
template <class Condition>
void until(Lock &lock, Condition condition) {
    while (!condition()) state().changed.wait_for(lock, std::chrono::milliseconds(200));
}

void work(const StreamPtr &stream) {
    State &s = state();
    Lock lock(s.mutex);
    for (;;) {
        until(lock, [&] { return !stream->queue.empty() || stream->closed; });
        if (stream->queue.empty()) return;
        Op op = std::move(stream->queue.front());
        stream->queue.pop_front();
        until(lock, [&] { return all_done(op.after) && !held(s); });
        if (const u64 delay = setting(Setting::DelayUs)) {
            lock.unlock();
            std::this_thread::sleep_for(std::chrono::microseconds(delay));
            lock.lock();
        }
        // After a fatal error nothing runs any more, but everything ends.
        if (stream->context->sticky == kSuccess && op.run) {
            lock.unlock();
            const Result code = op.run();
            // Arguments may own memory; they go before anybody is told.
            op.run = nullptr;
            lock.lock();
            if (code != kSuccess && stream->context->sticky == kSuccess) stream->context->sticky = code;
        }
        op.done->done = true;
        op.done->at = now_ms();
        s.executed += 1;
        s.queued -= 1;
        s.changed.notify_all();
    }
}

}  // namespace

StreamPtr new_stream(const ContextPtr &context, u32 flags, i32 priority) {
    auto stream = std::make_shared<Stream>();
    stream->context = context;
    stream->flags = flags;
    stream->priority = priority;
    context->streams.insert(stream);
    return stream;
}

StreamPtr find_stream(Handle handle) {
    const u64 number = reinterpret_cast<u64>(handle);
    if (number <= 2) {
        const ContextPtr context = current();
        return context && context->active ? context->null_stream : nullptr;
    }
    return state().streams.find(handle);
}

bool capturing(const Stream &stream) { return stream.capture && stream.capture->active; }

void invalidate(Capture &capture) { capture.invalid = true; }

Result stream_for_work(Lock &, Handle handle, StreamPtr &stream) {
    stream = find_stream(handle);
    if (!stream) return kInvalidHandle;
    if (stream->context != current()) return kInvalidHandle;
    return kSuccess;
}

Result enqueue(Lock &, const StreamPtr &stream, std::function<Result()> run, std::vector<Done> after, Done *done) {
    State &s = state();
    if (const Result code = take_later_fault()) run = [code] { return code; };
    if (capturing(*stream)) {
        Capture &capture = *stream->capture;
        if (capture.invalid) return kCaptureInvalidated;
        capture.nodes.push_back(Node{std::move(run), stream->tail});
        stream->tail = {capture.nodes.size() - 1};
        return kSuccess;
    }
    Context &context = *stream->context;
    if (context.sticky != kSuccess) return context.sticky;
    if (stream->handle == 0) {
        // The default stream waits for every blocking stream, and those for it.
        for (const StreamPtr &other : context.streams) {
            if (other->non_blocking() || other == stream) continue;
            if (capturing(*other)) {
                invalidate(*other->capture);
                return kCaptureImplicit;
            }
            if (other->last) after.push_back(other->last);
        }
    } else if (!stream->non_blocking() && context.null_stream->last) {
        after.push_back(context.null_stream->last);
    }
    Op op{std::move(run), std::move(after), std::make_shared<Completion>()};
    stream->last = op.done;
    if (done) *done = op.done;
    stream->queue.push_back(std::move(op));
    s.queued += 1;
    if (!stream->started) {
        stream->started = true;
        std::thread(work, stream).detach();
    }
    s.changed.notify_all();
    return kSuccess;
}

void wait(Lock &lock, const Done &done) {
    if (done) until(lock, [&] { return done->done; });
}

void wait(Lock &lock, Context &context) {
    std::vector<Done> last;
    for (const StreamPtr &stream : context.streams) {
        if (stream->last) last.push_back(stream->last);
    }
    until(lock, [&] { return all_done(last); });
}

bool wait_all(Lock &lock) {
    State &s = state();
    const double deadline = now_ms() + 60e3;
    until(lock, [&] { return s.queued == 0 || now_ms() > deadline; });
    return s.queued == 0;
}

}  // namespace sim

using namespace sim;

static Result create(Handle *stream, u32 flags, int priority) {
    if (!stream || flags > 1) return kInvalidValue;
    State &s = state();
    const Lock lock(s.mutex);
    const StreamPtr made = new_stream(current(), flags, priority);
    made->handle = s.handle();
    s.streams.live[made->handle] = made;
    *stream = reinterpret_cast<Handle>(made->handle);
    return kSuccess;
}
SIM_API cuStreamCreate(Handle *stream, u32 flags) {
    SIM_ENTER(kInit | kCurrent);
    return create(stream, flags, 0);
}
SIM_API cuStreamCreateWithPriority(Handle *stream, u32 flags, int priority) {
    SIM_ENTER(kInit | kCurrent);
    return create(stream, flags, priority < -5 ? -5 : priority > 0 ? 0 : priority);
}

SIM_API cuStreamDestroy_v2(Handle handle) {
    SIM_ENTER(kInit);
    State &s = state();
    const Lock lock(s.mutex);
    const StreamPtr stream = s.streams.find(handle);
    if (!stream) return kInvalidHandle;
    if (stream->context->sticky != kSuccess) return stream->context->sticky;
    if (capturing(*stream)) invalidate(*stream->capture);
    s.streams.live.erase(stream->handle);
    // What is queued still runs; a default stream must go on waiting for it.
    stream->closed = true;
    if (!stream->last || stream->last->done) stream->context->streams.erase(stream);
    s.changed.notify_all();
    return kSuccess;
}

SIM_API cuStreamSynchronize(Handle handle) {
    SIM_ENTER(kInit);
    Lock lock(state().mutex);
    const StreamPtr stream = find_stream(handle);
    if (!stream) return reinterpret_cast<u64>(handle) <= 2 ? kInvalidContext : kInvalidHandle;
    if (capturing(*stream)) {
        invalidate(*stream->capture);
        return kCaptureUnsupported;
    }
    wait(lock, stream->last);
    return stream->context->sticky;
}

SIM_API cuStreamQuery(Handle handle) {
    SIM_ENTER(kInit);
    const Lock lock(state().mutex);
    const StreamPtr stream = find_stream(handle);
    if (!stream) return reinterpret_cast<u64>(handle) <= 2 ? kInvalidContext : kInvalidHandle;
    if (capturing(*stream)) {
        invalidate(*stream->capture);
        return kCaptureUnsupported;
    }
    if (stream->context->sticky != kSuccess) return stream->context->sticky;
    return !stream->last || stream->last->done ? kSuccess : kNotReady;
}

SIM_API cuStreamWaitEvent(Handle handle, Handle event_handle, u32 flags) {
    SIM_ENTER(kInit);
    if (flags > 1) return kInvalidValue;
    State &s = state();
    Lock lock(s.mutex);
    const StreamPtr stream = find_stream(handle);
    const EventPtr event = s.events.find(event_handle);
    if (!stream || !event) return kInvalidHandle;
    if (event->capture) {
        if (!event->capture->active) return kCapturedEvent;
        if (capturing(*stream) && stream->capture != event->capture) {
            invalidate(*stream->capture);
            invalidate(*event->capture);
            return kCaptureMerge;
        }
        if (stream->handle == 0) return kCaptureImplicit;
        if (!capturing(*stream)) {
            stream->capture = event->capture;
            stream->capture->streams.push_back(stream);
            stream->tail.clear();
        }
        stream->tail.insert(stream->tail.end(), event->nodes.begin(), event->nodes.end());
        return kSuccess;
    }
    if (capturing(*stream)) {
        if (!event->record) return kSuccess;
        invalidate(*stream->capture);
        return kCaptureIsolation;
    }
    if (!event->record || event->record->done) return kSuccess;
    return enqueue(lock, stream, nullptr, {event->record});
}

template <class Read>
static Result read_stream(Handle handle, Read read) {
    const Lock lock(state().mutex);
    const StreamPtr stream = find_stream(handle);
    if (!stream) return reinterpret_cast<u64>(handle) <= 2 ? kInvalidContext : kInvalidHandle;
    return read(*stream);
}

SIM_API cuStreamGetFlags(Handle stream, u32 *flags) {
    SIM_ENTER(kInit);
    if (!flags) return kInvalidValue;
    return read_stream(stream, [&](const Stream &s) { return *flags = s.flags, kSuccess; });
}
SIM_API cuStreamGetPriority(Handle stream, int *priority) {
    SIM_ENTER(kInit);
    if (!priority) return kInvalidValue;
    return read_stream(stream, [&](const Stream &s) { return *priority = s.priority, kSuccess; });
}
SIM_API cuStreamGetCtx(Handle stream, Handle *context) {
    SIM_ENTER(kInit);
    if (!context) return kInvalidValue;
    return read_stream(stream, [&](const Stream &s) {
        return *context = reinterpret_cast<Handle>(s.context->handle), kSuccess;
    });
}
SIM_API cuStreamGetId(Handle stream, u64 *id) {
    SIM_ENTER(kInit);
    if (!id) return kInvalidValue;
    return read_stream(stream, [&](const Stream &s) { return *id = s.handle, kSuccess; });
}
SIM_API cuStreamGetDevice(Handle stream, int *device) {
    SIM_ENTER(kInit);
    if (!device) return kInvalidValue;
    return read_stream(stream, [&](const Stream &s) { return *device = s.context->device, kSuccess; });
}

SIM_API cuLaunchHostFunc(Handle handle, void (*function)(void *), void *data) {
    SIM_ENTER(kInit | kCurrent);
    if (!function) return kInvalidValue;
    Lock lock(state().mutex);
    StreamPtr stream;
    if (const Result code = stream_for_work(lock, handle, stream)) return code;
    return enqueue(lock, stream, [=] { return function(data), kSuccess; });
}

SIM_API cuEventCreate(Handle *event, u32 flags) {
    SIM_ENTER(kInit | kCurrent);
    if (!event || flags > 7) return kInvalidValue;
    State &s = state();
    const Lock lock(s.mutex);
    auto made = std::make_shared<Event>();
    made->context = current();
    made->flags = flags;
    const u64 handle = s.handle();
    s.events.live[handle] = made;
    *event = reinterpret_cast<Handle>(handle);
    return kSuccess;
}

SIM_API cuEventDestroy_v2(Handle handle) {
    SIM_ENTER(kInit);
    State &s = state();
    const Lock lock(s.mutex);
    const EventPtr event = s.events.find(handle);
    if (!event) return kInvalidHandle;
    if (event->context->sticky != kSuccess) return event->context->sticky;
    s.events.take(handle);
    return kSuccess;
}

static Result record(Handle event_handle, Handle handle) {
    State &s = state();
    Lock lock(s.mutex);
    const StreamPtr stream = find_stream(handle);
    if (!stream && reinterpret_cast<u64>(handle) <= 2) return kInvalidContext;
    const EventPtr event = s.events.find(event_handle);
    if (!stream || !event || event->context != stream->context) return kInvalidHandle;
    if (capturing(*stream)) {
        if (stream->capture->invalid) return kCaptureInvalidated;
        event->capture = stream->capture;
        event->nodes = stream->tail;
        event->record = nullptr;
        return kSuccess;
    }
    Done done;
    if (const Result code = enqueue(lock, stream, nullptr, {}, &done)) return code;
    event->capture = nullptr;
    event->record = done;
    return kSuccess;
}
SIM_API cuEventRecord(Handle event, Handle stream) {
    SIM_ENTER(kInit);
    return record(event, stream);
}
SIM_API cuEventRecordWithFlags(Handle event, Handle stream, u32 flags) {
    SIM_ENTER(kInit);
    return flags > 1 ? kInvalidValue : record(event, stream);
}

SIM_API cuEventQuery(Handle handle) {
    SIM_ENTER(kInit | kUnsafe);
    const Lock lock(state().mutex);
    const EventPtr event = state().events.find(handle);
    if (!event) return kInvalidHandle;
    if (event->capture) return kCapturedEvent;
    if (event->context->sticky != kSuccess) return event->context->sticky;
    return !event->record || event->record->done ? kSuccess : kNotReady;
}

SIM_API cuEventSynchronize(Handle handle) {
    SIM_ENTER(kInit | kUnsafe);
    Lock lock(state().mutex);
    const EventPtr event = state().events.find(handle);
    if (!event) return kInvalidHandle;
    if (event->capture) return kCapturedEvent;
    wait(lock, event->record);
    return event->context->sticky;
}

static Result elapsed(float *milliseconds, Handle first, Handle last) {
    if (!milliseconds) return kInvalidValue;
    const Lock lock(state().mutex);
    const EventPtr a = state().events.find(first), b = state().events.find(last);
    if (!a || !b || a->context != b->context || !a->record || !b->record) return kInvalidHandle;
    if (((a->flags | b->flags) & 2) != 0) return kInvalidHandle;
    if (a->context->sticky != kSuccess) return a->context->sticky;
    if (!a->record->done || !b->record->done) return kNotReady;
    *milliseconds = static_cast<float>(b->record->at - a->record->at);
    return kSuccess;
}
SIM_API cuEventElapsedTime(float *milliseconds, Handle first, Handle last) {
    SIM_ENTER(kInit);
    return elapsed(milliseconds, first, last);
}
SIM_API cuEventElapsedTime_v2(float *milliseconds, Handle first, Handle last) {
    SIM_ENTER(kInit);
    return elapsed(milliseconds, first, last);
}
