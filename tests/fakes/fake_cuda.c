// CUDA's driver as far as runtime/pause_kernel.py calls it: one device of 132 SMs, whose streams are threads.
//
// A launch of the pause kernel follows the kernel's rule (PTX in pause_kernel.py) for its last block, on the same words:
// the time since the last pause, times the newest ratio. It reads the host's words while it waits.
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define DEEP 1024
typedef struct { void (*call)(void *); void *word; uint64_t args[4]; } Work;
typedef struct { pthread_t thread; pthread_mutex_t lock; pthread_cond_t wake; Work queue[DEEP]; long in, out; } Stream;

static _Thread_local void *current;
static _Thread_local int mode;
static int refuse;  // the call that is refused from now on, by its place in `names`
static const char *names[] = {"", "cuModuleLoadData", "cuLaunchKernel", "cuMemHostAlloc"};
static long launched;
static pthread_mutex_t pausing = PTHREAD_MUTEX_INITIALIZER;
static uint64_t paused_since, paused_before;  // ns: the beginning of the pause under way, or 0; all pauses before it

void fake_refuse(const char *name) {
    refuse = 0;
    for (int i = 1; i < 4; i++) if (!strcmp(names[i], name)) refuse = i;
}
long fake_launched(void) { return launched; }
int fake_mode(void) { return mode; }

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void set_paused(int on) {
    pthread_mutex_lock(&pausing);
    uint64_t now = now_ns();
    if (!on) paused_before += now - paused_since;
    paused_since = on ? now : 0;
    pthread_mutex_unlock(&pausing);
}
int fake_paused(void) { return paused_since != 0; }
// The device's own time, which stands still during a pause.
double fake_unpaused_s(void) {
    pthread_mutex_lock(&pausing);
    uint64_t now = paused_since ? paused_since : now_ns(), before = paused_before;
    pthread_mutex_unlock(&pausing);
    return (now - before) * 1e-9;
}

static void pause_device(volatile int64_t *control, volatile uint64_t *state, volatile int64_t *stats) {
    uint64_t began = now_ns(), now = began, resume = state[0] ? state[0] : began;
    int64_t busy = began > resume ? (int64_t)(began - resume) : 0, wait;
    if (busy > control[2]) busy = control[2];
    set_paused(1);
    for (;;) {
        wait = busy * control[0] / 1024;
        if (wait > control[1]) wait = control[1];
        if (now >= began + wait) break;
        struct timespec nap = {0, 20000};
        nanosleep(&nap, NULL);
        now = now_ns();
    }
    set_paused(0);
    stats[1] += wait > 0;
    stats[2] += now - began;
    stats[3] += busy;
    state[0] = now_ns();
    stats[0] += 1;
}

static void *run(void *arg) {
    Stream *s = arg;
    for (;;) {
        pthread_mutex_lock(&s->lock);
        while (s->in == s->out) pthread_cond_wait(&s->wake, &s->lock);
        Work work = s->queue[s->out % DEEP];
        pthread_mutex_unlock(&s->lock);
        if (work.call) work.call(work.word);
        else pause_device((void *)work.args[0], (void *)work.args[1], (void *)work.args[2]);
        pthread_mutex_lock(&s->lock);
        s->out++;
        pthread_mutex_unlock(&s->lock);
    }
    return NULL;
}

static int put(Stream *s, Work work) {
    pthread_mutex_lock(&s->lock);
    int full = s->in - s->out >= DEEP;
    if (!full) s->queue[s->in++ % DEEP] = work;
    pthread_cond_signal(&s->wake);
    pthread_mutex_unlock(&s->lock);
    return full ? 719 : 0;
}

int cuGetErrorName(int code, const char **name) { *name = code == 719 ? "CUDA_ERROR_LAUNCH_FAILED" : "CUDA_ERROR_UNKNOWN"; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return index > 7 ? 101 : 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(intptr_t)(device + 1); return 0; }
int cuCtxPushCurrent_v2(void *context) { current = context; return 0; }
int cuCtxPopCurrent_v2(void **context) { *context = current; current = NULL; return 0; }
int cuCtxSetCurrent(void *context) { current = context; return 0; }
int cuThreadExchangeStreamCaptureMode(int *other) { int was = mode; mode = *other; *other = was; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { (void)device; *value = attribute == 16 ? 132 : attribute == 106 ? 32 : 0; return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = (void *)1; return !current || !strstr(image, "tessera_pause") || refuse == 1 ? 218 : 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { (void)module; *function = (void *)2; return strcmp(name, "tessera_pause") ? 500 : 0; }
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    Stream *s = calloc(1, sizeof *s);
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->wake, NULL);
    pthread_create(&s->thread, NULL, run, s);
    *stream = s;
    return flags == 1 && priority == -5 ? 0 : 1;
}
int cuMemHostAlloc(void **memory, size_t bytes, unsigned flags) { (void)flags; *memory = malloc(bytes); return refuse == 3 ? 2 : 0; }
int cuMemAlloc_v2(uint64_t *memory, size_t bytes) { *memory = (uint64_t)malloc(bytes); return 0; }
int cuMemsetD8_v2(uint64_t memory, unsigned char value, size_t bytes) { memset((void *)memory, value, bytes); return 0; }
int cuLaunchHostFunc(void *stream, void (*call)(void *), void *word) { return put(stream, (Work){call, word, {0}}); }
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **params, void **extra) {
    Work work = {0};
    if (refuse == 2 || !current) return 719;
    if (function != (void *)2 || gy * gz * by * bz != 1 || bx > 32 || shared || extra) return 1;
    for (int i = 0; i < 4; i++) work.args[i] = *(uint64_t *)params[i];
    if (work.args[3] != gx) return 1;
    launched++;
    return put(stream, work);
}
