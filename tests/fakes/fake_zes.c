/* A Level Zero loader with one driver and as many devices as the test says ("gpus"), each with power domains by a
 * bit mask ("domains": 1 card, 2 package, 4 two stacks, 8 memory), sensors and limits. Structures follow the ctypes of
 * pyzes 0.1.3; test_intel.py holds their sizes and offsets against the binding. */
#include "fake_store.h"
#include <stddef.h>

typedef void *handle;
typedef struct {
  int32_t stype;
  void *next;
  int32_t type;
  uint32_t vendor_id, device_id, flags, subdevice_id, clock;
  uint64_t max_alloc;
  uint32_t contexts, priority, threads, width, eus, subslices, slices;
  uint64_t timer;
  uint32_t bits, kernel_bits;
  uint8_t uuid[16];
  char name[256];
} core_properties;
typedef struct {
  int32_t stype;
  void *next;
  core_properties core;
  uint32_t subdevices;
  char serial[64], board[64], brand[64], model[64], vendor[64], driver[64];
} device_properties;
typedef struct {
  int32_t stype;
  void *next;
  uint32_t domain, bus, device, function;
  struct { int32_t gen, width; int64_t bandwidth; } speed;
  uint8_t have[3];
} pci_properties;
typedef struct {
  int32_t stype;
  void *next;
  uint8_t on_subdevice;
  uint32_t subdevice;
  uint8_t can_control, threshold;
  int32_t standard, min, max;
} power_properties;
typedef struct {
  int32_t stype;
  void *next;
  int32_t level, source, unit;
  uint8_t state_locked, enabled, interval_locked;
  int32_t interval;
  uint8_t limit_locked;
  int32_t limit;
} power_limit;
typedef struct { int32_t stype; void *next; int32_t domain; power_limit *standard; } power_ext_properties;
typedef struct { uint64_t energy_uj, stamp_us; } energy_counter;
typedef struct {
  int32_t stype;
  void *next;
  int32_t type;
  uint8_t on_subdevice;
  uint32_t subdevice;
  double max;
  uint8_t supported[3];
} temp_properties;
typedef struct {
  int32_t stype;
  void *next;
  int32_t type;
  uint8_t on_subdevice;
  uint32_t subdevice;
  uint8_t can_control, event;
  double min, max;
} freq_properties;
typedef struct {
  int32_t stype;
  void *next;
  double voltage, request, tdp, efficient, actual;
  uint32_t reasons;
} freq_state;
typedef struct { uint64_t spent_us, stamp_us; } pair;
typedef struct {
  int32_t stype;
  void *next;
  int32_t type;
  uint8_t on_subdevice;
  uint32_t subdevice;
  int32_t location;
  uint64_t size;
  int32_t width, channels;
} mem_properties;
typedef struct { int32_t stype; void *next; int32_t health; uint64_t free, size; } mem_state;
typedef struct { uint64_t read, written, max, stamp_us; } mem_bandwidth;
typedef struct { int32_t stype; void *next; uint32_t type; uint8_t on_subdevice; uint32_t subdevice; } engine_properties;

#define SIZE(name, type) if (!strcmp(what, name)) return sizeof(type)
size_t fake_layout(const char *what) {
  SIZE("device_properties", device_properties);
  SIZE("pci_properties", pci_properties);
  SIZE("power_properties", power_properties);
  SIZE("power_limit_ext_desc", power_limit);
  SIZE("power_ext_properties", power_ext_properties);
  SIZE("power_energy_counter", energy_counter);
  SIZE("temp_properties", temp_properties);
  SIZE("freq_properties", freq_properties);
  SIZE("freq_state", freq_state);
  SIZE("freq_throttle_time", pair);
  SIZE("mem_properties", mem_properties);
  SIZE("mem_state", mem_state);
  SIZE("mem_bandwidth", mem_bandwidth);
  SIZE("engine_properties", engine_properties);
  SIZE("engine_stats", pair);
  if (!strcmp(what, "device_properties.numSubdevices")) return offsetof(device_properties, subdevices);
  if (!strcmp(what, "power_limit_ext_desc.limit")) return offsetof(power_limit, limit);
  if (!strcmp(what, "freq_state.throttleReasons")) return offsetof(freq_state, reasons);
  if (!strcmp(what, "mem_properties.location")) return offsetof(mem_properties, location);
  return 0;
}

/* A handle is 16 * (device + 1) + the part's number. */
static int gpu_of(handle h) { return (int)((intptr_t)h / 16) - 1; }
static int part_of(handle h) { return (int)((intptr_t)h % 16); }
#define ANSWER(name) do { int r = result(gpu_of(h), name); if (r) return r; } while (0)

static int hand_out(handle parent, uint32_t *count, handle *out, const int *parts, uint32_t n) {
  for (uint32_t i = 0; out && i < n && i < *count; i++) out[i] = (handle)((intptr_t)parent / 16 * 16 + parts[i]);
  *count = n;
  return 0;
}

int zesInit(uint32_t flags) { (void)flags; return result(-1, "init"); }

int zesDriverGet(uint32_t *count, handle *out) {
  if (out) out[0] = (handle)(intptr_t)1;
  *count = 1;
  return 0;
}

int zesDeviceGet(handle driver, uint32_t *count, handle *out) {
  (void)driver;
  uint32_t gpus = (uint32_t)get(-1, "gpus", 1);
  for (uint32_t i = 0; out && i < gpus && i < *count; i++) out[i] = (handle)(intptr_t)(16 * (i + 1));
  *count = gpus;
  return 0;
}

int zesDeviceGetProperties(handle h, device_properties *out) {
  ANSWER("properties");
  if (out->stype != 0x1) return 0x78000004;
  out->core.type = (int32_t)get(gpu_of(h), "type", 1);
  out->core.uuid[0] = (uint8_t)(0xa0 + gpu_of(h));
  out->subdevices = (uint32_t)get(gpu_of(h), "tiles", 0);
  snprintf(out->core.name, sizeof out->core.name, "Intel(R) Data Center GPU Max 1550");
  return 0;
}

int zesDevicePciGetProperties(handle h, pci_properties *out) {
  ANSWER("pci");
  out->bus = 0x18 + (uint32_t)gpu_of(h);
  return 0;
}

/* Power: parts 1 card, 2 package, 3 and 4 stacks, 5 memory. */
int zesDeviceEnumPowerDomains(handle h, uint32_t *count, handle *out) {
  ANSWER("power_enum");
  int mask = (int)get(gpu_of(h), "domains", 1), parts[5];
  uint32_t n = 0;
  if (mask & 4) parts[n++] = 3, parts[n++] = 4; /* not in order of preference, on purpose */
  if (mask & 8) parts[n++] = 5;
  if (mask & 2) parts[n++] = 2;
  if (mask & 1) parts[n++] = 1;
  return hand_out(h, count, out, parts, n);
}

int zesPowerGetProperties(handle h, power_properties *out) {
  ANSWER("power_properties");
  int part = part_of(h);
  const int32_t domain[] = {0, 1, 2, 3, 3, 4};
  out->on_subdevice = part == 3 || part == 4;
  out->subdevice = part == 4;
  power_ext_properties *more = out->next;
  if (more && more->stype == 0x28 && !get(gpu_of(h), "old_driver", 0)) more->domain = domain[part];
  return 0;
}

int zesPowerGetEnergyCounter(handle h, energy_counter *out) {
  char name[16];
  snprintf(name, sizeof name, "energy%d", part_of(h));
  ANSWER("energy");
  ANSWER(name);
  const double share[] = {0, 1.0, 0.8, 0.4, 0.3, 0.1};
  uint64_t stamp_ns;
  out->energy_uj = (uint64_t)(joules(gpu_of(h), 400.0, &stamp_ns) * share[part_of(h)] * 1e6);
  out->stamp_us = stamp_ns / 1000 - (uint64_t)get(gpu_of(h), "stamp_back_us", 0);
  if (get(gpu_of(h), "energy_na", 0)) out->energy_uj = 0;
  return 0;
}

int zesPowerGetLimitsExt(handle h, uint32_t *count, power_limit *out) {
  ANSWER("limits");
  for (uint32_t i = 0; out && i < 2 && i < *count; i++) {
    if (out[i].stype != 0x27) return 0x78000004;
    out[i].level = i ? 3 : 1; /* sustained, then peak */
    out[i].unit = 2;
    out[i].enabled = 1;
    out[i].limit = i ? 900000 : 600000;
  }
  *count = 2;
  return 0;
}

int zesDeviceEnumTemperatureSensors(handle h, uint32_t *count, handle *out) {
  ANSWER("temperature_enum");
  const int parts[] = {1, 2, 3};
  return hand_out(h, count, out, parts, 3);
}

int zesTemperatureGetProperties(handle h, temp_properties *out) {
  out->type = part_of(h) - 1;
  return 0;
}

int zesTemperatureGetState(handle h, double *celsius) {
  ANSWER("temperature");
  const double normal[] = {0, 66, 63, 58};
  *celsius = normal[part_of(h)];
  return 0;
}

int zesDeviceEnumFrequencyDomains(handle h, uint32_t *count, handle *out) {
  ANSWER("frequency_enum");
  const int parts[] = {1, 2};
  return hand_out(h, count, out, parts, 2);
}

int zesFrequencyGetProperties(handle h, freq_properties *out) {
  out->type = part_of(h) - 1;
  return 0;
}

int zesFrequencyGetState(handle h, freq_state *out) {
  ANSWER("frequency");
  int memory = part_of(h) == 2;
  out->actual = memory ? 3200 : get(gpu_of(h), "gpu_mhz", 1550);
  out->reasons = memory ? 0 : (uint32_t)get(gpu_of(h), "reasons", 0);
  return 0;
}

int zesFrequencyGetThrottleTime(handle h, pair *out) {
  ANSWER("throttle_time");
  out->spent_us = 2500000;
  out->stamp_us = clock_ns() / 1000;
  return 0;
}

int zesDeviceEnumMemoryModules(handle h, uint32_t *count, handle *out) {
  ANSWER("memory_enum");
  const int parts[] = {1, 2};
  return hand_out(h, count, out, parts, 2);
}

int zesMemoryGetProperties(handle h, mem_properties *out) {
  out->location = part_of(h) == 1; /* the second is system memory */
  return 0;
}

int zesMemoryGetState(handle h, mem_state *out) {
  ANSWER("memory");
  out->size = 128ull << 30;
  out->free = 120ull << 30;
  return 0;
}

int zesMemoryGetBandwidth(handle h, mem_bandwidth *out) {
  ANSWER("bandwidth");
  uint64_t us = clock_ns() / 1000;
  out->max = 1000000000;
  out->read = us * 200; /* 200 MB/s and 50 MB/s of 1 GB/s */
  out->written = us * 50;
  out->stamp_us = us;
  return 0;
}

int zesDeviceEnumEngineGroups(handle h, uint32_t *count, handle *out) {
  ANSWER("engine_enum");
  const int parts[] = {1, 2};
  return hand_out(h, count, out, parts, 2);
}

int zesEngineGetProperties(handle h, engine_properties *out) {
  out->type = part_of(h) == 1 ? 5 : 0; /* a render engine, then all of them */
  return 0;
}

int zesEngineGetActivity(handle h, pair *out) {
  ANSWER("activity");
  out->stamp_us = clock_ns() / 1000;
  out->spent_us = out->stamp_us / 4;
  return 0;
}
