/* The board behind the fake NVML: scenario, clock, waveform and sensors, and how NVML's structs are laid out.
 *
 * Everything is computed from the time of the call, nothing runs in the background, so a virtual clock can jump as
 * it likes. Included by fake_nvml.c alone, which holds the lock over all of it.
 *
 *     time ──► waveform: energy up to t, exact ──► ring, counter, averages
 *
 * The defaults follow an NVIDIA H200, driver 580 (shared/design.md, shared/h200/waves.json). Struct layouts follow
 * pynvml.py 13.615.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* ---------------------------------------------------------------- NVML's ABI (layouts as in pynvml.py) */

typedef enum {
    OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, LIBRARY_NOT_FOUND = 12, GPU_IS_LOST = 15,
    LIB_RM_VERSION_MISMATCH = 18, OUT_OF_MEMORY = 20, VERSION_MISMATCH = 25, UNKNOWN = 999,
} nvmlReturn_t;

enum { TYPE_UINT = 1, TYPE_ULL = 3 };               /* NVML_VALUE_TYPE_* */
enum { SCOPE_GPU = 0, SCOPE_MODULE = 1, SCOPE_MEMORY = 2 };

struct nvmlDevice { int gpu, mig; };                /* opaque to callers; mig is -1 for a whole GPU */
typedef struct nvmlDevice *nvmlDevice_t;
typedef union { double d; unsigned ui; unsigned long long ull; } nvmlValue_t;
typedef struct { unsigned long long time_us; nvmlValue_t value; } nvmlSample_t;
typedef struct {
    uint32_t id, scope;
    int64_t time_us, latency_us;
    unsigned type;
    nvmlReturn_t ret;
    nvmlValue_t value;
} nvmlFieldValue_t;
typedef struct { unsigned gpu, memory; } nvmlUtilization_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } nvmlMemory_v2_t;
typedef struct { unsigned long long reference_us, violation_ns; } nvmlViolationTime_t;
typedef struct { unsigned version, sensor; int temperature; } nvmlTemperature_v1_t;
typedef struct {
    char legacy_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char id[32];
} nvmlPciInfo_t;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, slice; } nvmlProcessInfo_t;
typedef struct { int gpu; int64_t time_us; } *nvmlGpmSample_t;
typedef struct {
    unsigned id;
    nvmlReturn_t ret;
    double value;
    struct { const char *short_name, *long_name, *unit; } info;
} nvmlGpmMetric_t;
typedef struct {
    unsigned version, count;
    nvmlGpmSample_t first, second;
    nvmlGpmMetric_t metrics[];
} nvmlGpmMetricsGet_t;
typedef struct { unsigned version, supported; } nvmlGpmSupport_t;

_Static_assert(sizeof(nvmlFieldValue_t) == 40 && sizeof(nvmlSample_t) == 16 && sizeof(nvmlPciInfo_t) == 68 &&
               sizeof(nvmlMemory_v2_t) == 0x28 && sizeof(nvmlTemperature_v1_t) == 0xc &&
               sizeof(nvmlProcessInfo_t) == 24 && sizeof(nvmlGpmMetric_t) == 40 &&
               offsetof(nvmlGpmMetricsGet_t, metrics) == 24, "layout of pynvml.py");

/* ---------------------------------------------------------------- state, all of it under one lock */

enum { MAX_GPUS = 16, MAX_MIG = 7, MAX_RING = 1024, MAX_PAIRS = 256, ALL = -1 };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char text[32768];                            /* the scenario, cut into the pairs below */
static struct { const char *key, *value; } pairs[MAX_PAIRS];
static int n_pairs;
static bool have_scenario;
static int64_t virtual_us;                          /* 0: the real clock */
static int64_t anchor_us, boot_us;                  /* default origin; start of the driver's history */
static int64_t init_us;                             /* the last nvmlInit */
static int init_count;
static struct nvmlDevice gpus[MAX_GPUS], migs[MAX_GPUS][MAX_MIG];
/* What was set, and how often each setter was called. With `state_file` it lies in a file that processes share. */
enum { PRESETS = 5, PARAMETERS = 4 };
struct control {
    unsigned limit_mw, lock_min_mhz, lock_max_mhz, limit_calls, lock_calls, unlock_calls;
    unsigned smooth_calls, profile_calls, smooth_on, smooth_preset, requested[8];
    double preset[PRESETS][PARAMETERS];             /* what was added to the presets' own values */
};
static struct control own_control[MAX_GPUS], *control = own_control;
static const size_t CONTROL_SIZE = sizeof own_control;

/* ---------------------------------------------------------------- the scenario */

static const char KNOWN_KEYS[] =
    " gpus name uuid driver_version nvml_version cuda_version mig origin_us wave before_w "
    " ring ring_len ring_ms jitter lag_ms energy counter_base_mj counter_lag_ms counter_reset_at_s "
    " tick_ms tick_phase_ms "
    " power refresh_ms average instant hbm hbm_fraction module module_factor fields "
    " cost.energy_us cost.samples_us cost.power_us cost.fields_us cost.telemetry_us "
    " temperature temperature_c memory_temperature_c clocks clock.graphics clock.sm clock.mem clock.video "
    " reasons supported_reasons violation throttled.power throttled.thermal throttled.sync_boost "
    " throttled.board_limit throttled.low_utilization throttled.reliability throttled.sw_thermal throttled.hw_thermal "
    " throttled.power_brake "
    " limit limit_w limit_min_w limit_max_w limit_step_w enforced_limit_w control "
    " cost.control_us fault.limit fault.lock fault.unlock state_file smoothing profiles fault.smooth fault.profile "
    " utilization utilization_pct memory_utilization_pct memory memory_total_mib memory_used_mib processes "
    " persistence_mode compute_capability "
    " gpm gpm.graphics gpm.sm gpm.occupancy gpm.integer gpm.tensor gpm.hmma gpm.dram gpm.fp64 gpm.fp32 gpm.fp16 "
    " gpm.pcie_tx gpm.pcie_rx gpm.nvlink_rx gpm.nvlink_tx "
    " init lost_at_s lost_gpu back_at_s denied_at_s restart_at_s restart_s epoch_step_us_at ring_freeze_at_s ";

/* The value for one GPU (or ALL): `gpuN.key`, else `key`, else NULL. The last line of a key wins. */
static const char *get(int gpu, const char *key)
{
    const char *found = NULL;
    bool exact = false;
    char own[64] = "";
    if (gpu >= 0)
        snprintf(own, sizeof own, "gpu%d.%s", gpu, key);
    for (int i = 0; i < n_pairs; i++) {
        if (own[0] && !strcmp(pairs[i].key, own)) {
            found = pairs[i].value;
            exact = true;
        } else if (!exact && !strcmp(pairs[i].key, key)) {
            found = pairs[i].value;
        }
    }
    return found;
}

static double num(int gpu, const char *key, double otherwise)
{
    const char *v = get(gpu, key);
    return v ? strtod(v, NULL) : otherwise;         /* strtod also reads 0x... */
}

static bool is(int gpu, const char *key, const char *value)
{
    const char *v = get(gpu, key);
    return v && !strcmp(v, value);
}

/* What `key=off` and `key=denied` answer; anything else works. */
static nvmlReturn_t gate(int gpu, const char *key)
{
    return is(gpu, key, "off") ? NOT_SUPPORTED : is(gpu, key, "denied") ? NO_PERMISSION : OK;
}

/* ---------------------------------------------------------------- time */

static int64_t now_us(void)
{
    struct timespec ts;
    if (virtual_us)
        return virtual_us;
    clock_gettime(CLOCK_REALTIME, &ts);
    return (int64_t)ts.tv_sec * 1000000 + ts.tv_nsec / 1000;
}

static int64_t origin_us(void)
{
    const char *v = get(ALL, "origin_us");
    return v ? strtoll(v, NULL, 10) : anchor_us;
}

static double since_origin_s(int64_t t_us) { return (double)(t_us - origin_us()) / 1e6; }

/* The moment of `key=SECONDS` after the origin; never, where the scenario does not say. */
static int64_t moment_us(int gpu, const char *key)
{
    const char *v = get(gpu, key);
    return v ? origin_us() + (int64_t)llround(strtod(v, NULL) * 1e6) : INT64_MAX;
}

/* What the wall clock said at a (steady) time: `epoch_step_us_at=T:DELTA` steps it. */
static int64_t stamp_us(int64_t t_us)
{
    const char *v = get(ALL, "epoch_step_us_at"), *delta = v ? strchr(v, ':') : NULL;
    return delta && t_us >= moment_us(ALL, "epoch_step_us_at") ? t_us + strtoll(delta + 1, NULL, 10) : t_us;
}

/* A new history begins: the scenario's seconds count from here, the driver has been sampling for 2.4 s. */
static void anchor(void)
{
    anchor_us = now_us();
    boot_us = anchor_us - 2400000;
}

/* Default costs hold for the real clock only: in virtual time a call takes no time, unless the scenario says so. */
static double cost_us(const char *key, double otherwise) { return num(ALL, key, virtual_us ? 0 : otherwise); }

/* ---------------------------------------------------------------- the waveform */

enum kind { CONST, SQUARE, RAMP, SINE };
struct wave { enum kind kind; double a, b, period_s, duty, before_w; };

/* const:W  square:LOW:HIGH:PERIOD_S[:DUTY]  ramp:LOW:HIGH:DURATION_S  sine:MEAN:AMPLITUDE:PERIOD_S */
static bool parse_wave(const char *v, struct wave *w)
{
    static const struct { const char *name; int least, most; } KINDS[] = {
        [CONST] = {"const:", 1, 1}, [SQUARE] = {"square:", 3, 4}, [RAMP] = {"ramp:", 3, 3}, [SINE] = {"sine:", 3, 3}};
    for (int kind = CONST; kind <= SINE; kind++) {
        double n[4] = {0, 0, 1, 0.5};
        int given = 0;
        size_t length = strlen(KINDS[kind].name);
        if (strncmp(v, KINDS[kind].name, length))
            continue;
        v += length - 1;                            /* each number follows a colon */
        while (*v == ':' && given < 4) {
            char *end;
            n[given++] = strtod(v + 1, &end);
            if (end == v + 1)
                return false;
            v = end;
        }
        *w = (struct wave){(enum kind)kind, n[0], n[1], n[2], n[3], n[0]};
        return !*v && given >= KINDS[kind].least && given <= KINDS[kind].most && n[2] > 0 && n[3] >= 0 && n[3] <= 1;
    }
    return false;
}

static struct wave wave_of(int gpu)
{
    struct wave w = {CONST, 100, 0, 1, 0.5, 100};
    const char *v = get(gpu, "wave");
    if (v)
        parse_wave(v, &w);
    w.before_w = num(gpu, "before_w", w.before_w);
    return w;
}

/* Joules drawn from the origin to s seconds after it (negative before it): exact, so averages are too. */
static double energy_j(const struct wave *w, double s)
{
    double whole, rest, high_s;
    if (s < 0)
        return w->before_w * s;
    switch (w->kind) {
    case SQUARE:                                    /* high first, for `duty` of the period */
        high_s = w->duty * w->period_s;
        whole = floor(s / w->period_s);
        rest = s - whole * w->period_s;
        return whole * (w->b * high_s + w->a * (w->period_s - high_s)) + w->b * fmin(rest, high_s) +
               w->a * fmax(rest - high_s, 0);
    case RAMP:                                      /* and stays up there */
        rest = fmin(s, w->period_s);
        return w->a * rest + (w->b - w->a) * rest * rest / (2 * w->period_s) + w->b * (s - rest);
    case SINE:
        return w->a * s + w->b * w->period_s / (2 * M_PI) * (1 - cos(2 * M_PI * s / w->period_s));
    default:
        return w->a * s;
    }
}

static double mean_w(const struct wave *w, int64_t from_us, int64_t to_us)
{
    double a = since_origin_s(from_us), b = since_origin_s(to_us);
    return (energy_j(w, b) - energy_j(w, a)) / (b - a);
}

/* ---------------------------------------------------------------- the board's sensors */

/* The sensor's answer at t: the mean of the 20 ms around t - lag. */
static double sensed_w(int gpu, const struct wave *w, int64_t t_us)
{
    int64_t lag_us = (int64_t)(num(gpu, "lag_ms", 15) * 1e3);
    return mean_w(w, t_us - lag_us - 10000, t_us - lag_us + 10000);
}

static int64_t refreshed_us(int gpu)
{
    int64_t every = (int64_t)(num(gpu, "refresh_ms", 100) * 1e3);
    return every > 0 ? now_us() / every * every : now_us();
}

static unsigned milli(double watts) { return watts > 0 ? (unsigned)llround(watts * 1e3) : 0; }

static unsigned average_mw(int gpu)
{
    struct wave w = wave_of(gpu);
    int64_t t = refreshed_us(gpu);
    return milli(mean_w(&w, t - 1000000, t));
}

static unsigned instant_mw(int gpu)
{
    struct wave w = wave_of(gpu);
    return milli(sensed_w(gpu, &w, refreshed_us(gpu)));
}

/* The energy counter: at each tick it takes over the energy up to `lag` before the tick. */
static unsigned long long counter_mj(int gpu)
{
    struct wave w = wave_of(gpu);
    int64_t tick = (int64_t)(num(gpu, "tick_ms", 100) * 1e3), t = now_us();
    int64_t phase = (int64_t)(num(gpu, "tick_phase_ms", 0) * 1e3);
    if (tick > 0)
        t = (t - phase) / tick * tick + phase;
    double j = energy_j(&w, since_origin_s(t) - num(gpu, "counter_lag_ms", 9) / 1e3);
    double base_j = num(gpu, "counter_base_mj", 9e6) / 1e3;
    const char *zeroing[] = {"counter_reset_at_s", "restart_at_s"};
    int64_t zeroed_at = INT64_MIN;
    for (int i = 0; i < 2; i++) {
        int64_t at = moment_us(gpu, zeroing[i]);
        if (at <= t && at > zeroed_at) {            /* the later of those that have happened */
            zeroed_at = at;
            base_j = -energy_j(&w, since_origin_s(at));
        }
    }
    return is(gpu, "energy", "zero") ? 0 : (unsigned long long)llround(fmax(j + base_j, 0) * 1e3);
}

static uint64_t hash(uint64_t x)                    /* splitmix64 */
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* The driver means to sample every 20 ms. As recorded: most points are on time, some ~3 ms or ~10 ms late, about one
 * in eighty is missing (never two in a row). Spacing then is 8 to 46 ms around a median of 20. */
static bool grid_missing(int gpu, int64_t k)
{
    return hash((uint64_t)k * 2 + 1 + ((uint64_t)gpu << 56)) % 80 == 0;
}

static bool grid_point(int gpu, int64_t k, int64_t grid_us, int64_t *t_us)
{
    uint64_t r = hash((uint64_t)k * 2 + ((uint64_t)gpu << 56)), kind = r % 1000, frac = (r >> 32) % 1000;
    int64_t late_us = kind < 620 ? frac / 10 : kind < 850 ? 2000 + frac * 7 / 2 : 9000 + frac * 3;
    bool missing = grid_missing(gpu, k), before_missing = grid_missing(gpu, k - 1);
    if (before_missing && late_us > 6000)
        late_us = 6000;
    if (is(gpu, "jitter", "off")) {
        late_us = 0;
        missing = false;
    }
    *t_us = k * grid_us + late_us * grid_us / 20000;
    return !missing || before_missing;
}

static bool lost_at(int gpu, int64_t t_us)
{
    if (num(ALL, "lost_gpu", gpu) != gpu)
        return false;
    return t_us >= moment_us(gpu, "lost_at_s") && t_us < moment_us(gpu, "back_at_s");
}

/* The ring as it is now, oldest first, of samples stamped after `last_us`; returns how many. */
static unsigned ring(int gpu, uint64_t last_us, nvmlSample_t out[MAX_RING])
{
    struct wave w = wave_of(gpu);
    int64_t times[MAX_RING], now = now_us(), frozen = moment_us(gpu, "ring_freeze_at_s");
    int64_t restart = moment_us(gpu, "restart_at_s"), oldest = restart <= now ? restart : boot_us;
    int64_t grid_us = (int64_t)(num(gpu, "ring_ms", 20) * 1e3), t;
    int len = (int)fmin(num(gpu, "ring_len", 119), MAX_RING), n = 0;
    unsigned newer = 0;
    for (int64_t k = (frozen < now ? frozen : now) / grid_us; n < len && k * grid_us >= oldest; k--)
        if (grid_point(gpu, k, grid_us, &t) && t <= now && t < frozen && !lost_at(gpu, t))
            times[n++] = t;
    while (n-- > 0) {
        uint64_t stamp = (uint64_t)stamp_us(times[n]);
        if (stamp > last_us) {
            unsigned mw = is(gpu, "ring", "zero") ? 0 : milli(sensed_w(gpu, &w, times[n]));
            out[newer++] = (nvmlSample_t){stamp, {.ull = mw}};
        }
    }
    return newer;
}
