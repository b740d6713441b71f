"""Text files become a dataset that Megatron reads, and come back from it byte for byte."""

import json
import os
import runpy
import sys
import sysconfig
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training.arguments import add_megatron_arguments

from malleus_megatron.adapter import text_data
from malleus_megatron.adapter.text_data import DataSummary, prepare_text_data
from malleus_megatron.errors import BadInputError

SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_data.py"
SEQ_LENGTH = 32
MASKS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
TEXTS = {
    "a-b.txt": b"before a/ by its path\n",
    "a/deep/er/one.txt": "naïve café — 数 🙂".encode(),
    "a/latin1.txt": "naïve café".encode("latin-1"),
    "a/windows.txt": b"one\r\ntwo\rthree",
    "b/every-byte.txt": bytes(range(1, 256)) * 3,
    "b/newline.txt": b"\n",
    "z.txt": b"x" * 70_000,
}


def make_folder(folder: Path, texts: dict[str, bytes]) -> Path:
    for name, content in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def documents(prefix: Path) -> list[bytes]:
    """What Megatron reads: each document's bytes, without its end."""
    dataset = IndexedDataset(str(prefix))
    assert list(dataset.document_indices) == list(range(len(dataset) + 1))
    read = [dataset[index] for index in range(len(dataset))]
    assert all(tokens[-1] == 256 and tokens[:-1].max() < 256 for tokens in read)
    return [bytes(tokens[:-1].astype(np.uint8)) for tokens in read]


def megatron_args(summary: DataSummary) -> Namespace:
    """The flags as Megatron's own parser reads them."""
    parser = add_megatron_arguments(ArgumentParser(allow_abbrev=False))
    args: Namespace = parser.parse_args(list(summary.megatron_flags()))
    args.rank = 0
    return args


def gpt_builder(
    summary: DataSummary,
    split: str,
    *,
    dataset_class: type[GPTDataset] = GPTDataset,
    masks: Iterable[str] = (),
) -> BlendedMegatronDatasetBuilder:
    args = megatron_args(summary)
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=SEQ_LENGTH,
        blend=(args.data_path, None),
        split=split,
        tokenizer=build_tokenizer(args),
        **{name: name in masks for name in MASKS},
    )
    return BlendedMegatronDatasetBuilder(dataset_class, [40, 10, 10], lambda: True, config)


def train_dataset(summary: DataSummary, *, masks: Iterable[str] = ()) -> GPTDataset:
    return gpt_builder(summary, "100,0,0", masks=masks).build()[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "texts", TEXTS)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "made" / "here" / "data"


def test_every_byte_comes_back_in_the_order_of_the_paths(folder, out):
    summary = prepare_text_data(folder, out)

    assert documents(out) == [TEXTS[name] for name in sorted(TEXTS)]
    assert summary.num_files == len(TEXTS)
    assert summary.num_bytes == sum(map(len, TEXTS.values()))
    assert summary.num_tokens == summary.num_bytes + summary.num_files
    assert out.with_suffix(".bin").stat().st_size == 2 * summary.num_tokens
    assert summary.skipped == ()
    assert sorted(path.name for path in out.parent.iterdir()) == ["data.bin", "data.idx"]


def test_equal_folders_give_equal_files(folder, out, tmp_path):
    reversed_texts = dict(reversed(TEXTS.items()))
    twin = make_folder(tmp_path / "twin", reversed_texts)
    prepare_text_data(folder, out)
    prepare_text_data(twin, tmp_path / "other")

    for suffix in (".bin", ".idx"):
        assert out.with_suffix(suffix).read_bytes() == (tmp_path / f"other{suffix}").read_bytes()


def test_megatron_takes_the_flags_and_agrees_on_vocabulary_end_and_dtype(folder, out):
    summary = prepare_text_data(folder, out)
    args = megatron_args(summary)
    tokenizer = build_tokenizer(args)

    assert args.data_path == [str(out)]
    assert tokenizer.vocab_size == args.vocab_size == summary.vocab_size == 257
    assert tokenizer.eod == summary.end_of_document == 256
    assert summary.dtype == DType.optimal_dtype(257).__name__
    assert IndexedDataset(str(out)).index.dtype is np.uint16


def test_gpt_dataset_reads_consecutive_tokens(folder, out):
    train = train_dataset(prepare_text_data(folder, out))

    dataset = IndexedDataset(str(out))
    order = [dataset[int(index)] for index in train.document_index]
    stream = torch.from_numpy(np.concatenate(order).astype(np.int64))
    for index in range(len(train)):
        start = int(train.shuffle_index[index]) * SEQ_LENGTH
        sample = train[index]
        assert torch.equal(sample["tokens"], stream[start : start + SEQ_LENGTH])
        assert torch.equal(sample["labels"], stream[start + 1 : start + 1 + SEQ_LENGTH])
        assert sample["loss_mask"].min() == 1


def test_documents_are_told_apart_by_their_end(tmp_path, out):
    short = {f"{index:02}.txt": b"ab" * (index + 1) for index in range(12)}
    summary = prepare_text_data(make_folder(tmp_path / "short", short), out)
    train = train_dataset(summary, masks=MASKS)

    num_ends = 0
    for sample in (train[index] for index in range(len(train))):
        ends = (sample["tokens"] == 256).nonzero().flatten().tolist()
        num_ends += len(ends)
        assert torch.equal(sample["loss_mask"] == 0, sample["tokens"] == 256)
        for first, last in zip([0, *(end + 1 for end in ends)], [*ends, SEQ_LENGTH], strict=True):
            positions = sample["position_ids"][first : last + 1]
            assert positions.tolist() == list(range(len(positions)))
            masked = sample["attention_mask"][0, first:, :first]
            assert masked.all()
    assert num_ends > 12


def test_an_older_datasets_cached_order_is_not_used_for_the_new_one(folder, out, tmp_path):
    old = prepare_text_data(folder, out)
    train_dataset(old)
    new_texts = {"only.txt": b"0123456789" * 1000}
    new = prepare_text_data(make_folder(tmp_path / "new", new_texts), out, overwrite=True)
    train = train_dataset(new)

    assert set(train.document_index) == {0}
    for index in range(len(train)):
        assert set(train[index]["tokens"].tolist()) <= {*b"0123456789", 256}


def test_what_is_skipped_and_why(folder, out):
    make_folder(
        folder,
        {
            "s/0-empty.txt": b"",
            "s/1-head.bin": b"\x7fELF\0",
            "s/2-late.bin": b"text " * 4000 + b"\0",
            "s/.hidden": b"not looked at",
            ".git/config": b"not looked at",
            "s/3-long.txt": b"long " * 2000,
        },
    )
    os.truncate(folder / "s/3-long.txt", 2**31 - 1)
    (folder / "s/4-gone").symlink_to("nowhere")
    os.mkfifo(folder / "s/5-pipe")
    (folder / "s/6-unreadable").symlink_to("/proc/self/mem")
    (folder / "s/7-loop").symlink_to(folder)
    summary = prepare_text_data(folder, out)

    assert {file.path: file.reason for file in summary.skipped} == {
        "s/0-empty.txt": "empty",
        "s/1-head.bin": "binary",
        "s/2-late.bin": "binary",
        "s/3-long.txt": "too long",
        "s/4-gone": "not a regular file",
        "s/5-pipe": "not a regular file",
        "s/6-unreadable": "unreadable",
        "s/7-loop": "not a regular file",
    }
    assert documents(out) == [TEXTS[name] for name in sorted(TEXTS)]
    assert str(summary).endswith(
        "skipped: 2 binary, 1 empty, 3 not a regular file, 1 too long, 1 unreadable"
    )


def test_a_folder_that_cannot_be_listed_is_named(folder, out, monkeypatch):
    listed = os.scandir

    def scandir(path):
        if path in {folder / "b", str(folder / "b")}:
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    summary = prepare_text_data(folder, out)

    assert [(file.path, file.reason) for file in summary.skipped] == [("b", "unreadable")]
    assert summary.num_files == len(TEXTS) - 2


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (("*.txt",), sorted(TEXTS)),
        (("z.*", "wind*"), ["a/windows.txt", "z.txt"]),
        (("b/*.txt",), ["b/every-byte.txt", "b/newline.txt"]),
    ],
)
def test_patterns(folder, out, patterns, expected):
    prepare_text_data(folder, out, patterns=patterns)
    assert documents(out) == [TEXTS[name] for name in expected]


def test_the_limit_stops_before_the_file_that_passes_it(folder, out):
    names = sorted(TEXTS)
    enough = sum(len(TEXTS[name]) for name in names[:4])
    exact = prepare_text_data(folder, out, limit_bytes=enough)
    assert (exact.num_files, exact.num_beyond_limit) == (4, 3)
    short = prepare_text_data(folder, out, limit_bytes=enough - 1, overwrite=True)
    assert (short.num_files, short.num_beyond_limit) == (3, 4)
    assert documents(out) == [TEXTS[name] for name in names[:3]]


def test_pythons_standard_library(out):
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    summary = prepare_text_data(stdlib, out, patterns=("*.py",), limit_bytes=2_000_000)

    assert 1_500_000 < summary.num_bytes <= 2_000_000
    assert summary.num_files > 50
    paths = sorted(map(Path.as_posix, stdlib.rglob("*.py")))
    texts = (content for path in paths if (content := Path(path).read_bytes()))
    for document, text in zip(documents(out), texts, strict=False):
        assert document == text
    parts = gpt_builder(summary, megatron_args(summary).split).build()
    assert [len(part) >= wanted for part, wanted in zip(parts, (40, 10, 10), strict=True)] == [
        True
    ] * 3


class SizeOnly(GPTDataset):  # type: ignore[misc]
    """Knows how many documents Megatron gives it, and builds nothing."""

    def __init__(self, *arguments):
        self.indices = arguments[2]

    def __len__(self):
        return 0


@pytest.mark.parametrize("num_files", [1, 2, 5, 9, 10, 11, 19, 20, 333])
def test_a_part_without_a_document_is_refused(tmp_path, num_files):
    texts = {f"{index:03}": b"text" * 20 for index in range(num_files)}
    summary = prepare_text_data(make_folder(tmp_path / "t", texts), tmp_path / "out")

    def has_empty_part(split: str) -> bool:
        parts = gpt_builder(summary, split, dataset_class=SizeOnly).build()
        return any(part is not None and len(part.indices) == 0 for part in parts)

    assert not has_empty_part(summary.megatron_flags()[-1])
    for split in ("90,5,5", "969,30,1", "100,0,0", "1,1,0", "0,0.5,0.5", "1,0,2"):
        if has_empty_part(split):
            with pytest.raises(BadInputError, match=f"--split {split} of {num_files} documents"):
                summary.megatron_flags(split)
        else:
            assert summary.megatron_flags(split)[-1] == split


@pytest.mark.parametrize("split", ["", "abc", "90;5;5", "90,10", "0,0,0", "-1,1,1", "1,1,1,1"])
def test_shares_that_are_none(split):
    with pytest.raises(BadInputError, match="three shares"):
        text_data.check_split(split)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"patterns": ("*.rst", "*.md")}, "no file matches *.rst or *.md"),
        ({"patterns": ()}, "pattern is empty"),
        ({"patterns": ("*.txt", "")}, "pattern is empty"),
        ({"limit_bytes": 0}, "limit is 0 bytes"),
        ({"limit_bytes": 21}, "larger than the limit of 21 bytes"),
    ],
)
def test_bad_options(folder, out, options, words):
    with pytest.raises(BadInputError) as raised:
        prepare_text_data(folder, out, **options)
    assert words in str(raised.value)
    assert not out.parent.exists() or not list(out.parent.iterdir())


def test_folders_without_text(tmp_path, out):
    with pytest.raises(BadInputError, match="nowhere is not a folder"):
        prepare_text_data(tmp_path / "nowhere", out)
    with pytest.raises(BadInputError, match="no file matches"):
        prepare_text_data(make_folder(tmp_path / "bare", {".hidden": b"text"}), out)
    with pytest.raises(BadInputError, match="skipped: 1 binary, 2 empty"):
        texts = {"a": b"", "b": b"", "c": b"\0"}
        prepare_text_data(make_folder(tmp_path / "none", texts), out)
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_an_existing_dataset_is_kept_unless_told(folder, out, suffix):
    out.parent.mkdir(parents=True)
    out.with_suffix(suffix).write_bytes(b"precious")
    with pytest.raises(BadInputError, match=f"data{suffix} exists"):
        prepare_text_data(folder, out)
    assert out.with_suffix(suffix).read_bytes() == b"precious"
    assert len(list(out.parent.iterdir())) == 1

    prepare_text_data(folder, out, overwrite=True)
    assert len(documents(out)) == len(TEXTS)


@pytest.mark.parametrize("name", ["data.bin", "data.idx", ""])
def test_out_is_a_prefix(folder, name):
    with pytest.raises(BadInputError, match=r"without \.bin and \.idx"):
        prepare_text_data(folder, Path(name), overwrite=True)


def test_a_place_that_cannot_be_written(folder):
    with pytest.raises(BadInputError, match=r"data cannot be written: .*z\.txt: File exists"):
        prepare_text_data(folder, folder / "z.txt" / "data")


def test_an_interrupted_run_leaves_nothing_and_keeps_the_old(folder, out, monkeypatch):
    prepare_text_data(folder, out, patterns=("z.txt",))
    real = text_data._read_text

    def interrupted(path: Path) -> bytes:
        if path.name == "windows.txt":
            raise KeyboardInterrupt
        return real(path)

    monkeypatch.setattr(text_data, "_read_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare_text_data(folder, out, overwrite=True)

    assert sorted(path.name for path in out.parent.iterdir()) == ["data.bin", "data.idx"]
    assert documents(out) == [TEXTS["z.txt"]]


def test_a_half_replaced_dataset_does_not_look_whole(folder, out, monkeypatch):
    prepare_text_data(folder, out)
    real = Path.replace

    def fails_at_the_index(self: Path, target: Path) -> Path:
        if self.suffix == ".idx":
            raise OSError(28, "No space left on device")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", fails_at_the_index)
    with pytest.raises(BadInputError, match="No space left on device"):
        prepare_text_data(folder, out, overwrite=True)
    assert not IndexedDataset.exists(str(out))


def test_the_bar_goes_to_stderr(folder, out, capsys):
    prepare_text_data(folder, out, progress=True)
    shown = capsys.readouterr()
    assert "7/7" in shown.err
    assert shown.out == ""


def run_script(monkeypatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
    with pytest.raises(SystemExit) as raised:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return int(raised.value.code or 0)


def test_script_says_it_in_a_line_and_gives_the_flags(folder, out, monkeypatch, capsys):
    assert run_script(monkeypatch, folder, out, "--pattern", "*.txt", "*.md") == 0
    line, flags = capsys.readouterr().out.splitlines()
    num_bytes = sum(map(len, TEXTS.values()))
    assert line == (
        f"7 files, {num_bytes} bytes: {num_bytes + 7} tokens of a vocabulary of 257; skipped: none"
    )
    assert flags == (
        f"--data-path {out} --tokenizer-type NullTokenizer --vocab-size 257 --split 100,0,0"
    )


def test_script_prints_one_json_document(folder, out, monkeypatch, capsys):
    arguments = ("--json", "--split", "2,1,1", "--limit-bytes", "1000")
    assert run_script(monkeypatch, folder, out, *arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == {
        "prefix": str(out),
        "num_files": 6,
        "num_bytes": sum(len(TEXTS[name]) for name in sorted(TEXTS)[:6]),
        "num_tokens": sum(len(TEXTS[name]) + 1 for name in sorted(TEXTS)[:6]),
        "vocab_size": 257,
        "end_of_document": 256,
        "dtype": "uint16",
        "skipped": [],
        "num_beyond_limit": 1,
        "megatron_flags": [
            *("--data-path", str(out), "--tokenizer-type", "NullTokenizer"),
            *("--vocab-size", "257", "--split", "2,1,1"),
        ],
    }


@pytest.mark.parametrize("arguments", [("--pattern", "*.rst"), ("--split", "9,1")])
def test_script_refuses_in_one_sentence(folder, out, monkeypatch, capsys, arguments):
    assert run_script(monkeypatch, folder, out, *arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("prepare_data: ")
    assert shown.err.count("\n") == 1
    assert not out.with_suffix(".bin").exists()
