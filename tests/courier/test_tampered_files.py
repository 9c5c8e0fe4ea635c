"""Tampered courier files: none is accepted, and every refusal is one line."""

import json
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from mutate import damaged_value
from safetensors.torch import save

from fedcir.cli.application import describe_failure
from fedcir.courier import CourierFile, merge_courier_files, read_courier_file
from fedcir.courier.message_file import FORMAT, MAX_HEADER
from fedcir.errors import InputError
from fedcir.signing import open_key, sign

MANY = pytest.param(range(50, 1000), marks=pytest.mark.slow, id="1,000")
SEEDS = pytest.mark.parametrize("seeds", [pytest.param(range(50), id="50"), MANY])


def tamper(files: list[bytes], rng: random.Random) -> bytes:
    """A file that somebody without the site's key has changed."""
    data, other = rng.sample(files, 2)
    line, other_line = (file.index(b"\n") + 1 for file in (data, other))
    at = rng.randrange(len(data))
    flipped = bytes([data[at] ^ 1 << rng.randrange(8)])
    end = line + 8 + int.from_bytes(data[line : line + 8], "little")  # of the header
    middle = (end + len(data)) // 2
    return rng.choice([
        lambda: data[:at] + flipped + data[at + 1 :],
        lambda: data[:at],
        lambda: data[:at] + rng.randbytes(rng.randint(1, 40)) + data[at:],
        lambda: data + rng.choice([b"\0", data[line:], data]),
        lambda: data[:line] + other[other_line:],  # swapped messages
        lambda: data[:end] + other[len(other) - (len(data) - end) :],  # swapped sums
        lambda: data[:end] + data[middle:] + data[end:middle],  # swapped tensors
        lambda: data[:end] + data[end:middle] * 2,  # a part twice
        lambda: data.replace(b"pets", b"cats"),
        lambda: data.replace(b"validation_low", b"validation_hig"),
        lambda: data.replace(b"fedcir-courier 1", b"fedcir-courier %d" % rng.randint(2, 9)),
        lambda: data[:line].upper() + data[line:],
        lambda: data[:20] + rng.randbytes(32).hex().encode() + data[84:],  # another key
    ])()  # fmt: skip


def refusal(work: Callable[[], object]) -> str:
    """The line that refuses something; empty if it was accepted."""
    try:
        work()
    except InputError as error:
        line, code = describe_failure(error)
        assert code == 2
        assert line.isprintable()
        assert len(line) < 1500
        return line
    return ""


@SEEDS
def test_no_tampered_file_is_accepted(sent: list[CourierFile], encoder: str, tmp_path: Path, seeds: range) -> None:
    files, path = [file.path.read_bytes() for file in sent], tmp_path / "tampered.fedcir"
    accepted = []
    for seed in seeds:
        path.write_bytes(content := tamper(files, random.Random(seed)))
        assert content not in files
        accepted += [seed] if not refusal(lambda: read_courier_file(path)) else []
    assert accepted == []
    everyone = [path, *(file.path for file in sent[1:])]
    assert refusal(lambda: merge_courier_files(everyone, tmp_path / "run", encoder=encoder))
    assert not (tmp_path / "run").exists()


def test_a_file_of_another_format_is_named(sent: list[CourierFile], tmp_path: Path) -> None:
    path = tmp_path / "new.fedcir"
    path.write_bytes(sent[0].path.read_bytes().replace(b"fedcir-courier 1", b"fedcir-courier 2"))
    assert f"it has format 2, but this fedcir reads format {FORMAT}" in refusal(lambda: read_courier_file(path))


def signed(content: bytes, key: Path) -> bytes:
    """Any content with a valid signature: what a hostile site can send."""
    signature = sign(open_key(key), f"courier {FORMAT}", content)
    return f"fedcir-courier {FORMAT} {signature.public_key} {signature.signature}\n".encode() + content


@pytest.mark.parametrize(
    "seeds", [pytest.param(range(60), id="60"), pytest.param(range(60, 1000), marks=pytest.mark.slow)]
)
def test_a_hostile_site_is_refused_in_one_line_or_says_the_same(
    sent: list[CourierFile], tmp_path: Path, seeds: range
) -> None:
    path, header = tmp_path / "hostile.fedcir", json.loads(json.dumps(asdict(sent[0].header)))
    for seed in seeds:
        rng = random.Random(seed)
        values = damaged_value(header, rng)
        path.write_bytes(signed(save(sent[0].sums, {"fedcir": json.dumps(values)}), tmp_path / "hostile.key"))
        if not refusal(lambda: read_courier_file(path)):
            assert all(name.isprintable() for name in (read_courier_file(path).header.site, values["site"]))


def test_a_hostile_site_cannot_send_other_tensors(sent: list[CourierFile], tmp_path: Path) -> None:
    sums, about = sent[0].sums, {"fedcir": json.dumps(asdict(sent[0].header))}
    negative, more = {**sums, "train_low": -sums["train_low"] - 1}, {**sums, "images": sums["train_low"].clone()}
    short = {name: tensor[:-1] for name, tensor in sums.items()}
    floats = {name: tensor.double() for name, tensor in sums.items()}
    doubled = {name: 2 * tensor if name == "train_high" else tensor for name, tensor in sums.items()}
    large = {**sums, "train_high": sums["train_high"] + 5_000_000}
    contents = [save(bad, about) for bad in (negative, more, short, floats, doubled, large, {})]
    long = (MAX_HEADER + 1).to_bytes(8, "little") + b" " * 100
    contents += [save(sums), long, b"", b"\xff" * 8, (10).to_bytes(8, "little") + b"[" * 10]
    nested = b'{"__metadata__":' + b"[" * 200_000
    contents.append(len(nested).to_bytes(8, "little") + nested)
    path = tmp_path / "hostile.fedcir"
    for content in contents:
        path.write_bytes(signed(content, tmp_path / "hostile.key"))
        assert refusal(lambda: read_courier_file(path)), content[:200]
