"""Run the tests that need a GPU; without one say so and succeed.

Usage: gpu_check.py [PYTEST ARGUMENT...]
"""

import subprocess
import sys

import torch


def main() -> int:
    """Run pytest where there is a GPU; its status is ours."""
    if not torch.cuda.is_available():
        print("gpu-check: no CUDA device here, so nothing was checked; run it where there is one.")
        return 0
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    print(f"gpu-check: {len(names)} GPU(s): {', '.join(names)}", flush=True)
    command = [sys.executable, "-m", "pytest", "tests", "-m", "gpu", *sys.argv[1:]]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
