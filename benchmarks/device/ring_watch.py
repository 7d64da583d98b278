"""Write the driver's power samples to a file, without Tessera: `python ring_watch.py FILE`, until the parent ends.

Each line has epoch seconds and watts, of GPU 0 (`--fake`: 100 W every 20 ms).
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def main() -> None:
    parent, last = os.getppid(), 0
    fake = "--fake" in sys.argv
    if not fake:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    with Path(sys.argv[1]).open("w", buffering=1) as out:
        while os.getppid() == parent:
            if fake:
                out.write(f"{time.time():.6f} 100.0\n")
                time.sleep(0.02)
                continue
            _, samples = pynvml.nvmlDeviceGetSamples(handle, pynvml.NVML_TOTAL_POWER_SAMPLES, last)
            for sample in samples:
                if sample.timeStamp > last:
                    out.write(f"{sample.timeStamp * 1e-6:.6f} {sample.sampleValue.uiVal * 1e-3:.3f}\n")
            last = max([last, *(s.timeStamp for s in samples)])
            time.sleep(0.25)


if __name__ == "__main__":
    main()
