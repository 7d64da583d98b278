// A libcupti that makes the records it is told to: the calls and layouts of CUPTI 11.8 to 13.4, without a GPU.
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef void (*request_fn)(uint8_t **, size_t *, size_t *);
typedef void (*complete_fn)(void *, uint32_t, uint8_t *, size_t, size_t);

static request_fn request;
static complete_fn complete;
static uint32_t version = 130001, thread_type;
static uint64_t enabled;
static size_t sizes[40] = {[1] = 96, [2] = 88, [4] = 40, [5] = 40, [10] = 216, [17] = 48, [22] = 96, [39] = 24};
static uint8_t *buffer;
static size_t space, used, dropped, pending;
static uint64_t now_ns;

void fake_reset(uint32_t v, size_t kernel, size_t copy, size_t set) {
    version = v; sizes[10] = kernel; sizes[1] = copy; sizes[2] = set;
    request = 0; complete = 0; enabled = 0; thread_type = 0; buffer = 0; space = used = dropped = pending = 0; now_ns = 0;
}
// 0: the wall clock, as CUDA 12 has it.
void fake_time(uint64_t ns) { now_ns = ns; }
// The last record is of a kernel that still runs: the buffer stays here until it is forced out or the kernel ends.
void fake_pending(int is_pending) { pending = is_pending; }

static void hand_over(void) {
    uint8_t *full = buffer;
    buffer = 0;
    if (full) complete(0, 0, full, space, used);
}

static void put(uint8_t *at, size_t offset, uint64_t value, size_t bytes) { memcpy(at + offset, &value, bytes); }

static uint8_t *next_record(uint32_t kind) {
    if (!(enabled & (1ull << kind))) return 0;
    if (buffer && used + sizes[kind] > space) hand_over();
    if (!buffer) {
        size_t most = 0;
        used = space = 0;
        request(&buffer, &space, &most);
        if (!buffer) { dropped++; return 0; }
    }
    uint8_t *at = buffer + used;
    memset(at, 0, sizes[kind]);
    put(at, 0, kind, 4);
    used += sizes[kind];
    return at;
}

static uint32_t correlation = 1234;
// The correlation of the kernels that follow.
void fake_correlation(uint32_t number) { correlation = number; }
void fake_kernel(const char *name, uint64_t start, uint64_t end, const int32_t *launch, uint64_t graph_node) {
    uint8_t *at = next_record(10);
    if (!at) return;
    put(at, 6, 40, 2);
    put(at, 16, start, 8); put(at, 24, end, 8);
    put(at, 40, 0, 4); put(at, 48, 7, 4);
    memcpy(at + 52, launch, 24);            // grid, block
    put(at, 76, 1024, 4); put(at, 80, 2048, 4);
    put(at, 92, correlation, 4);
    put(at, 104, (uint64_t)(uintptr_t)name, 8);
    put(at, 144, graph_node, 8);
}
void fake_copy(uint64_t start, uint64_t end, uint64_t bytes, int kind) {
    uint8_t *at = next_record(1);
    if (!at) return;
    put(at, 4, kind, 1); put(at, 5, 2, 1); put(at, 6, 3, 1); put(at, 8, bytes, 8);
    put(at, 16, start, 8); put(at, 24, end, 8); put(at, 40, 7, 4); put(at, 44, 99, 4);
}
void fake_set(uint64_t start, uint64_t end, uint64_t bytes) {
    uint8_t *at = next_record(2);
    if (!at) return;
    put(at, 8, bytes, 8); put(at, 16, start, 8); put(at, 24, end, 8); put(at, 40, 7, 4);
}

// A call of the runtime (kind 5) or the driver (4) on a thread; `correlation` ties it to what it launched.
void fake_call(uint32_t kind, uint32_t number, uint64_t start, uint64_t end, uint32_t thread, uint32_t correlation) {
    uint8_t *at = next_record(kind);
    if (!at) return;
    put(at, 4, number, 4); put(at, 8, start, 8); put(at, 16, end, 8);
    put(at, 28, thread_type ? thread : 0xdead, 4); put(at, 32, correlation, 4);
}
// A record of a kind that another client has enabled.
void fake_other(uint32_t kind) { enabled |= 1ull << kind; next_record(kind); enabled &= ~(1ull << kind); }

int cuptiGetVersion(uint32_t *v) { *v = version; return 0; }
int cuptiGetTimestamp(uint64_t *t) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    *t = now_ns ? now_ns : (uint64_t)now.tv_sec * 1000000000u + now.tv_nsec;
    return 0;
}
int cuptiGetResultString(int status, const char **text) { *text = status == 15 ? "CUPTI_ERROR_NOT_INITIALIZED" : "?"; return 0; }
int cuptiGetCallbackName(uint32_t domain, uint32_t number, const char **name) {
    static const char *names[2][3] = {{"cuLaunchKernel", "cuLaunchKernelEx_ptsz", "cuCtxGetCurrent"},
                                      {"cudaLaunchKernel_v7000", "cudaGraphLaunch_v10000", "cudaGetDevice_v3020"}};
    if (domain < 1 || domain > 2 || number > 2) return 1;
    *name = names[domain - 1][number];
    return 0;
}
int cuptiSetThreadIdType(uint32_t type) { thread_type = type; return 0; }
int cuptiActivityRegisterCallbacks(request_fn r, complete_fn c) { request = r; complete = c; return 0; }
int cuptiActivityEnable(uint32_t kind) {
    if (kind >= 40 || !sizes[kind]) return 15;
    enabled |= 1ull << kind;
    return 0;
}
int cuptiActivityDisable(uint32_t kind) { enabled &= ~(1ull << kind); return 0; }
int cuptiActivityFlushAll(uint32_t flag) { if (flag || !pending) hand_over(); return 0; }
int cuptiActivityGetNumDroppedRecords(void *c, uint32_t s, size_t *n) { (void)c; (void)s; *n = dropped; dropped = 0; return 0; }
int cuptiActivityGetNextRecord(uint8_t *buf, size_t valid, uint8_t **record) {
    uint8_t *next = buf;
    if (*record) { uint32_t kind; memcpy(&kind, *record, 4); next = *record + sizes[kind]; }
    if (next >= buf + valid) return 12;
    *record = next;
    return 0;
}
