// Stream capture and graphs. A graph runs its nodes one after the other in the order they were captured,
// which respects every dependency.
#include "sim.h"

#include <algorithm>

namespace sim {

extern thread_local u32 capture_mode;

namespace {

// Whether every node is among those that `tail` comes after.
bool joined(const Capture &capture, const std::vector<std::size_t> &tail, const std::vector<std::size_t> &nodes) {
    std::vector<bool> before(capture.nodes.size(), false);
    std::vector<std::size_t> todo = tail;
    while (!todo.empty()) {
        const std::size_t at = todo.back();
        todo.pop_back();
        if (before[at]) continue;
        before[at] = true;
        todo.insert(todo.end(), capture.nodes[at].after.begin(), capture.nodes[at].after.end());
    }
    return std::all_of(nodes.begin(), nodes.end(), [&](std::size_t node) { return before[node]; });
}

std::function<Result()> in_order(const std::vector<Node> &nodes) {
    return [nodes] {
        for (const Node &node : nodes) {
            if (!node.run) continue;
            if (const Result code = node.run()) return code;
        }
        return Result{kSuccess};
    };
}

}  // namespace
}  // namespace sim

using namespace sim;

SIM_API cuStreamBeginCapture_v2(Handle handle, u32 mode) {
    SIM_ENTER(kInit);
    if (mode > 2) return kInvalidValue;
    State &s = state();
    const Lock lock(s.mutex);
    const StreamPtr stream = find_stream(handle);
    if (!stream) return kInvalidHandle;
    if (stream->handle == 0) return kCaptureUnsupported;
    if (stream->context->sticky != kSuccess) return stream->context->sticky;
    if (capturing(*stream)) return kInvalidValue;
    auto capture = std::make_shared<Capture>();
    capture->mode = mode;
    capture->thread = std::this_thread::get_id();
    capture->id = s.handle();
    capture->origin = stream;
    capture->streams.push_back(stream);
    stream->capture = capture;
    stream->tail.clear();
    s.captures.erase(std::remove_if(s.captures.begin(), s.captures.end(),
                                    [](const auto &weak) { return weak.expired(); }),
                     s.captures.end());
    s.captures.push_back(capture);
    return kSuccess;
}

SIM_API cuStreamEndCapture(Handle handle, Handle *graph) {
    SIM_ENTER(kInit);
    if (!graph) return kInvalidValue;
    *graph = nullptr;
    State &s = state();
    const Lock lock(s.mutex);
    const StreamPtr stream = find_stream(handle);
    if (!stream) return kInvalidHandle;
    if (!capturing(*stream)) return kInvalidValue;
    const auto capture = stream->capture;
    if (capture->origin != stream) {
        invalidate(*capture);
        return kCaptureUnmatched;
    }
    if (capture->mode != 2 && capture->thread != std::this_thread::get_id()) return kCaptureWrongThread;
    bool all = true;
    for (const auto &weak : capture->streams) {
        const StreamPtr other = weak.lock();
        if (!other || other->capture != capture) continue;
        all = all && joined(*capture, stream->tail, other->tail);
        other->capture = nullptr;
    }
    const std::vector<std::size_t> tail = std::move(stream->tail);
    stream->tail.clear();
    capture->active = false;
    capture->origin = nullptr;
    if (capture->invalid) return kCaptureInvalidated;
    if (!all) return kCaptureUnjoined;
    auto made = std::make_shared<Graph>();
    made->nodes = capture->nodes;
    const u64 number = s.handle();
    s.graphs.live[number] = made;
    *graph = reinterpret_cast<Handle>(number);
    return kSuccess;
}

static Result status(Handle handle, u32 *result) {
    const StreamPtr stream = find_stream(handle);
    if (!stream) return reinterpret_cast<u64>(handle) <= 2 ? kInvalidContext : kInvalidHandle;
    if (stream->handle == 0) {
        for (const StreamPtr &other : stream->context->streams) {
            if (!other->non_blocking() && capturing(*other)) return kCaptureImplicit;
        }
    }
    *result = !capturing(*stream) ? 0 : stream->capture->invalid ? 2 : 1;
    return kSuccess;
}

SIM_API cuStreamIsCapturing(Handle stream, u32 *result) {
    SIM_ENTER(kInit);
    if (!result) return kInvalidValue;
    const Lock lock(state().mutex);
    return status(stream, result);
}

SIM_API cuStreamGetCaptureInfo_v2(Handle handle, u32 *result, u64 *id, Handle *graph, const Handle **after,
                                  std::size_t *count) {
    SIM_ENTER(kInit);
    if (!result || graph || after || count) return kInvalidValue;
    const Lock lock(state().mutex);
    if (const Result code = status(handle, result)) return code;
    if (id && *result == 1) *id = find_stream(handle)->capture->id;
    return kSuccess;
}

SIM_API cuThreadExchangeStreamCaptureMode(u32 *mode) {
    SIM_ENTER(kInit);
    if (!mode || *mode > 2) return kInvalidValue;
    std::swap(*mode, capture_mode);
    return kSuccess;
}

static Result instantiate(Handle *exec, Handle graph_handle) {
    if (!exec) return kInvalidValue;
    State &s = state();
    const Lock lock(s.mutex);
    const auto graph = s.graphs.find(graph_handle);
    if (!graph) return kInvalidHandle;
    auto made = std::make_shared<GraphExec>();
    made->nodes = graph->nodes;
    made->context = current();
    const u64 number = s.handle();
    s.execs.live[number] = made;
    *exec = reinterpret_cast<Handle>(number);
    return kSuccess;
}
SIM_API cuGraphInstantiateWithFlags(Handle *exec, Handle graph, unsigned long long) {
    SIM_ENTER(kInit | kCurrent | kUnsafe);
    return instantiate(exec, graph);
}
SIM_API cuGraphInstantiate_v2(Handle *exec, Handle graph, Handle *, char *, std::size_t) {
    SIM_ENTER(kInit | kCurrent | kUnsafe);
    return instantiate(exec, graph);
}

static Result graph_for(Handle exec_handle, Handle handle, bool launch) {
    State &s = state();
    Lock lock(s.mutex);
    const auto exec = s.execs.find(exec_handle);
    StreamPtr stream;
    if (!exec) return kInvalidHandle;
    if (const Result code = stream_for_work(lock, handle, stream)) return code;
    if (exec->context != stream->context) return kInvalidHandle;
    if (!launch) return kSuccess;
    std::vector<Done> after;
    if (exec->last && !exec->last->done) after.push_back(exec->last);
    return enqueue(lock, stream, in_order(exec->nodes), after, &exec->last);
}
SIM_API cuGraphLaunch(Handle exec, Handle stream) {
    SIM_ENTER(kInit | kCurrent);
    return graph_for(exec, stream, true);
}
SIM_API cuGraphUpload(Handle exec, Handle stream) {
    SIM_ENTER(kInit | kCurrent);
    return graph_for(exec, stream, false);
}

SIM_API cuGraphGetNodes(Handle handle, Handle *nodes, std::size_t *count) {
    SIM_ENTER(kInit);
    if (!count) return kInvalidValue;
    const Lock lock(state().mutex);
    const auto graph = state().graphs.find(handle);
    if (!graph) return kInvalidHandle;
    if (nodes) return kNotSupported;
    *count = graph->nodes.size();
    return kSuccess;
}

SIM_API cuGraphDestroy(Handle graph) {
    SIM_ENTER(kInit);
    const Lock lock(state().mutex);
    return state().graphs.take(graph) ? kSuccess : kInvalidHandle;
}
SIM_API cuGraphExecDestroy(Handle exec) {
    SIM_ENTER(kInit);
    const Lock lock(state().mutex);
    return state().execs.take(exec) ? kSuccess : kInvalidHandle;
}
