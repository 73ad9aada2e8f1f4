"""All benchmarks that run without a GPU, one after another: `make bench`."""

import subprocess
import sys

COMMANDS = (
    ("benchmarks.runtime",),
    ("benchmarks.adabatch",),
    ("benchmarks.shards",),
    ("benchmarks.simulator",),
    ("benchmarks.milp", "instances"),
    ("benchmarks.promises", "traces", "195job"),
    ("benchmarks.live_trace",),
    ("benchmarks.load",),
)


def main() -> int:
    failed = 0
    for module, *args in COMMANDS:
        print(f"\n## python -m {' '.join((module, *args))}\n", flush=True)
        failed += subprocess.run([sys.executable, "-m", module, *args]).returncode != 0
    print("\nWith a GPU: python -m benchmarks.gpu_runtime all, python -m benchmarks.gpu_bits")
    return failed


if __name__ == "__main__":
    sys.exit(main())
