"""Settings of the whole suite."""

from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent

# The same examples on every machine: no test needs luck. Time limits are pytest's.
hypothesis.settings.register_profile(
    "house",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=50,
    # How quickly examples are made says how busy the machine is, not how good the code is.
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("house")


def pytest_report_header() -> str:
    """Print the size of the package, so that growth is seen."""
    sources = sorted((ROOT / "malleus_megatron").rglob("*.py"))
    lines = sum(source.read_text(encoding="utf-8").count("\n") for source in sources)
    return f"malleus_megatron: {lines} lines in {len(sources)} files"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device here")


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT
