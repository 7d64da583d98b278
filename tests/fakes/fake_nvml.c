/* A libnvidia-ml.so.1 without a GPU: the part of NVML's ABI that nvidia-ml-py calls, over a simulated board.
 *
 * A scenario (lines of `key=value`; any key may be narrowed to one device: `gpu1.wave=...`) says what power the
 * boards draw, what their sensors can do and what goes wrong when. nvml.py lists the keys; fake_board.h is the board;
 * here are the entry points: who may call, and what they answer. Symbol names follow pynvml.py 13.615.
 */
#include "fake_board.h"

/* ---------------------------------------------------------------- entering and leaving */

struct counter { const char *name; unsigned long calls; struct counter *next; };
static struct counter *counters;

struct guard { double cost_us; };                   /* what the call costs: slept after the lock is released */

static void leave(struct guard *g)
{
    pthread_mutex_unlock(&mutex);
    if (g->cost_us > 0) {
        struct timespec ts = {(time_t)(g->cost_us / 1e6), (long)fmod(g->cost_us * 1e3, 1e9)};
        nanosleep(&ts, NULL);
    }
}

static void count_call(struct counter *c)
{
    if (c->calls++ == 0) {
        c->next = counters;
        counters = c;
    }
}

/* The first line of every entry point: take the lock until the function returns, and count the call. */
#define ENTER_QUIETLY() \
    struct guard guard __attribute__((cleanup(leave), unused)) = {0}; \
    pthread_mutex_lock(&mutex)
#define ENTER() \
    static struct counter counter = {__func__, 0, NULL}; \
    ENTER_QUIETLY(); \
    count_call(&counter)
#define CHECK(result) do { nvmlReturn_t ret_ = (result); if (ret_ != OK) return ret_; } while (0)
#define REQUIRE(condition, otherwise) CHECK((condition) ? OK : (otherwise))

/* ---------------------------------------------------------------- who may call, and whether it answers */

static int gpu_count(void)
{
    int n = (int)num(ALL, "gpus", 1);
    return n < 0 ? 0 : n > MAX_GPUS ? MAX_GPUS : n;
}

static int mig_count(int gpu)
{
    int n = (int)num(gpu, "mig", 0);
    return n < 0 ? 0 : n > MAX_MIG ? MAX_MIG : n;
}

/* NVML is up: initialised, and the driver was not restarted since. */
static nvmlReturn_t alive(void)
{
    int64_t restart = moment_us(ALL, "restart_at_s");
    if (init_count == 0 || (now_us() >= restart && init_us < restart))
        return UNINITIALIZED;
    return OK;
}

/* The handle is one of ours and its GPU is on the bus. */
static nvmlReturn_t reachable(nvmlDevice_t dev)
{
    CHECK(alive());
    bool whole = dev >= gpus && dev < gpus + gpu_count();
    bool slice = dev >= &migs[0][0] && dev < &migs[0][0] + MAX_GPUS * MAX_MIG && dev->gpu < gpu_count() &&
                 dev->mig < mig_count(dev->gpu);
    REQUIRE(whole || slice, INVALID_ARGUMENT);
    return lost_at(dev->gpu, now_us()) ? GPU_IS_LOST : OK;
}

/* ... and may be asked for `key`. The sensors belong to the whole GPU: a MIG slice has none. */
static nvmlReturn_t readable(nvmlDevice_t dev, const char *key)
{
    int64_t now = now_us();
    CHECK(reachable(dev));
    REQUIRE(dev->mig < 0 || !strcmp(key, "memory") || !strcmp(key, "processes"), NOT_SUPPORTED);
    REQUIRE(now < moment_us(dev->gpu, "denied_at_s") || now >= moment_us(dev->gpu, "back_at_s"), NO_PERMISSION);
    return gate(dev->gpu, key);
}

#define ENTER_DEVICE(dev) ENTER(); CHECK(reachable(dev)); const int gpu __attribute__((unused)) = (dev)->gpu
#define ENTER_READ(dev, key, cost) \
    ENTER(); \
    if (init_count) guard.cost_us = (cost); \
    CHECK(readable(dev, key)); \
    const int gpu __attribute__((unused)) = (dev)->gpu
#define TELEMETRY_COST cost_us("cost.telemetry_us", 0)

/* Whole entry points that answer one number: of the device itself, or of its telemetry. */
#define IDENTITY(function, expression) \
    nvmlReturn_t function(nvmlDevice_t dev, unsigned *out) \
    { \
        ENTER_DEVICE(dev); \
        *out = (unsigned)(expression); \
        return OK; \
    }
#define GETTER(function, type, key, expression) \
    nvmlReturn_t function(nvmlDevice_t dev, type *out) \
    { \
        ENTER_READ(dev, key, TELEMETRY_COST); \
        *out = (type)(expression); \
        return OK; \
    }

/* ---------------------------------------------------------------- exported for the tests (nvml.py) */

/* `state_file=/PATH`: limits and locks outlive the process that set them, and others see them, as a driver's do. */
static void share_control(void)
{
    const char *path = get(ALL, "state_file");
    if (control != own_control)
        munmap(control, CONTROL_SIZE);
    control = own_control;
    if (!path || path[0] != '/')
        return;
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0)
        return;
    void *at = ftruncate(fd, (off_t)CONTROL_SIZE) == 0
                   ? mmap(NULL, CONTROL_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    close(fd);
    if (at != MAP_FAILED)
        control = at;
}

/* 0, or the (1-based) number of the first line that is no scenario; then nothing changes. */
static int set_scenario(const char *new_text)
{
    static char draft[sizeof text];
    struct wave w;
    int n = 0, line = 0;
    char *rest = draft, *at;
    if (strlen(new_text) >= sizeof draft)
        return 1;
    strcpy(draft, new_text);
    for (int pass = 0; pass < 2; pass++) {          /* first check a copy, then take it */
        while ((at = strsep(&rest, "\n"))) {
            char *equals = strchr(at, '='), known[64];
            line++;
            if (at[0] == '\0' || at[0] == '#')
                continue;
            if (!equals || n >= MAX_PAIRS)
                return line;
            *equals = '\0';
            int prefix = 0;
            sscanf(at, "gpu%*u.%n", &prefix);
            snprintf(known, sizeof known, " %s ", at + prefix);
            if (!strstr(KNOWN_KEYS, known) || (!strcmp(at + prefix, "wave") && !parse_wave(equals + 1, &w)))
                return line;
            if (pass) {
                pairs[n].key = at;
                pairs[n].value = equals + 1;
            }
            n++;
        }
        if (pass == 0) {
            strcpy(text, new_text);
            rest = text;
            n = line = 0;
        }
    }
    n_pairs = n;
    have_scenario = true;
    share_control();
    if (!get(ALL, "origin_us") || !boot_us)         /* a given origin continues the history it belongs to */
        anchor();
    return 0;
}

int fake_nvml_scenario(const char *new_text)
{
    ENTER_QUIETLY();
    return set_scenario(new_text);
}

/* Set the virtual clock; 0 goes back to the real one. Changing from one to the other starts a new history. */
void fake_nvml_set_time_us(uint64_t epoch_us)
{
    ENTER_QUIETLY();
    bool change = !virtual_us != !epoch_us;
    virtual_us = (int64_t)epoch_us;
    if (change) {
        anchor();
        init_us = anchor_us;
    }
}

/* The wall clock of this world, with its step; and the steady clock below it. */
uint64_t fake_nvml_epoch_us(void) { ENTER_QUIETLY(); return (uint64_t)stamp_us(now_us()); }
uint64_t fake_nvml_time_us(void) { ENTER_QUIETLY(); return (uint64_t)now_us(); }
uint64_t fake_nvml_origin_us(void) { ENTER_QUIETLY(); return (uint64_t)origin_us(); }

/* Joules truly drawn between two times (of the steady clock). */
double fake_nvml_true_joules(int gpu, uint64_t from_us, uint64_t to_us)
{
    ENTER_QUIETLY();
    struct wave w = wave_of(gpu);
    return energy_j(&w, since_origin_s((int64_t)to_us)) - energy_j(&w, since_origin_s((int64_t)from_us));
}

unsigned long fake_nvml_calls(const char *name)
{
    ENTER_QUIETLY();
    unsigned long calls = 0;
    for (struct counter *c = counters; c; c = c->next)
        if (!strcmp(c->name, name))
            calls += c->calls;
    return calls;
}

/* min << 32 | max, MHz; 0 when the clocks are not locked. */
uint64_t fake_nvml_locked_clocks(unsigned i)
{
    ENTER_QUIETLY();
    return i < MAX_GPUS ? (uint64_t)control[i].lock_min_mhz << 32 | control[i].lock_max_mhz : 0;
}

void fake_nvml_reset(void)
{
    ENTER_QUIETLY();
    while (counters) {                              /* uncounted is also unlinked: see count_call */
        counters->calls = 0;
        counters = counters->next;
    }
    n_pairs = init_count = 0;
    share_control();                                /* without a scenario: back to our own */
    memset(own_control, 0, sizeof own_control);
    virtual_us = 0;
    have_scenario = true;                           /* the default board, whatever the environment says */
    anchor();
}

/* ---------------------------------------------------------------- library and system */

static nvmlReturn_t scenario_from_environment(void)
{
    static char file_text[sizeof text];
    const char *v = getenv("FAKE_NVML_SCENARIO");
    if (v && v[0] == '@') {
        FILE *f = fopen(v + 1, "r");
        REQUIRE(f, UNKNOWN);
        file_text[fread(file_text, 1, sizeof file_text - 1, f)] = '\0';
        fclose(f);
        v = file_text;
    }
    int bad = set_scenario(v ? v : "");
    if (bad)
        fprintf(stderr, "fake_nvml: line %d of FAKE_NVML_SCENARIO is not understood\n", bad);
    return bad ? UNKNOWN : OK;
}

static nvmlReturn_t init(void)
{
    if (!have_scenario)
        CHECK(scenario_from_environment());
    REQUIRE(!is(ALL, "init", "driver_not_loaded"), DRIVER_NOT_LOADED);
    REQUIRE(!is(ALL, "init", "lib_mismatch"), LIB_RM_VERSION_MISMATCH);
    REQUIRE(!is(ALL, "init", "absent"), LIBRARY_NOT_FOUND);
    int64_t now = now_us(), restart = moment_us(ALL, "restart_at_s");
    REQUIRE(now < restart || (double)(now - restart) >= num(ALL, "restart_s", 0) * 1e6, DRIVER_NOT_LOADED);
    for (int i = 0; i < MAX_GPUS; i++) {
        gpus[i] = (struct nvmlDevice){i, -1};
        for (int j = 0; j < MAX_MIG; j++)
            migs[i][j] = (struct nvmlDevice){i, j};
    }
    if (now >= restart && init_us < restart)        /* a restarted driver has forgotten limits and locks */
        memset(control, 0, CONTROL_SIZE);
    init_count++;
    init_us = now;
    return OK;
}

nvmlReturn_t nvmlInit_v2(void) { ENTER(); return init(); }
nvmlReturn_t nvmlInitWithFlags(unsigned flags) { (void)flags; ENTER(); return init(); }

nvmlReturn_t nvmlShutdown(void)
{
    ENTER();
    REQUIRE(init_count > 0, UNINITIALIZED);
    init_count--;
    return OK;
}

const char *nvmlErrorString(nvmlReturn_t r)
{
    switch (r) {
    case OK: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case LIBRARY_NOT_FOUND: return "NVML Shared Library Not Found";
    case GPU_IS_LOST: return "GPU is lost";
    case LIB_RM_VERSION_MISMATCH: return "Driver/library version mismatch";
    default: return "Unknown Error";
    }
}

static nvmlReturn_t give(char *buffer, unsigned size, const char *s)
{
    REQUIRE(strlen(s) < size, INSUFFICIENT_SIZE);
    strcpy(buffer, s);
    return OK;
}

static nvmlReturn_t give_key(char *buffer, unsigned size, const char *key, const char *otherwise)
{
    CHECK(alive());
    return give(buffer, size, get(ALL, key) ? get(ALL, key) : otherwise);
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *s, unsigned n)
{
    ENTER();
    return give_key(s, n, "driver_version", "580.95.05");
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *s, unsigned n)
{
    ENTER();
    return give_key(s, n, "nvml_version", "13.580.95.05");
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    ENTER();
    CHECK(alive());
    *version = (int)num(ALL, "cuda_version", 13000);
    return OK;
}
nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *v) { return nvmlSystemGetCudaDriverVersion_v2(v); }

/* ---------------------------------------------------------------- devices and who they are */

static void uuid_of(nvmlDevice_t dev, char out[96])
{
    const char *given = get(dev->gpu, "uuid");
    if (dev->mig >= 0)
        snprintf(out, 96, "MIG-00000000-0000-0000-%04d-%012d", dev->gpu, dev->mig);
    else if (given)
        snprintf(out, 96, "%s", given);
    else
        snprintf(out, 96, "GPU-00000000-0000-0000-0000-%012d", dev->gpu);
}

static unsigned bus_of(int gpu) { return 0x18 + (unsigned)gpu; }

static nvmlReturn_t handle(nvmlDevice_t dev, nvmlDevice_t *out)
{
    CHECK(reachable(dev));
    *out = dev;
    return OK;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count)
{
    ENTER();
    CHECK(alive());
    *count = (unsigned)gpu_count();
    return OK;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned i, nvmlDevice_t *out)
{
    ENTER();
    CHECK(alive());
    REQUIRE(i < (unsigned)gpu_count(), INVALID_ARGUMENT);
    return handle(&gpus[i], out);
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *out)
{
    char own[96];
    ENTER();
    CHECK(alive());
    for (int i = 0; i < gpu_count(); i++) {
        for (int j = -1; j < mig_count(i); j++) {
            nvmlDevice_t dev = j < 0 ? &gpus[i] : &migs[i][j];
            uuid_of(dev, own);
            if (!strcasecmp(own, uuid))
                return handle(dev, out);
        }
    }
    return NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *id, nvmlDevice_t *out)
{
    unsigned domain, bus, device;
    ENTER();
    CHECK(alive());
    REQUIRE(sscanf(id, "%x:%x:%x", &domain, &bus, &device) == 3, INVALID_ARGUMENT);
    for (int i = 0; i < gpu_count(); i++)
        if (domain == 0 && bus == bus_of(i) && device == 0)
            return handle(&gpus[i], out);
    return NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t dev, char *buffer, unsigned size)
{
    char name[96];
    ENTER_DEVICE(dev);
    const char *given = get(gpu, "name");
    snprintf(name, sizeof name, "%.80s%s", given ? given : "NVIDIA H200", dev->mig < 0 ? "" : " MIG 1g.18gb");
    return give(buffer, size, name);
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t dev, char *buffer, unsigned size)
{
    char uuid[96];
    ENTER_DEVICE(dev);
    uuid_of(dev, uuid);
    return give(buffer, size, uuid);
}

IDENTITY(nvmlDeviceGetIndex, dev->mig < 0 ? gpu : dev->mig)
IDENTITY(nvmlDeviceGetMinorNumber, gpu)
IDENTITY(nvmlDeviceGetPersistenceMode, num(gpu, "persistence_mode", 1))
IDENTITY(nvmlDeviceIsMigDeviceHandle, dev->mig >= 0)
IDENTITY(nvmlDeviceGetMaxMigDeviceCount, mig_count(gpu) > 0 ? MAX_MIG : 0)

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t dev, nvmlPciInfo_t *pci)
{
    ENTER_DEVICE(dev);
    *pci = (nvmlPciInfo_t){.bus = bus_of(gpu), .device_id = 0x233510de, .subsystem_id = 0x18be10de};
    snprintf(pci->legacy_id, sizeof pci->legacy_id, "0000:%02X:00.0", bus_of(gpu));
    snprintf(pci->id, sizeof pci->id, "00000000:%02X:00.0", bus_of(gpu));
    return OK;
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t dev, int *major, int *minor)
{
    ENTER_DEVICE(dev);
    const char *v = get(gpu, "compute_capability");
    REQUIRE(sscanf(v ? v : "9.0", "%d.%d", major, minor) == 2, UNKNOWN);
    return OK;
}

/* MIG: `mig=N` cuts a GPU into N slices, `mig=0` (the default) has the mode off, `mig=off` lacks it. */
nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t dev, unsigned *current, unsigned *pending)
{
    ENTER_DEVICE(dev);
    CHECK(gate(gpu, "mig"));
    *current = *pending = mig_count(gpu) > 0;
    return OK;
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t dev, unsigned i, nvmlDevice_t *out)
{
    ENTER_DEVICE(dev);
    REQUIRE(dev->mig < 0 && i < MAX_MIG, INVALID_ARGUMENT);
    REQUIRE(i < (unsigned)mig_count(gpu), NOT_FOUND);
    return handle(&migs[gpu][i], out);
}

nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t dev, nvmlDevice_t *out)
{
    ENTER_DEVICE(dev);
    REQUIRE(dev->mig >= 0, INVALID_ARGUMENT);
    return handle(&gpus[gpu], out);
}

/* ---------------------------------------------------------------- power and energy */

nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t dev, unsigned type, unsigned long long last_us, unsigned *value_type,
                                  unsigned *count, nvmlSample_t *samples)
{
    nvmlSample_t found[MAX_RING];
    ENTER_READ(dev, "ring", samples ? cost_us("cost.samples_us", 500) : 0);
    REQUIRE(type == 0, NOT_SUPPORTED);              /* NVML_TOTAL_POWER_SAMPLES */
    REQUIRE(value_type && count && (!samples || *count), INVALID_ARGUMENT);
    unsigned n = ring(gpu, last_us, found);
    REQUIRE(n > 0, NOT_FOUND);
    *value_type = TYPE_UINT;
    if (!samples) {
        *count = n;
        return OK;
    }
    if (n > *count)                                 /* grown since the size was asked: the rest comes next time */
        n = *count;
    memcpy(samples, found, n * sizeof *samples);
    *count = n;
    return OK;
}

nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t dev, unsigned long long *mj)
{
    ENTER_READ(dev, "energy", cost_us("cost.energy_us", 3000));
    *mj = counter_mj(gpu);
    return OK;
}

nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t dev, unsigned *mw)
{
    ENTER_READ(dev, "power", cost_us("cost.power_us", 0));
    *mw = is(gpu, "power", "zero") ? 0 : average_mw(gpu);
    return OK;
}

/* Limits: what the board allows, what was set, what holds. */
static unsigned limit_max_mw(int gpu) { return milli(num(gpu, "limit_max_w", 700)); }
static unsigned limit_min_mw(int gpu) { return milli(num(gpu, "limit_min_w", 200)); }
static unsigned limit_default_mw(int gpu) { return milli(num(gpu, "limit_w", 700)); }
static unsigned limit_mw(int gpu) { return control[gpu].limit_mw ? control[gpu].limit_mw : limit_default_mw(gpu); }
static unsigned limit_enforced_mw(int gpu)
{
    unsigned other = milli(num(gpu, "enforced_limit_w", 1e6)); /* e.g. a limit out of band */
    return limit_mw(gpu) < other ? limit_mw(gpu) : other;
}

GETTER(nvmlDeviceGetPowerManagementLimit, unsigned, "limit", limit_mw(gpu))
GETTER(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, "limit", limit_default_mw(gpu))
GETTER(nvmlDeviceGetEnforcedPowerLimit, unsigned, "limit", limit_enforced_mw(gpu))

nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t dev, unsigned *min_mw, unsigned *max_mw)
{
    ENTER_READ(dev, "limit", TELEMETRY_COST);
    *min_mw = limit_min_mw(gpu);
    *max_mw = limit_max_mw(gpu);
    return OK;
}

/* `fault.limit=SKIP:COUNT:CODE[:applied]`: after SKIP calls for this GPU, COUNT of them answer CODE; "applied": and
 * make the change all the same, as a call may that was interrupted half-way. */
static nvmlReturn_t fault(int gpu, const char *key, unsigned *calls, bool *apply)
{
    unsigned skip = 0, count = 0, code = UNKNOWN, n = (*calls)++;
    const char *v = get(gpu, key);
    *apply = true;
    if (!v || sscanf(v, "%u:%u:%u", &skip, &count, &code) < 2 || n < skip || n - skip >= count)
        return OK;
    *apply = strstr(v, ":applied") != NULL;
    return (nvmlReturn_t)code;
}

#define CONTROL_COST cost_us("cost.control_us", 0)

nvmlReturn_t nvmlDeviceSetPowerManagementLimit(nvmlDevice_t dev, unsigned mw)
{
    bool apply;
    ENTER_READ(dev, "control", CONTROL_COST);
    REQUIRE(mw >= limit_min_mw(gpu) && mw <= limit_max_mw(gpu), INVALID_ARGUMENT);
    nvmlReturn_t answer = fault(gpu, "fault.limit", &control[gpu].limit_calls, &apply);
    unsigned step = milli(num(gpu, "limit_step_w", 0)); /* a driver that rounds */
    if (apply)
        control[gpu].limit_mw = step ? mw / step * step : mw;
    return answer;
}

/* ---------------------------------------------------------------- clocks, and why they are not higher */

static unsigned clock_mhz(int gpu, unsigned type, bool highest)
{
    static const struct { const char *key; unsigned mhz; } clocks[] = {
        {"clock.graphics", 1980}, {"clock.sm", 1980}, {"clock.mem", 3201}, {"clock.video", 1545}};
    unsigned mhz = (unsigned)num(gpu, clocks[type].key, clocks[type].mhz);
    unsigned low = control[gpu].lock_min_mhz, high = control[gpu].lock_max_mhz;
    if (highest)
        return clocks[type].mhz;
    if (type > 1 || !high)                          /* a lock holds the graphics and SM clocks */
        return mhz;
    return mhz > high ? high : mhz < low ? low : mhz;
}

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t dev, unsigned type, unsigned *mhz)
{
    ENTER_READ(dev, "clocks", TELEMETRY_COST);
    REQUIRE(type < 4, INVALID_ARGUMENT);
    *mhz = clock_mhz(gpu, type, false);
    return OK;
}

nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t dev, unsigned type, unsigned *mhz)
{
    ENTER_READ(dev, "clocks", TELEMETRY_COST);
    REQUIRE(type < 4, INVALID_ARGUMENT);
    *mhz = clock_mhz(gpu, type, true);
    return OK;
}

nvmlReturn_t nvmlDeviceSetGpuLockedClocks(nvmlDevice_t dev, unsigned min_mhz, unsigned max_mhz)
{
    bool apply;
    ENTER_READ(dev, "control", CONTROL_COST);
    REQUIRE(min_mhz <= max_mhz && max_mhz > 0, INVALID_ARGUMENT);
    nvmlReturn_t answer = fault(gpu, "fault.lock", &control[gpu].lock_calls, &apply);
    if (apply) {
        control[gpu].lock_min_mhz = min_mhz;
        control[gpu].lock_max_mhz = max_mhz;
    }
    return answer;
}

nvmlReturn_t nvmlDeviceResetGpuLockedClocks(nvmlDevice_t dev)
{
    bool apply;
    ENTER_READ(dev, "control", CONTROL_COST);
    nvmlReturn_t answer = fault(gpu, "fault.unlock", &control[gpu].unlock_calls, &apply);
    if (apply)
        control[gpu].lock_min_mhz = control[gpu].lock_max_mhz = 0;
    return answer;
}

/* ---------------------------------------------------------------- power smoothing and workload power profiles */

/* Blackwell's, so only with `smoothing=on` and `profiles=MASK`. Layouts: pynvml.py, c_nvmlPowerSmoothingProfile_v1_t ... */
typedef struct { unsigned version, profile, param; double value; } nvmlPowerSmoothingProfile_t;
typedef struct { unsigned version, state; } nvmlPowerSmoothingState_t;
typedef struct { unsigned version, perf[8], requested[8], enforced[8]; } nvmlCurrentProfiles_t;
typedef struct { unsigned version, requested[8]; } nvmlRequestedProfiles_t;

static const double PRESET[PARAMETERS] = {30, 500, 400, 100}; /* % of the highest power, W/s, W/s, ms */

static double preset_value(int gpu, unsigned preset, unsigned param)
{
    return PRESET[param] + control[gpu].preset[preset][param];
}

nvmlReturn_t nvmlDevicePowerSmoothingUpdatePresetProfileParam(nvmlDevice_t dev, nvmlPowerSmoothingProfile_t *p)
{
    bool apply;
    ENTER_READ(dev, "control", CONTROL_COST);
    REQUIRE(get(gpu, "smoothing"), NOT_SUPPORTED);
    REQUIRE(p->version == 0x1000018, VERSION_MISMATCH);
    REQUIRE(p->profile < PRESETS && p->param < PARAMETERS && p->value >= 0, INVALID_ARGUMENT);
    nvmlReturn_t answer = fault(gpu, "fault.smooth", &control[gpu].smooth_calls, &apply);
    if (apply)
        control[gpu].preset[p->profile][p->param] = p->value - PRESET[p->param];
    return answer;
}

nvmlReturn_t nvmlDevicePowerSmoothingActivatePresetProfile(nvmlDevice_t dev, nvmlPowerSmoothingProfile_t *p)
{
    bool apply;
    ENTER_READ(dev, "control", CONTROL_COST);
    REQUIRE(get(gpu, "smoothing"), NOT_SUPPORTED);
    REQUIRE(p->version == 0x1000018, VERSION_MISMATCH);
    REQUIRE(p->profile < PRESETS, INVALID_ARGUMENT);
    nvmlReturn_t answer = fault(gpu, "fault.smooth", &control[gpu].smooth_calls, &apply);
    if (apply)
        control[gpu].smooth_preset = p->profile;
    return answer;
}

nvmlReturn_t nvmlDevicePowerSmoothingSetState(nvmlDevice_t dev, nvmlPowerSmoothingState_t *s)
{
    bool apply;
    ENTER_READ(dev, "control", CONTROL_COST);
    REQUIRE(get(gpu, "smoothing"), NOT_SUPPORTED);
    REQUIRE(s->version == 0x1000008, VERSION_MISMATCH);
    REQUIRE(s->state <= 1, INVALID_ARGUMENT);
    nvmlReturn_t answer = fault(gpu, "fault.smooth", &control[gpu].smooth_calls, &apply);
    if (apply)
        control[gpu].smooth_on = s->state;
    return answer;
}

nvmlReturn_t nvmlDeviceWorkloadPowerProfileGetCurrentProfiles(nvmlDevice_t dev, nvmlCurrentProfiles_t *out)
{
    ENTER_READ(dev, "profiles", TELEMETRY_COST);
    REQUIRE(get(gpu, "profiles"), NOT_SUPPORTED);
    REQUIRE(out->version == 0x1000064, VERSION_MISMATCH);
    out->perf[0] = (unsigned)num(gpu, "profiles", 0);
    memcpy(out->requested, control[gpu].requested, sizeof out->requested);
    memcpy(out->enforced, control[gpu].requested, sizeof out->enforced);
    return OK;
}

static nvmlReturn_t change_profiles(int gpu, nvmlRequestedProfiles_t *asked, bool set)
{
    bool apply;
    REQUIRE(get(gpu, "profiles"), NOT_SUPPORTED);
    REQUIRE(asked->version == 0x1000024, VERSION_MISMATCH);
    nvmlReturn_t answer = fault(gpu, "fault.profile", &control[gpu].profile_calls, &apply);
    for (int i = 0; apply && i < 8; i++) {
        unsigned now = control[gpu].requested[i];
        control[gpu].requested[i] = set ? now | asked->requested[i] : now & ~asked->requested[i];
    }
    return answer;
}

nvmlReturn_t nvmlDeviceWorkloadPowerProfileSetRequestedProfiles(nvmlDevice_t dev, nvmlRequestedProfiles_t *asked)
{
    ENTER_READ(dev, "control", CONTROL_COST);
    return change_profiles(gpu, asked, true);
}

nvmlReturn_t nvmlDeviceWorkloadPowerProfileClearRequestedProfiles(nvmlDevice_t dev, nvmlRequestedProfiles_t *asked)
{
    ENTER_READ(dev, "control", CONTROL_COST);
    return change_profiles(gpu, asked, false);
}

/* What clocks there are to lock to: every 15 MHz from 345 (an H200's, `nvidia-smi -q -d SUPPORTED_CLOCKS`). */
enum { CLOCK_LOW_MHZ = 345, CLOCK_STEP_MHZ = 15 };

nvmlReturn_t nvmlDeviceGetSupportedMemoryClocks(nvmlDevice_t dev, unsigned *count, unsigned *mhz)
{
    ENTER_READ(dev, "clocks", TELEMETRY_COST);
    unsigned room = mhz ? *count : 0;
    *count = 1;
    REQUIRE(room >= 1, INSUFFICIENT_SIZE);
    mhz[0] = clock_mhz(gpu, 2, true);
    return OK;
}

nvmlReturn_t nvmlDeviceGetSupportedGraphicsClocks(nvmlDevice_t dev, unsigned memory_mhz, unsigned *count, unsigned *mhz)
{
    ENTER_READ(dev, "clocks", TELEMETRY_COST);
    REQUIRE(memory_mhz == clock_mhz(gpu, 2, true), NOT_FOUND);
    unsigned room = mhz ? *count : 0, highest = clock_mhz(gpu, 0, true);
    *count = (highest - CLOCK_LOW_MHZ) / CLOCK_STEP_MHZ + 1;
    REQUIRE(room >= *count, INSUFFICIENT_SIZE);
    for (unsigned i = 0; i < *count; i++)
        mhz[i] = highest - i * CLOCK_STEP_MHZ;
    return OK;
}

typedef unsigned long long reasons_t;               /* bits; "throttle reasons" is the older name of the same */
GETTER(nvmlDeviceGetCurrentClocksEventReasons, reasons_t, "reasons", num(gpu, "reasons", 0))
GETTER(nvmlDeviceGetCurrentClocksThrottleReasons, reasons_t, "reasons", num(gpu, "reasons", 0))
GETTER(nvmlDeviceGetSupportedClocksEventReasons, reasons_t, "reasons", num(gpu, "supported_reasons", 0x1ff))
GETTER(nvmlDeviceGetSupportedClocksThrottleReasons, reasons_t, "reasons", num(gpu, "supported_reasons", 0x1ff))

/* Nanoseconds throttled since the origin: `throttled.power=0.25` is a quarter of the time. */
static unsigned long long throttled_ns(int gpu, const char *key)
{
    return (unsigned long long)llround(fmax(since_origin_s(now_us()), 0) * 1e9 * num(gpu, key, 0));
}

static const char *const POLICIES[] = {"throttled.power", "throttled.thermal", "throttled.sync_boost",
                                       "throttled.board_limit", "throttled.low_utilization", "throttled.reliability"};

nvmlReturn_t nvmlDeviceGetViolationStatus(nvmlDevice_t dev, unsigned policy, nvmlViolationTime_t *out)
{
    ENTER_READ(dev, "violation", TELEMETRY_COST);
    REQUIRE(policy < sizeof POLICIES / sizeof *POLICIES, NOT_SUPPORTED);
    *out = (nvmlViolationTime_t){(unsigned long long)stamp_us(now_us()), throttled_ns(gpu, POLICIES[policy])};
    return OK;
}

/* ---------------------------------------------------------------- the other telemetry */

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t dev, unsigned sensor, unsigned *celsius)
{
    ENTER_READ(dev, "temperature", TELEMETRY_COST);
    REQUIRE(sensor == 0, INVALID_ARGUMENT);
    *celsius = (unsigned)num(gpu, "temperature_c", 45);
    return OK;
}

nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t dev, nvmlTemperature_v1_t *out)
{
    ENTER_READ(dev, "temperature", TELEMETRY_COST);
    REQUIRE(out->version == 0x100000c, VERSION_MISMATCH);
    REQUIRE(out->sensor == 0, INVALID_ARGUMENT);
    out->temperature = (int)num(gpu, "temperature_c", 45);
    return OK;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t dev, nvmlUtilization_t *out)
{
    ENTER_READ(dev, "utilization", TELEMETRY_COST);
    REQUIRE(mig_count(gpu) == 0, NOT_SUPPORTED);    /* as NVML documents for GPUs in MIG mode */
    out->gpu = (unsigned)num(gpu, "utilization_pct", 0);
    out->memory = (unsigned)num(gpu, "memory_utilization_pct", 0);
    return OK;
}

static nvmlMemory_v2_t memory_of(nvmlDevice_t dev)
{
    const double MIB = 1024 * 1024, slices = dev->mig < 0 ? 1 : MAX_MIG;
    nvmlMemory_v2_t m = {.version = 0x02000028};
    m.total = (unsigned long long)(num(dev->gpu, "memory_total_mib", 143771) * MIB / slices);
    m.used = (unsigned long long)(num(dev->gpu, "memory_used_mib", 0) * MIB / slices);
    m.reserved = (unsigned long long)(600 * MIB / slices);
    m.free = m.total - m.used - m.reserved;
    return m;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t dev, nvmlMemory_t *out)
{
    ENTER_READ(dev, "memory", TELEMETRY_COST);
    nvmlMemory_v2_t m = memory_of(dev);
    *out = (nvmlMemory_t){m.total, m.free, m.used + m.reserved}; /* version 1 counts the reserved as used */
    return OK;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t dev, nvmlMemory_v2_t *out)
{
    ENTER_READ(dev, "memory", TELEMETRY_COST);
    REQUIRE(out->version == 0x02000028, VERSION_MISMATCH);
    *out = memory_of(dev);
    return OK;
}

/* `processes=PID:MIB,PID:MIB` */
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t dev, unsigned *count, nvmlProcessInfo_t *out)
{
    ENTER_READ(dev, "processes", TELEMETRY_COST);
    unsigned room = out ? *count : 0, n = 0, pid;
    double mib;
    int used;
    for (const char *v = get(gpu, "processes"); v && sscanf(v, "%u:%lf%n", &pid, &mib, &used) == 2; n++) {
        if (n < room)
            out[n] = (nvmlProcessInfo_t){pid, (unsigned long long)(mib * 1024 * 1024), UINT_MAX, UINT_MAX};
        v += used;
        v = *v == ',' ? v + 1 : NULL;
    }
    *count = n;
    return n > room ? INSUFFICIENT_SIZE : OK;
}

/* ---------------------------------------------------------------- field values: many readings, one call */

static nvmlReturn_t set_ull(nvmlFieldValue_t *f, unsigned long long v)
{
    f->type = TYPE_ULL;
    f->value.ull = v;
    return OK;
}

static nvmlReturn_t set_uint(nvmlFieldValue_t *f, double v)
{
    set_ull(f, (unsigned)v);                        /* the upper half of the union is zero either way */
    f->type = TYPE_UINT;
    return OK;
}

static nvmlReturn_t power_field(int gpu, nvmlFieldValue_t *f, unsigned mw)
{
    double share = 1;
    if (f->scope == SCOPE_MODULE) {
        CHECK(gate(gpu, "module"));
        share = num(gpu, "module_factor", 1.1);
    } else if (f->scope == SCOPE_MEMORY) {
        REQUIRE(f->id == 185, NOT_SUPPORTED);       /* recorded: HBM power has an average only */
        CHECK(gate(gpu, "hbm"));
        share = num(gpu, "hbm_fraction", 0.1);
    } else {
        REQUIRE(f->scope == SCOPE_GPU, INVALID_ARGUMENT);
    }
    return set_uint(f, round(mw * share));
}

/* NVML_FI_PWR_SMOOTHING_*: the scope of a preset's parameter is the preset; ramps are read in mW/s. */
static nvmlReturn_t smoothing_field(int gpu, nvmlFieldValue_t *f)
{
    REQUIRE(get(gpu, "smoothing"), NOT_SUPPORTED);
    REQUIRE(f->scope < PRESETS, INVALID_ARGUMENT);
    switch (f->id) {
    case 251: return set_uint(f, control[gpu].smooth_on);
    case 252: return set_uint(f, 1);
    case 256: return set_uint(f, 90);
    case 257: return set_uint(f, 10);
    case 259: return set_uint(f, PRESETS);
    case 260: return set_uint(f, preset_value(gpu, f->scope, 0));
    case 261: return set_uint(f, 1000 * preset_value(gpu, f->scope, 1));
    case 262: return set_uint(f, 1000 * preset_value(gpu, f->scope, 2));
    case 263: return set_uint(f, preset_value(gpu, f->scope, 3));
    case 264: return set_uint(f, control[gpu].smooth_preset);
    default: return NOT_SUPPORTED;
    }
}

static nvmlReturn_t read_field(int gpu, nvmlFieldValue_t *f)
{
    if (f->id >= 251 && f->id <= 264)
        return smoothing_field(gpu, f);
    switch (f->id) {                                /* NVML_FI_DEV_* */
    case 74: case 75: case 76: case 77: case 78: case 79: /* PERF_POLICY_*; 74 is also SW_POWER_CAP, 76 SYNC_BOOST */
        CHECK(gate(gpu, "violation"));
        return set_ull(f, throttled_ns(gpu, POLICIES[f->id - 74]));
    case 82: CHECK(gate(gpu, "temperature")); return set_uint(f, num(gpu, "memory_temperature_c", 50));
    case 83: CHECK(gate(gpu, "energy")); return set_ull(f, counter_mj(gpu));
    case 185: CHECK(gate(gpu, "average")); return power_field(gpu, f, average_mw(gpu));
    case 186: CHECK(gate(gpu, "instant")); return power_field(gpu, f, instant_mw(gpu));
    case 187: CHECK(gate(gpu, "limit")); return set_uint(f, limit_min_mw(gpu));
    case 188: CHECK(gate(gpu, "limit")); return set_uint(f, limit_max_mw(gpu));
    case 189: CHECK(gate(gpu, "limit")); return set_uint(f, limit_default_mw(gpu));
    case 190: CHECK(gate(gpu, "limit")); return set_uint(f, limit_enforced_mw(gpu));
    case 192: CHECK(gate(gpu, "limit")); return set_uint(f, limit_mw(gpu));
    case 269: CHECK(gate(gpu, "violation")); return set_ull(f, throttled_ns(gpu, "throttled.sw_thermal"));
    case 270: CHECK(gate(gpu, "violation")); return set_ull(f, throttled_ns(gpu, "throttled.hw_thermal"));
    case 271: CHECK(gate(gpu, "violation")); return set_ull(f, throttled_ns(gpu, "throttled.power_brake"));
    default: return NOT_SUPPORTED;
    }
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t dev, int count, nvmlFieldValue_t *fields)
{
    ENTER_READ(dev, "fields", cost_us("cost.fields_us", 0));
    REQUIRE(count > 0 && fields, INVALID_ARGUMENT);
    for (int i = 0; i < count; i++) {
        fields[i].time_us = stamp_us(now_us());
        fields[i].latency_us = 0;
        if (fields[i].id == 83)                     /* the counter costs the same by this door */
            guard.cost_us += cost_us("cost.energy_us", 3000);
        fields[i].ret = read_field(gpu, &fields[i]);
    }
    return OK;
}

/* ---------------------------------------------------------------- GPM: activity between two samples */

static const struct { unsigned id; const char *key; double value; } METRICS[] = {
    {1, "gpm.graphics", 95}, {2, "gpm.sm", 90}, {3, "gpm.occupancy", 25}, {4, "gpm.integer", 5},
    {5, "gpm.tensor", 60}, {7, "gpm.hmma", 60}, {10, "gpm.dram", 30}, {11, "gpm.fp64", 0}, {12, "gpm.fp32", 4},
    {13, "gpm.fp16", 1}, {20, "gpm.pcie_tx", 12}, {21, "gpm.pcie_rx", 34}, {60, "gpm.nvlink_rx", 0},
    {61, "gpm.nvlink_tx", 0}};

nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t dev, nvmlGpmSupport_t *out)
{
    ENTER_DEVICE(dev);
    REQUIRE(out->version == 1, VERSION_MISMATCH);
    out->supported = !is(gpu, "gpm", "off");
    return OK;
}

nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample_t *out)
{
    ENTER();
    CHECK(alive());
    CHECK(gate(ALL, "gpm"));
    *out = calloc(1, sizeof **out);
    return *out ? OK : OUT_OF_MEMORY;
}

nvmlReturn_t nvmlGpmSampleFree(nvmlGpmSample_t sample)
{
    ENTER();
    free(sample);
    return OK;
}

nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t dev, nvmlGpmSample_t sample)
{
    ENTER_READ(dev, "gpm", TELEMETRY_COST);
    REQUIRE(sample, INVALID_ARGUMENT);
    sample->gpu = gpu;
    sample->time_us = now_us();
    return OK;
}

nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *get_)
{
    ENTER();
    CHECK(alive());
    REQUIRE(get_->version == 1, VERSION_MISMATCH);
    nvmlGpmSample_t a = get_->first, b = get_->second;
    REQUIRE(a && b && a->time_us && b->time_us && a->gpu == b->gpu, INVALID_ARGUMENT);
    CHECK(gate(a->gpu, "gpm"));
    for (unsigned i = 0; i < get_->count; i++) {
        nvmlGpmMetric_t *m = &get_->metrics[i];
        m->ret = NOT_SUPPORTED;
        for (size_t k = 0; k < sizeof METRICS / sizeof *METRICS; k++) {
            if (METRICS[k].id != m->id)
                continue;
            m->ret = OK;                            /* too short a window is no error on the real one either */
            m->value = b->time_us - a->time_us < 50000 ? NAN : num(a->gpu, METRICS[k].key, METRICS[k].value);
            m->info.short_name = m->info.long_name = METRICS[k].key + 4;
            m->info.unit = m->id < 20 ? "%" : "MiB/s";
        }
    }
    return OK;
}
