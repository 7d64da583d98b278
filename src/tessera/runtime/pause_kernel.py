"""The kernel that pauses a GPU: at the highest priority, it takes every place for a block, and sleeps there.

::

    user's streams   ■■■■■■■■■■■■            ■■■■■■■■■■■■            ■■■     blocks that run end; no new one begins
    our stream                   ▒▒▒ pause ▒▒            ▒▒▒ pause ▒▒        ratio x the time since the last pause

Blocks of a stream with a higher priority go first, and an SM holds a fixed number of blocks (32 on an H200). So a grid
of that many one-warp blocks for each SM stops all work behind it, however that work was launched: eager work, compiled
code, a graph in the middle of its replay, any stream. The program is not changed, and nothing waits in its streams.
Work that runs is never interrupted: the pause begins when the last of the running blocks has ended, or after `DRAIN_NS`
if some do not end (a collective that waits for its peers).

No work can be locked out. A block of this kernel needs less than any other (one warp, 28 registers, no shared memory).
So where a block of the program fits, one of ours fits too, and leaves when the pause is over. Blocks that wait for
other blocks of their grid therefore get them.

Times are those of `%globaltimer`, which counts nanoseconds at any clock. The command is read from host memory during
the pause: a ratio of 0 ends the pause. The driver compiles the code below in about 20 ms; no compiler is needed.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from ..errors import ScheduleError

# Words of 8 bytes. CONTROL and STATS are in host memory that the device reads. STATE is on the device: the end of the
# last pause, the number of blocks that came, the number that left, and the end of this pause.
RATIO, LONGEST_NS, LIMIT_NS = range(3)  # CONTROL
POINTS, WAITS, WAITED_NS, BUSY_NS = range(4)  # STATS
WORDS = 8
ONE = 1024  # ratios are integers in units of 1/1024
DRAIN_NS = 2_500_000
"""Nanoseconds that a pause waits for the running blocks to end: longer than most kernels take."""

# Sleep for half of the time that remains, so as not to be late (nanosleep may take twice its argument), and for at most
# 20 us, so that a new command is soon read.
_NAP = """sub.u64 %left, %until, %now;
    shr.u64 %left, %left, 1;
    add.u64 %left, %left, 1;
    min.u64 %left, %left, 20000;
    cvt.u32.u64 %nap, %left;
    nanosleep.u32 %nap;
    mov.u64 %now, %globaltimer;"""

PTX = f"""
.version 7.0
.target sm_70
.address_size 64

.visible .entry tessera_pause(
    .param .u64 control_param, .param .u64 state_param, .param .u64 stats_param, .param .u64 blocks_param
)
.maxntid 32, 1, 1
.minnctapersm 32
{{
    .reg .pred %p<8>;
    .reg .b32 %nap;
    .reg .b64 %control, %state, %stats, %last, %began, %now, %until, %left, %k, %one;
    .reg .b64 %ratio, %busy, %wait, %x, %y;

    ld.param.u64 %control, [control_param];
    ld.param.u64 %state, [state_param];
    ld.param.u64 %stats, [stats_param];
    ld.param.u64 %last, [blocks_param];
    sub.u64 %last, %last, 1;
    mov.u64 %one, 1;
    mov.u64 %began, %globaltimer;
    mov.u64 %now, %began;
    atom.global.add.u64 %k, [%state+8], %one;
    setp.eq.u64 %p0, %k, 0;
    @%p0 bra DRAIN;

FOLLOW: // until the first block has set the end, then until that
    ld.volatile.global.u64 %until, [%state+24];
    setp.eq.u64 %p1, %until, 0;
    @%p1 add.u64 %until, %now, 20000;
    setp.ge.u64 %p2, %now, %until;
    @%p2 bra LEAVE;
    {_NAP}
    bra FOLLOW;

DRAIN: // the first block: until all have come and nothing else runs, or for DRAIN_NS
    ld.volatile.global.u64 %x, [%state+8];
    setp.gt.u64 %p3, %x, %last;
    @%p3 bra PAUSE;
    sub.u64 %x, %now, %began;
    setp.ge.u64 %p4, %x, {DRAIN_NS};
    @%p4 bra PAUSE;
    mov.u32 %nap, 1000;
    nanosleep.u32 %nap;
    mov.u64 %now, %globaltimer;
    bra DRAIN;
PAUSE:
    mov.u64 %now, %globaltimer;
    mov.u64 %began, %now;
    ld.volatile.global.u64 %x, [%state];
    setp.eq.u64 %p3, %x, 0;
    @%p3 mov.u64 %x, %began;
    sub.s64 %busy, %began, %x;
    max.s64 %busy, %busy, 0;
    ld.volatile.global.u64 %y, [%control+{8 * LIMIT_NS}];
    min.s64 %busy, %busy, %y;
HOLD: // at the newest ratio
    ld.volatile.global.u64 %ratio, [%control+{8 * RATIO}];
    mul.lo.u64 %wait, %busy, %ratio;
    shr.u64 %wait, %wait, {ONE.bit_length() - 1};
    ld.volatile.global.u64 %y, [%control+{8 * LONGEST_NS}];
    min.u64 %wait, %wait, %y;
    add.u64 %until, %began, %wait;
    st.volatile.global.u64 [%state+24], %until;
    setp.ge.u64 %p5, %now, %until;
    @%p5 bra HELD;
    {_NAP}
    bra HOLD;
HELD:
    setp.gt.u64 %p6, %wait, 0;
    selp.u64 %x, 1, 0, %p6;
    ld.volatile.global.u64 %y, [%stats+{8 * WAITS}];
    add.u64 %y, %y, %x;
    st.volatile.global.u64 [%stats+{8 * WAITS}], %y;
    sub.u64 %x, %now, %began;
    ld.volatile.global.u64 %y, [%stats+{8 * WAITED_NS}];
    add.u64 %y, %y, %x;
    st.volatile.global.u64 [%stats+{8 * WAITED_NS}], %y;
    ld.volatile.global.u64 %y, [%stats+{8 * BUSY_NS}];
    add.u64 %y, %y, %busy;
    st.volatile.global.u64 [%stats+{8 * BUSY_NS}], %y;

LEAVE: // the last to leave makes ready for the next pause
    atom.global.add.u64 %k, [%state+16], %one;
    setp.ne.u64 %p7, %k, %last;
    @%p7 exit;
    mov.u64 %now, %globaltimer;
    st.volatile.global.u64 [%state], %now;
    mov.u64 %x, 0;
    st.volatile.global.u64 [%state+8], %x;
    st.volatile.global.u64 [%state+16], %x;
    st.volatile.global.u64 [%state+24], %x;
    ld.volatile.global.u64 %y, [%stats+{8 * POINTS}];
    add.u64 %y, %y, 1;
    st.volatile.global.u64 [%stats+{8 * POINTS}], %y;
    exit;
}}
"""

# cuda.h
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: independent of the legacy default stream
_PORTABLE_MAPPED = 1 | 2  # CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_SM_COUNT, _BLOCKS_PER_SM = 16, 106  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, _MAX_BLOCKS_PER_MULTIPROCESSOR


class PauseKernel:
    """The kernel, its words and its stream on one device. Only one thread may call at a time.

    The launch goes to a stream that is never captured, so it is permitted while a graph is captured in any mode. All
    other CUDA calls happen in the constructor.
    """

    def __init__(self, device: int) -> None:
        self._cuda = load_driver()
        self._context = ctypes.c_void_p()
        number = ctypes.c_int()
        self._check("cuDeviceGet", ctypes.byref(number), device)
        self._check("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), number)
        self._check("cuCtxPushCurrent_v2", self._context)
        relaxed = ctypes.c_int(_RELAXED)
        try:
            self._check("cuThreadExchangeStreamCaptureMode", ctypes.byref(relaxed))
            sms, each = (self._get_attribute(a, number) for a in (_SM_COUNT, _BLOCKS_PER_SM))
            self.blocks = sms * each
            self._load()
        finally:
            self._check("cuThreadExchangeStreamCaptureMode", ctypes.byref(relaxed))
            self._check("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _load(self) -> None:
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._check("cuModuleLoadData", ctypes.byref(module), PTX.encode())
        self._check("cuModuleGetFunction", ctypes.byref(self._function), module, b"tessera_pause")
        least, greatest = ctypes.c_int(), ctypes.c_int()
        self._check("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
        self._stream = ctypes.c_void_p()
        self._check("cuStreamCreateWithPriority", ctypes.byref(self._stream), _NON_BLOCKING, greatest)
        host, state = ctypes.c_void_p(), ctypes.c_uint64()
        self._check("cuMemHostAlloc", ctypes.byref(host), ctypes.c_size_t(16 * WORDS), _PORTABLE_MAPPED)
        self._check("cuMemAlloc_v2", ctypes.byref(state), ctypes.c_size_t(8 * WORDS))
        self._check("cuMemsetD8_v2", state, 0, ctypes.c_size_t(8 * WORDS))
        assert host.value is not None
        ctypes.memset(host.value, 0, 16 * WORDS)
        self.control = (ctypes.c_int64 * WORDS).from_address(host.value)
        self.stats = (ctypes.c_int64 * WORDS).from_address(host.value + 8 * WORDS)
        # Host memory has the same address on the device (unified addressing).
        words = (ctypes.c_uint64(a) for a in (host.value, state.value, host.value + 8 * WORDS, self.blocks))
        self._arguments = tuple(words)
        self._pointers = (ctypes.c_void_p * 4)(*(ctypes.addressof(a) for a in self._arguments))
        self._grid = tuple(ctypes.c_uint(n) for n in (self.blocks, 1, 1, 1, 1, 1, 0))

    def make_current(self) -> None:
        """Prepare the thread that launches, once: set the device's context, and permit calls while others capture."""
        self._check("cuCtxSetCurrent", self._context)
        self._check("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(_RELAXED)))

    def set_ratio(self, ratio: float) -> None:
        """Set how many times as long as the work before them pauses last, including the pause that runs now."""
        self.control[RATIO] = round(ratio * ONE)

    def set_limits(self, *, busy_s: float, longest_s: float) -> None:
        """Set the most work that one pause counts, and the longest pause."""
        self.control[LIMIT_NS], self.control[LONGEST_NS] = round(busy_s * 1e9), round(longest_s * 1e9)

    def read_counts(self) -> tuple[int, int, float, float]:
        """Return the pauses that are over, how many took time, seconds paused, and seconds of work before them."""
        points, waits, waited_ns, busy_ns = self.stats[:4]
        return points, waits, waited_ns * 1e-9, busy_ns * 1e-9

    def launch(self) -> None:
        """Pause the device for the ratio times the time since the last pause."""
        # cuLaunchKernel must not hold the interpreter's lock: the driver may let it wait for a thread that waits for
        # that lock.
        code = self._cuda.cuLaunchKernel(self._function, *self._grid, self._stream, self._pointers, None)
        if code:
            raise self._make_error("cuLaunchKernel", code)

    def _get_attribute(self, attribute: int, number: ctypes.c_int) -> int:
        value = ctypes.c_int()
        self._check("cuDeviceGetAttribute", ctypes.byref(value), attribute, number)
        return value.value

    def _check(self, call: str, *args: Any) -> None:
        code = getattr(self._cuda, call)(*args)
        if code:
            raise self._make_error(call, code)

    def _make_error(self, call: str, code: int) -> ScheduleError:
        name = ctypes.c_char_p()
        self._cuda.cuGetErrorName(code, ctypes.byref(name))
        return ScheduleError(
            f"the GPU cannot be paused: {call} failed",
            why=(name.value or b"").decode() or f"CUDA error {code}",
            fix='cap_policy="driver" with permission to set the power limit',
        )


@functools.cache
def load_driver() -> Any:
    """Load CUDA's driver library."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as exc:
        raise ScheduleError("CUDA's driver library cannot be loaded", why=str(exc)) from exc
