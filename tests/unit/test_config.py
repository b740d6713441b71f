"""The flags: what is taken out of a command line, what is left, what is refused."""

import argparse
import dataclasses
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from malleus_megatron.config import Level, MalleusConfig, add_flags, flag_names, split_flags
from malleus_megatron.errors import BadInputError


def test_without_flags_the_plugin_is_off() -> None:
    config, rest = split_flags([])
    assert config == MalleusConfig()
    assert not config.enabled
    assert (config.device, config.sidecar) == ("auto", "auto")
    assert (config.check_replicas, config.on_bad_replica) == (100, "warn")
    assert rest == []


def test_every_flag_is_read_and_the_rest_stays_in_order() -> None:
    line = (
        "--num-layers 4 --malleus --malleus-plan a.json --lr 1e-3 --malleus-plan-schedule=s.json "
        "--malleus-inject i.json --malleus-pace p.json --malleus-log-dir out --bf16 "
        "--malleus-require rebalance --malleus-device cpu --malleus-sidecar http://127.0.0.1:80 "
        "--malleus-check-replicas 20 --malleus-on-bad-replica repair --malleus-memory 7e4 "
        "--malleus-trace 20 --malleus-migration-memory 512 --malleus-record losses.jsonl "
        "--data-path 0.5 a 0.5 b"
    )
    config, rest = split_flags(line.split())
    assert rest == "--num-layers 4 --lr 1e-3 --bf16 --data-path 0.5 a 0.5 b".split()
    assert config == MalleusConfig(
        enabled=True,
        plan=Path("a.json"),
        plan_schedule=Path("s.json"),
        inject=Path("i.json"),
        pace=Path("p.json"),
        log_dir=Path("out"),
        require=Level.rebalance,
        device="cpu",
        sidecar="http://127.0.0.1:80",
        check_replicas=20,
        on_bad_replica="repair",
        memory=70000.0,
        migration_memory=512,
        trace=20,
        record=Path("losses.jsonl"),
    )


words = st.text(st.characters(codec="ascii", exclude_categories=["C"]), max_size=8)
foreign = st.one_of(
    words, words.map("-{}".format), words.map("--{}".format), st.floats().map(str)
).filter(lambda word: word != "--" and not word.startswith("--malleus"))


@given(before=st.lists(foreign), after=st.lists(foreign))
@example(before=["--lr", "-1e-3"], after=["--m", "--", "x"])
@example(before=["--mal", "--malle=3"], after=["-m", "--help", "-h"])
def test_the_arguments_of_others_are_never_touched(before: list[str], after: list[str]) -> None:
    config, rest = split_flags([*before, "--malleus", *after])
    assert config.enabled
    assert rest == [*before, *after]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--malleus --malleus-colour red", "Unknown flag --malleus-colour"),
        ("--malleus --malleus-pla a.json", "Unknown flag --malleus-pla"),
        ("--malleusx", "Unknown flag --malleusx. Known: --malleus, --malleus-plan"),
        ("--malleus --malleus-plan", "--malleus-plan: expected one argument"),
        ("--malleus --malleus-require much", "--malleus-require: invalid choice: 'much'"),
        ("--malleus --malleus-memory all", "--malleus-memory: 'all' is no number of MiB above 0"),
        ("--malleus --malleus-memory 0", "--malleus-memory: '0' is no number of MiB above 0"),
        ("--malleus --malleus-memory nan", "--malleus-memory: 'nan' is no number of MiB above 0"),
        ("--malleus --malleus-device tpu", "--malleus-device: invalid choice: 'tpu'"),
        (
            "--malleus --malleus-check-replicas often",
            "--malleus-check-replicas: 'often' is no whole number from 0",
        ),
        ("--malleus --malleus-check-replicas=-1", "'-1' is no whole number from 0"),
        ("--malleus --malleus-check-replicas=1.5", "'1.5' is no whole number from 0"),
        (
            "--malleus --malleus-on-bad-replica mend",
            "--malleus-on-bad-replica: invalid choice: 'mend'",
        ),
        ("--malleus --malleus-migration-memory 0", "'0' is no number of MiB above 0"),
        ("--malleus --malleus-migration-memory much", "'much' is no number of MiB above 0"),
        ("--malleus --malleus-trace=-1", "--malleus-trace: '-1' is no whole number from 0"),
        ("--malleus --malleus-trace 5", "--malleus-trace needs --malleus-log-dir"),
        ("--malleus-log-dir out --malleus-trace 5", "needs --malleus."),
        ("--malleus=yes", "--malleus: ignored explicit argument 'yes'"),
    ],
)
def test_a_wrong_flag_is_refused_by_name(line: str, said: str) -> None:
    with pytest.raises(BadInputError) as refusal:
        split_flags(line.split())
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--malleus-plan", "a.json"),
        ("--malleus-plan-schedule", "a.json"),
        ("--malleus-inject", "a.json"),
        ("--malleus-pace", "a.json"),
        ("--malleus-log-dir", "out"),
        ("--malleus-require", "observe"),
        ("--malleus-sidecar", "none"),
        ("--malleus-check-replicas", "0"),
        ("--malleus-on-bad-replica", "stop"),
        ("--malleus-migration-memory", "64"),
    ],
)
def test_what_would_be_ignored_without_malleus_is_refused(flag: str, value: str) -> None:
    with pytest.raises(BadInputError, match=f"^{flag} needs --malleus.$"):
        split_flags([flag, value])
    assert split_flags([flag, value, "--malleus"])[0].enabled


def test_what_works_without_malleus() -> None:
    config, _ = split_flags(["--malleus-device", "cpu", "--malleus-record", "r.jsonl"])
    assert (config.enabled, config.device, config.record) == (False, "cpu", Path("r.jsonl"))


def test_another_parser_learns_all_flags_and_keeps_their_values_as_text() -> None:
    """Megatron writes its arguments into checkpoints: they must stay plain values."""
    parser = add_flags(argparse.ArgumentParser())
    given_flags = [
        word for name in flag_names()[1:] for word in (name, _example_value(name)) if word
    ]
    values = vars(parser.parse_args(["--malleus", *given_flags]))
    assert values.pop("malleus") is True
    assert len(values) == len(flag_names()) - 1
    assert all(isinstance(value, str) for value in values.values())


def _example_value(flag: str) -> str:
    examples = {
        "--malleus-require": "observe",
        "--malleus-device": "cpu",
        "--malleus-on-bad-replica": "stop",
    }
    return examples.get(flag, "x")


def test_every_field_is_a_flag_with_a_help_text() -> None:
    fields = dataclasses.fields(MalleusConfig)
    assert len(flag_names()) == len(fields)
    for field in fields:
        if field.name != "enabled":
            assert f"--malleus-{field.name.replace('_', '-')}" in flag_names()
            assert field.metadata["help"]


def test_levels_are_ordered() -> None:
    assert Level.observe < Level.rebalance < Level.reshape


@pytest.mark.parametrize("name", ["plan", "plan-schedule", "inject", "pace", "log-dir", "record"])
def test_an_empty_path_is_refused_with_its_flag(name: str) -> None:
    with pytest.raises(BadInputError, match=rf"--malleus-{name}: the path is empty"):
        split_flags(["--malleus", f"--malleus-{name}", ""])
