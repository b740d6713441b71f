"""Input files that are no files, and values that make no sense: one message, no waiting."""

import json
import os
from pathlib import Path

import pytest

from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.codec import read_json
from malleus_megatron.plan.injection import read_injection
from malleus_megatron.plan.pace import read_pace


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    with pytest.raises(BadInputError, match="is not a regular file"):
        read_json(pipe)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="is not a regular file"):
        read_json(tmp_path)


@pytest.mark.parametrize("rate", [1e-9, 1e9])
def test_a_rate_that_shows_nothing_is_refused_with_the_bounds(rate: float, tmp_path: Path) -> None:
    path = tmp_path / "injection.json"
    path.write_text(json.dumps([{"gpu": 0, "rate": rate, "from_iteration": 1}]))
    with pytest.raises(BadInputError, match=r"from 0\.01 to 1000"):
        read_injection(path)


def test_a_degree_of_thousands_of_digits_is_refused_in_short(tmp_path: Path) -> None:
    path = tmp_path / "pace.json"
    key = "1" * 5000
    path.write_text(json.dumps({"layer_forward_s": {key: 1}, "layer_backward_s": {key: 1}}))
    with pytest.raises(BadInputError, match="is not a TP degree") as raised:
        read_pace(path)
    assert len(str(raised.value)) < 300
