"""Packaging: what the plugin needs and which commands it brings. Tool settings: pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def version() -> str:
    """Read `__version__` without importing the package, which may not be importable yet."""
    text = (ROOT / "malleus_megatron" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise RuntimeError('malleus_megatron/__init__.py has no line __version__ = "...".')
    return match.group(1)


RUNTIME = [
    "torch>=2.6",
    "megatron-core>=0.19,<0.20",
    "numpy",
    "psutil",  # torch_dist checkpoints: megatron-core needs it and does not declare it
    "ortools>=9.12",
    "nvidia-ml-py>=12",  # gives `import pynvml`; the package named pynvml is deprecated
    "starlette>=1.0",
    "prometheus_client>=0.20",  # writes the sidecar's /metrics
    "uvicorn>=0.30",
    "tqdm>=4.66",
    "pyarrow>=18",  # malleus whatif reads traces in parquet
]

DEV = [
    "codespell",
    "hypothesis",
    "import-linter>=2.5",
    "mypy",
    "packaging",
    "pytest>=9",
    "pytest-timeout>=2.3",
    "ruff",
    "tensorboard",  # reads the files that the job's scalars are in
]

GPU = ["transformer-engine[pytorch]"]  # NVIDIA's apex is not the package of that name on PyPI

setup(
    name="malleus-megatron",
    version=version(),
    description="Megatron-LM training jobs that survive slow GPUs",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.12",
    packages=find_packages(include=["malleus_megatron", "malleus_megatron.*"]),
    package_data={"malleus_megatron": ["py.typed", "pages/*.css", "pages/*.js"]},
    install_requires=RUNTIME,
    extras_require={"dev": DEV, "gpu": GPU},
    entry_points={"console_scripts": ["malleus = malleus_megatron.cli.main:main"]},
)
