/* A libamd_smi.so with as many GPUs as the test says ("gpus"), each a socket of its own. Structures follow the
 * ctypes of amdsmi 7.0.2; test_amd.py holds their sizes and offsets against the binding. Everything else the binding
 * asks for is answered "not supported" by stubs that tests/fakes/vendor_abi.py makes from the binding's own list. */
#include "fake_store.h"
#include <stddef.h>

typedef void *handle;
typedef struct {
  uint64_t socket_power;
  uint32_t current_socket_power, average_socket_power;
  uint64_t gfx_voltage, soc_voltage, mem_voltage;
  uint32_t power_limit;
  uint64_t reserved[18];
} power_info;
typedef struct { uint32_t clk, min_clk, max_clk; uint8_t locked, deep_sleep; uint32_t reserved[4]; } clk_info;
typedef struct { uint64_t cap, standard, dpm, min, max, reserved[3]; } power_cap_info;
typedef struct { uint8_t deep_sleep; uint32_t count, current; uint64_t hz[33]; } frequencies;
typedef struct { uint32_t gfx, umc, mm, reserved[13]; } engine_usage;
typedef struct {
  char market_name[256];
  uint32_t vendor_id;
  char vendor_name[256];
  uint32_t subvendor_id;
  uint64_t device_id;
  uint32_t rev_id;
  char asic_serial[256];
  uint32_t oam_id, num_of_compute_units;
  uint64_t target_graphics_version;
  uint32_t subsystem_id, reserved[21];
} asic_info;
typedef struct { uint32_t drm_render, drm_card, hsa_id, hip_id; char hip_uuid[256]; } enumeration_info;
typedef struct {
  uint64_t before[15];
  uint8_t prochot, ppt, socket, vr, hbm, gfx_clk;
  uint64_t by_xcp[8][64];
  uint8_t active_by_xcp[4][64];
  uint64_t reserved[3][64];
} violation_status;

size_t fake_layout(const char *what) {
  if (!strcmp(what, "power_info")) return sizeof(power_info);
  if (!strcmp(what, "power_info.average_socket_power")) return offsetof(power_info, average_socket_power);
  if (!strcmp(what, "clk_info")) return sizeof(clk_info);
  if (!strcmp(what, "power_cap_info")) return sizeof(power_cap_info);
  if (!strcmp(what, "frequencies")) return sizeof(frequencies);
  if (!strcmp(what, "engine_usage")) return sizeof(engine_usage);
  if (!strcmp(what, "asic_info")) return sizeof(asic_info);
  if (!strcmp(what, "asic_info.asic_serial")) return offsetof(asic_info, asic_serial);
  if (!strcmp(what, "enumeration_info")) return sizeof(enumeration_info);
  if (!strcmp(what, "violation_status")) return sizeof(violation_status);
  if (!strcmp(what, "violation_status.active_ppt_pwr")) return offsetof(violation_status, ppt);
  return 0;
}

static int gpu_of(handle h) { return (int)(intptr_t)h - 1; }
#define ANSWER(name) do { int r = result(gpu_of(h), name); if (r) return r; } while (0)

int amdsmi_init(uint64_t flags) { (void)flags; return result(-1, "init"); }
int amdsmi_shut_down(void) { return result(-1, "shut_down"); }

int amdsmi_get_socket_handles(uint32_t *count, handle *sockets) {
  uint32_t gpus = (uint32_t)get(-1, "gpus", 1);
  for (uint32_t i = 0; sockets && i < gpus && i < *count; i++) sockets[i] = (handle)(intptr_t)(i + 1);
  *count = gpus;
  return result(-1, "sockets");
}

int amdsmi_get_processor_handles(handle socket, uint32_t *count, handle *processors) {
  if (processors) processors[0] = socket;
  *count = 1;
  return 0;
}

int amdsmi_get_energy_count(handle h, uint64_t *ticks, float *resolution_uj, uint64_t *stamp_ns) {
  ANSWER("energy");
  int gpu = gpu_of(h);
  *resolution_uj = (float)get(gpu, "resolution_uj", 15.259);
  double energy_j = joules(gpu, 200.0, stamp_ns);
  *ticks = (uint64_t)(energy_j * get(gpu, "counter_scale", 1) * 1e6 / (double)*resolution_uj);
  if (get(gpu, "energy_na", 0)) *ticks = get(gpu, "energy_na", 0) > 1 ? UINT64_MAX : 0;
  return 0;
}

int amdsmi_get_power_info(handle h, power_info *out) {
  ANSWER("power");
  memset(out, 0xff, sizeof *out);
  out->socket_power = out->gfx_voltage = out->soc_voltage = out->mem_voltage = 0xffff;
  out->current_socket_power = (uint32_t)get(gpu_of(h), "current_w", 0xffff);
  out->average_socket_power = (uint32_t)get(gpu_of(h), "average_w", get(gpu_of(h), "power_w", 200));
  return 0;
}

int amdsmi_get_temp_metric(handle h, uint32_t place, uint32_t metric, int64_t *celsius) {
  ANSWER("temperature");
  (void)metric;
  const char *keys[] = {"edge_c", "hotspot_c", "vram_c"};
  const double normal[] = {0, 71, 64};
  if (place > 2) return 2;
  *celsius = (int64_t)get(gpu_of(h), keys[place], normal[place]);
  return 0;
}

int amdsmi_get_clock_info(handle h, uint32_t kind, clk_info *out) {
  ANSWER("clock");
  memset(out, 0, sizeof *out);
  out->clk = kind == 4 ? 1600 : (uint32_t)get(gpu_of(h), "sys_mhz", 2100);
  out->min_clk = (uint32_t)get(gpu_of(h), "min_mhz", 132);
  out->max_clk = (uint32_t)get(gpu_of(h), "max_mhz", 2100);
  return 0;
}

int amdsmi_get_power_cap_info(handle h, uint32_t sensor, power_cap_info *out) {
  ANSWER("cap");
  (void)sensor;
  memset(out, 0, sizeof *out);
  out->cap = (uint64_t)get(gpu_of(h), "cap", 750e6);
  out->standard = out->max = (uint64_t)750e6;
  return 0;
}

/* Control: what is set lies in the store under the GPU's own keys, where the getters above find it. */
static void put(handle h, const char *key, double value) {
  char full[96];
  snprintf(full, sizeof full, "%d.%s", gpu_of(h), key);
  fake_set(full, value);
}

int amdsmi_set_power_cap(handle h, uint32_t sensor, uint64_t cap) {
  ANSWER("set_cap");
  (void)sensor;
  put(h, "cap", (double)cap);
  return 0;
}

int amdsmi_get_clk_freq(handle h, uint32_t kind, frequencies *out) {
  ANSWER("freq");
  (void)kind;
  memset(out, 0, sizeof *out);
  out->count = 2;                         /* an MI300X lists its lowest and its highest */
  out->hz[0] = (uint64_t)132e6;
  out->hz[1] = (uint64_t)2100e6;
  return 0;
}

int amdsmi_set_gpu_clk_limit(handle h, uint32_t kind, uint32_t which, uint64_t mhz) {
  ANSWER("clk_limit");
  (void)kind;
  put(h, which == 0 ? "min_mhz" : "max_mhz", (double)mhz);
  put(h, "perf", 3);                      /* AMDSMI_DEV_PERF_LEVEL_MANUAL */
  return 0;
}

int amdsmi_get_gpu_perf_level(handle h, uint32_t *level) {
  ANSWER("perf");
  *level = (uint32_t)get(gpu_of(h), "perf", 0);
  return 0;
}

int amdsmi_set_gpu_perf_level(handle h, uint32_t level) {
  ANSWER("set_perf");
  put(h, "perf", level);
  put(h, "min_mhz", 132);
  put(h, "max_mhz", 2100);
  return 0;
}

int amdsmi_get_gpu_activity(handle h, engine_usage *out) {
  ANSWER("activity");
  out->gfx = (uint32_t)get(gpu_of(h), "gfx_pct", 0);
  out->umc = (uint32_t)get(gpu_of(h), "umc_pct", 0xffff);
  out->mm = 0xffff;
  return 0;
}

int amdsmi_get_gpu_memory_total(handle h, uint32_t kind, uint64_t *bytes) {
  ANSWER("memory");
  (void)kind;
  *bytes = 192ull << 30;
  return 0;
}

int amdsmi_get_gpu_memory_usage(handle h, uint32_t kind, uint64_t *bytes) {
  ANSWER("memory");
  (void)kind;
  *bytes = 3ull << 30;
  return 0;
}

int amdsmi_get_violation_status(handle h, violation_status *out) {
  ANSWER("violation");
  memset(out, 0xff, sizeof *out);
  out->ppt = (uint8_t)get(gpu_of(h), "ppt", 1);
  out->socket = 0;
  struct timespec nap = {0, (long)(get(-1, "violation_ms", 0) * 1e6)};
  nanosleep(&nap, NULL);
  return 0;
}

int amdsmi_get_gpu_asic_info(handle h, asic_info *out) {
  ANSWER("asic");
  memset(out, 0, sizeof *out);
  const char *name = get(-1, "mi250x", 0) ? "AMD Instinct MI250X" : "AMD Instinct MI300X";
  snprintf(out->market_name, sizeof out->market_name, "%s", name);
  snprintf(out->asic_serial, sizeof out->asic_serial, "0xABCDEF000000000%d", gpu_of(h));
  return 0;
}

int amdsmi_get_gpu_enumeration_info(handle h, enumeration_info *out) {
  ANSWER("enumeration");
  memset(out, 0, sizeof *out);
  out->hip_id = (uint32_t)get(gpu_of(h), "hip_id", gpu_of(h));
  return 0;
}

int amdsmi_get_gpu_device_bdf(handle h, uint64_t *bdf) {
  ANSWER("bdf");
  *bdf = (uint64_t)(0x41 + gpu_of(h)) << 8;
  return 0;
}

int amdsmi_get_gpu_device_uuid(handle h, uint32_t *length, char *uuid) {
  ANSWER("uuid");
  snprintf(uuid, *length, "deadbeef-0000-1000-8000-00000000000%d", gpu_of(h));
  return 0;
}
