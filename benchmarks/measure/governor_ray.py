"""Run the governor on a real local Ray cluster of four nodes; kill a node, then the head; print what happened.

    pip install ray
    python benchmarks/measure/governor_ray.py [--write FILE]

What nodes may draw is read from their lease files every 20 ms, and must never exceed the limit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1]
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS.parent / "tests")]
from result_file import write_result

from ray_cluster import run_scenario


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        content = run_scenario(Path(folder))
    for name, value in content.items():
        print(f"{name:>28}  {value}")
    if args.write:
        write_result(args.write, content)
    sys.exit(not content["cap_held"])


if __name__ == "__main__":
    main()
