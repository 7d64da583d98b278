"""Our kernels' launches by a driver that launches nothing: arguments bound, compiled for sm_90, grids in range.

Meta tensors have any size and no memory, so shapes are here that no test could compute. Everything a launch does but
running is real: which arguments are specialised, which are None, what is compiled and how much shared memory it needs.
"""

from __future__ import annotations

import json

import pytest

from forked import run_forked

pytest.importorskip("triton")

DRIVER = """
import json, sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

seen = []

class Utils:
    def load_binary(self, name, kernel, shared, device):
        return 1, 2, 0, 0, 1024

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448}

class Driver:
    utils = Utils()

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def launcher_cls(self, source, metadata):
        return lambda *args: seen.append([metadata.name, *args[:3]])

driver.set_active(Driver())

def rand(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, device="meta", dtype=dtype)
"""

PRODUCTS = """
from tessera.op.kernels.matmul import launch_matmul
from tessera.op.tile import Tile

def product(batch, m, n, k, dtype=torch.bfloat16, out=torch.bfloat16):
    scales = (rand(1, dtype=torch.float32), rand(batch, dtype=torch.float32)) if dtype == torch.float8_e4m3fn else None
    b = rand(batch, n, k, dtype=dtype).mT if scales else rand(batch, k, n, dtype=dtype)
    a, c = rand(batch, m, k, dtype=dtype), rand(batch, m, n, dtype=out)
    launch_matmul(a, b, c, tile=Tile(64, 64, 32), stages=3, warps=4, scales=scales)

product(70_000, 64, 64, 32)  # more batches than the second axis of a grid has
product(1, 16384, 151936, 4096)  # rows times their stride pass 2^31
product(1, 1, 1, 1)  # every number is specialised to 1
product(1, 128, 128, 64, dtype=torch.float8_e4m3fn)
product(3, 128, 128, 64, dtype=torch.float8_e4m3fn)  # a scale for each matrix on the right
product(0, 5, 7, 3)
"""

ROWS = """
from tessera.op.kernels import quantize, rows

x = rand(1 << 22, 1024)  # 2^32 elements
rows.softmax_backward(x, rows.softmax_forward(x, torch.float32), torch.bfloat16)
w = rand(1024)
for centered, residual in ((True, x), (False, None)):
    y, summed, mean, rstd = rows.norm_forward(x, residual, w, w if centered else None, eps=1e-5, centered=centered)
    rows.norm_backward(y, residual, x, w, mean=mean, rstd=rstd, weight_grad=True, bias_grad=centered)
rows.norm_forward(rand(1, 1), None, None, None, eps=1e-5, centered=True)
for by_row in (False, True):
    quantize.quantize(rand(1 << 20, 8192), "fp8", by_row=by_row, pad=(16, 16))
for by_row in (False, True):
    quantize.quantize(rand(8192, 1 << 20).mT, "fp16", by_row=by_row)
y, scale = quantize.quantize(rand(3, 0), "fp16", by_row=False)
assert y.shape == (3, 0) and scale.shape == (1,)
"""

ATTENTION = """
from tessera.op.kernels import attention

def attend(b, h, kv, s, d, causal):
    q, k = rand(b, h, s, d), rand(b, kv, s, d)
    attention.run_attention(q, k, k, rand(b, h, s, d), scale=0.1, causal=causal, tile=(64, 64), stages=2, warps=4)

attend(512, 128, 8, 4096, 128, True)  # 2^35 elements, half a million heads and rows of blocks
attend(1, 2, 2, 100, 80, False)
attend(1, 1, 1, 0, 64, True)
"""

CONVOLUTIONS = """
from tessera.op.kernels.matmul import launch_conv
from tessera.op.tile import Tile

def convolution(n, size, channels, filters, groups):
    x, w = rand(n, size, size, channels), rand(filters, 3, 3, channels // groups)
    launch_conv(x, w, rand(n, size, size, filters), stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=groups,
           tile=Tile(64, 64, 32), stages=3, warps=4)

convolution(2048, 224, 64, 64, 1)  # 6.6e9 elements
convolution(1, 8, 6, 4, 2)
"""

# Kernels launched, in order: the test fails if a launch went missing.
WANTED = {
    "products": (PRODUCTS, ["matmul_kernel"] * 5),
    "rows": (
        ROWS,
        [
            "_softmax_forward",
            "_softmax_backward",
            "_norm_forward",
            "_norm_backward",
            "_norm_forward",
            "_norm_backward",
            "_norm_forward",
            "tensor_amax",
            "tensor_cast",
            "row_cast",
            "tensor_amax",
            "tensor_cast",
            "row_amax",
            "strip_cast",
        ],
    ),
    "attention": (ATTENTION, ["attention_kernel"] * 2),
    "convolutions": (CONVOLUTIONS, ["conv_kernel"] * 2),
}


@pytest.mark.parametrize("name", WANTED)
def test_launches(name):
    code, wanted = WANTED[name]
    seen = json.loads(run_forked(DRIVER + code + "print(json.dumps(seen))").splitlines()[-1])
    assert [kernel for kernel, *_ in seen] == wanted
    for kernel, x, y, z in seen:  # CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"
        assert 0 < x < 1 << 31, kernel
        assert 0 < y <= 65535, kernel
        assert z == 1, kernel
