/* Memory of large tensors on CPUs, apart from what else malloc hands out.

   One range of addresses is reserved, and used from its start: a block is cut from the smallest gap
   that holds it, else from the end; gaps that meet become one. Memory that was used once stays
   until the pool is switched off. */

#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>

#include <atomic>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace {

constexpr size_t LEAST = size_t(1) << 16; /* smaller tensors are malloc's */
constexpr size_t PAGE = size_t(1) << 12, GROWTH = size_t(1) << 26;
const c10::Device CPU(c10::DeviceType::CPU);

/* Up by a 32nd at most, so that batches of about one length use the same blocks. */
size_t rounded(size_t bytes) {
    size_t grain = PAGE;
    while (grain * 64 < bytes) grain *= 2;
    return (bytes + grain - 1) / grain * grain;
}

class Pool final : public c10::Allocator {
  public:
    std::mutex guard;
    std::atomic<bool> on{false};
    std::atomic<size_t> handed_out{0};
    c10::Allocator *const others = c10::GetDefaultCPUAllocator();

    Pool(char *start, size_t size) : start(start), end(start + size), used(start), open(start) {}

    c10::DataPtr allocate(size_t bytes) override;
    c10::DeleterFnPtr raw_deleter() const override;
    void copy_data(void *to, const void *from, size_t bytes) const override {
        default_copy_data(to, from, bytes);
    }

    bool owns(const void *at) const { return at >= start && at < end; }

    /* What can be written to: more than none once there was a block. */
    size_t reserved() const { return size_t(open - start); }

    /* Nothing where no memory is left. */
    char *take(size_t size) {
        std::lock_guard<std::mutex> lock(guard);
        char *at = from_gap(size);
        if (!at) at = from_end(size);
        if (at) {
            sizes[at] = size;
            handed_out += size;
        }
        return at;
    }

    /* Returns its size. */
    size_t give_back(char *at) {
        std::lock_guard<std::mutex> lock(guard);
        auto block = sizes.find(at);
        const size_t size = block->second;
        sizes.erase(block);
        handed_out -= size;
        char *low = at, *high = at + size;
        auto next = gaps.lower_bound(low);
        if (next != gaps.end() && next->first == high) {
            high += next->second;
            next = close(next);
        }
        if (next != gaps.begin()) {
            auto before = std::prev(next);
            if (before->first + before->second == low) {
                low = before->first;
                close(before);
            }
        }
        if (high == used)
            used = low;
        else
            add(low, high - low);
        return size;
    }

    /* Let the system have what no block holds. */
    void release() {
        std::lock_guard<std::mutex> lock(guard);
        for (const auto &[at, size] : gaps) madvise(at, size, MADV_DONTNEED);
        madvise(used, open - used, MADV_DONTNEED);
    }

  private:
    using Gaps = std::map<char *, size_t>;

    char *const start, *const end;
    char *used, *open; /* blocks and gaps end at `used`; up to `open` it can be written to */
    std::map<char *, size_t> sizes; /* of blocks */
    Gaps gaps;
    std::set<std::pair<size_t, char *>> by_size;

    void add(char *at, size_t size) {
        gaps[at] = size;
        by_size.insert({size, at});
    }

    Gaps::iterator close(Gaps::iterator gap) {
        by_size.erase({gap->second, gap->first});
        return gaps.erase(gap);
    }

    char *from_gap(size_t size) {
        auto found = by_size.lower_bound({size, nullptr});
        if (found == by_size.end()) return nullptr;
        const auto [room, at] = *found;
        close(gaps.find(at));
        if (room > size) add(at + size, room - size);
        return at;
    }

    char *from_end(size_t size) {
        if (size > size_t(end - used)) return nullptr;
        char *at = used;
        if (at + size > open) {
            const size_t missing = at + size - open, room = end - open;
            size_t more = (missing + GROWTH - 1) / GROWTH * GROWTH;
            if (more > room) more = room;
            if (mprotect(open, more, PROT_READ | PROT_WRITE)) return nullptr;
            open += more;
        }
        used = at + size;
        return at;
    }
};

Pool *pool = nullptr;

void report(void *at, int64_t change) {
    if (c10::memoryProfilingEnabled())
        c10::reportMemoryUsageToProfiler(at, change, pool->handed_out, pool->reserved(), CPU);
}

void free_block(void *at) {
    if (!at) return;
    if (!pool->owns(at)) return pool->others->raw_deallocate(at);
    report(at, -int64_t(pool->give_back(static_cast<char *>(at))));
}

c10::DeleterFnPtr Pool::raw_deleter() const { return &free_block; }

c10::DataPtr Pool::allocate(size_t bytes) {
    void *at = nullptr;
    if (on && bytes >= LEAST) at = take(rounded(bytes));
    if (at)
        report(at, int64_t(rounded(bytes)));
    else
        at = others->raw_allocate(bytes); /* which tells where memory is short */
    return {at, at, &free_block, CPU};
}

} // namespace

/* Reserve a range of addresses and let PyTorch ask here; false where there is none so large. */
extern "C" bool install(size_t bytes) {
    void *start = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) return false;
    madvise(start, bytes, MADV_HUGEPAGE);
    pool = new Pool(static_cast<char *>(start), bytes);
    pthread_atfork([] { pool->guard.lock(); }, [] { pool->guard.unlock(); },
                   [] { pool->guard.unlock(); });
    c10::SetCPUAllocator(pool);
    return true;
}

extern "C" void use(bool on) {
    pool->on = on;
    if (!on) pool->release();
}

extern "C" size_t handed_out() { return pool->handed_out; }
