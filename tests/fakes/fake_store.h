/* A test's say over a fake library: numbers by name, for one device ("0.power_w") or for all ("power_w"). */
#ifndef FAKE_STORE_H
#define FAKE_STORE_H
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

static struct { char key[96]; double value; } store[256];
static int stored;

static double *slot(const char *key) {
  for (int i = 0; i < stored; i++)
    if (!strcmp(store[i].key, key)) return &store[i].value;
  return NULL;
}

void fake_reset(void) { stored = 0; }

void fake_set(const char *key, double value) {
  double *found = slot(key);
  if (!found && stored < 256) {
    snprintf(store[stored].key, sizeof store[stored].key, "%s", key);
    found = &store[stored++].value;
  }
  if (found) *found = value;
}

static double get(int device, const char *key, double otherwise) {
  char full[96];
  snprintf(full, sizeof full, "%d.%s", device, key);
  double *found = slot(full);
  if (!found) found = slot(key);
  return found ? *found : otherwise;
}

/* The result a call is to give: "fail.<function>", 0 for success; counts calls as "calls.<function>". */
static int result(int device, const char *function) {
  char key[96];
  snprintf(key, sizeof key, "calls.%s", function);
  fake_set(key, get(-1, key, 0) + 1);
  snprintf(key, sizeof key, "fail.%s", function);
  return (int)(uint32_t)get(device, key, get(device, "fail", 0));
}

double fake_get(const char *key) { return get(-1, key, -1); }

static uint64_t clock_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_BOOTTIME, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* The joules of a board that draws `power_w` since its counter was reset to `energy_j`; "tick_ms" coarsens it. */
static double joules(int device, double otherwise_w, uint64_t *stamp_ns) {
  static uint64_t origin_ns;
  if (!origin_ns) origin_ns = clock_ns() - 1000000000u;
  uint64_t now = clock_ns(), tick = (uint64_t)(get(device, "tick_ms", 0) * 1e6);
  if (tick) now -= now % tick;
  *stamp_ns = now;
  if (get(device, "frozen", 0)) return 1000.0;
  return get(device, "energy_j", 1000.0) + get(device, "power_w", otherwise_w) * (double)(now - origin_ns) * 1e-9;
}
#endif
