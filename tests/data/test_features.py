"""Features of a frozen encoder are kept per image: whoever needs one that is stored computes nothing."""

import hashlib
import json
import os
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fedcir
from fedcir.config import Config, ConfigRequest
from fedcir.data import features
from fedcir.data.cache import cache_entries, image_digests
from fedcir.data.domains import Split
from fedcir.data.examples import ImageExamples, Normalisation
from fedcir.data.features import BATCH, FeatureCache, FeatureStore, compute_features
from fedcir.data.federation import open_federation, partition_dataset
from fedcir.errors import InputError
from fedcir.models.builder import make_image_builder

Tiny = Callable[..., Config]
Train = Callable[..., Path]
FREEZE = "model.freeze=true"
IMAGES = 3 * (24 + 12)  # in the dataset of `tiny`


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDCIR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many features each call computed."""
    counts: list[int] = []

    def counting(network: object, examples: object, positions: object, *more: object) -> object:
        counts.append(len(positions))  # type: ignore[arg-type]
        return compute_features(network, examples, positions, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(features, "compute_features", counting)
    return counts


def load(config: Config) -> np.ndarray:
    """The features of all images of a dataset."""
    federation = open_federation(config)
    federation.load_features()
    assert federation.features is not None
    values, rows = federation.features.loaded
    return np.array(values[np.concatenate(list(rows.values()))])


def random_images(count: int, seed: int = 0, size: int = 8) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


@pytest.fixture
def cache(tiny: Tiny) -> FeatureCache:
    """The features of 8x8 images under a small frozen network."""
    model, normalisation = tiny("fedavg", FREEZE).model, Normalisation.default(3)
    network = make_image_builder(model, 3, 3, 0, 8).frozen
    assert network is not None
    return FeatureCache(model, network, normalisation, (8, 8, 3), workers=1)


def features_in(cache: FeatureCache, images: np.ndarray) -> np.ndarray:
    values, rows = cache.load([(images, np.arange(len(images)))])
    return np.array(values[rows])


@pytest.mark.parametrize("name", ["cnn", "resnet18", "efficientnet-lite0"])
def test_neither_its_neighbours_nor_its_place_in_a_batch_change_a_bit_of_an_images_features(name: str) -> None:
    if name == "efficientnet-lite0":
        pytest.importorskip("efficientnet_lite_pytorch")
    small = ["model.width=8"] if name == "resnet18" else []
    model = ConfigRequest(options={"model": name}, assignments=[FREEZE, *small]).resolve().model
    network = make_image_builder(model, 3, 3, 0, 32).frozen
    assert network is not None
    images = random_images(BATCH + 3, size=32)
    split = Split(images, np.zeros(len(images), dtype=np.int64), "")
    examples = ImageExamples(split, Normalisation.default(3))
    together = compute_features(network, examples, np.arange(len(images)))
    for order in (np.arange(len(images))[::-1], np.roll(np.arange(len(images)), 5)):
        assert np.array_equal(compute_features(network, examples, order), together[order])
    alone = np.concatenate([compute_features(network, examples, np.array([row])) for row in (0, 4, BATCH + 2)])
    assert np.array_equal(alone, together[[0, 4, BATCH + 2]])


def test_several_processes_compute_the_same_features(cache: FeatureCache) -> None:
    images = random_images(5 * BATCH + 1)
    examples = ImageExamples(Split(images, np.zeros(len(images), dtype=np.int64), ""), cache.normalisation)
    one, three = (compute_features(cache.network, examples, np.arange(len(images)), workers) for workers in (1, 3))
    assert np.array_equal(one, three)


def test_features_are_computed_once_for_an_image_an_encoder_and_a_normalisation(
    tiny: Tiny, computed: list[int], own_cache: Path
) -> None:
    same = [(), ("partition.scheme=dirichlet",), ("model.hidden=4",), ("algorithm.name=fedprox",)]
    for more in same:
        load(tiny("fedavg", FREEZE, *more))
    assert computed == [IMAGES]
    others = [("run.seed=1",), ("model.width=3",), ("model.mean=[0.5, 0.5, 0.5]", "model.std=[1, 1, 1]")]
    for count, more in enumerate(others, start=2):
        load(tiny("fedavg", FREEZE, *more))
        assert computed == [IMAGES] * count
    assert [(entry.dataset, entry.root, entry.images, entry.size) for entry in cache_entries()] == [
        ("features", "cnn", IMAGES, 8)
    ] * 4
    assert not list(own_cache.glob("build-*[!k]"))  # only locks


def test_twelve_added_images_compute_twelve_features(cache: FeatureCache, computed: list[int]) -> None:
    images = random_images(52)
    before = features_in(cache, images[:40])
    after = features_in(cache, images)
    assert computed == [40, 12]
    assert np.array_equal(after[:40], before)


def test_features_do_not_depend_on_which_images_were_in_the_cache(
    cache: FeatureCache, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = random_images(30)
    for some in (slice(3, 4), slice(20, 27), slice(0, 30)):
        grown = features_in(cache, images[some])
    monkeypatch.setenv("FEDCIR_CACHE", str(own_cache) + "-2")
    assert np.array_equal(features_in(cache, images), grown)


def test_an_image_that_occurs_twice_is_computed_once(cache: FeatureCache, computed: list[int]) -> None:
    images = np.concatenate([random_images(3), random_images(3)])
    result = features_in(cache, images)
    assert computed == [3]
    assert np.array_equal(result[:3], result[3:])


def test_after_a_run_evaluate_audit_and_diagnose_compute_no_feature(
    tiny: Tiny, train: Train, tmp_path: Path, computed: list[int]
) -> None:
    out = train(tiny("fedavg", FREEZE, "model.hidden=5"), tmp_path / "run")
    assert computed == [IMAGES]
    evaluation = fedcir.evaluate(out).evaluation
    fedcir.audit(out, steps=0)
    fedcir.diagnose(out, out=None)
    assert computed == [IMAGES]
    final = fedcir.load_run(out).final
    assert {domain.domain: domain.accuracy for domain in evaluation} == pytest.approx(final["accuracy"])


def test_adapting_batchnorm_statistics_uses_images_and_not_their_cached_features(
    tiny: Tiny, train: Train, tmp_path: Path
) -> None:
    out = train(tiny("fedavg", FREEZE), tmp_path / "run")
    adapted = fedcir.evaluate(out, adapt=True).evaluation
    assert adapted.mean_before == pytest.approx(fedcir.evaluate(out).evaluation.mean.value)
    assert all(np.isfinite(domain.probabilities).all() for domain in adapted)


@pytest.mark.parametrize("change", ["local.lr=0.5", "server.rounds=1"])
def test_a_resume_that_is_refused_computes_no_feature(
    change: str, tiny: Tiny, train: Train, tmp_path: Path, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = train(tiny("fedavg", FREEZE), tmp_path / "run")
    monkeypatch.setenv("FEDCIR_CACHE", str(tmp_path / "empty"))
    computed.clear()
    with pytest.raises(InputError, match="was started with"):
        train(tiny("fedavg", FREEZE, change), out, resume=True)
    assert computed == []


def test_neither_a_finished_run_nor_one_whose_folder_is_taken_computes_features(
    tiny: Tiny, train: Train, tmp_path: Path, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny("fedavg", FREEZE)
    out = train(config, tmp_path / "run")
    monkeypatch.setenv("FEDCIR_CACHE", str(tmp_path / "empty"))
    computed.clear()
    train(config, out, resume=True)
    with pytest.raises(InputError, match="already holds a run"):
        train(config, out)
    assert computed == []


def test_an_evaluation_that_is_refused_computes_no_feature(
    tiny: Tiny, train: Train, tmp_path: Path, computed: list[int], write_domain: Callable[..., Path]
) -> None:
    out = train(tiny("fedavg", FREEZE), tmp_path / "run")
    computed.clear()
    other = tmp_path / "other"
    other.mkdir()
    write_domain(other / "ink.npz", classes=5, seed=9)
    with pytest.raises(InputError, match="does not know the classes"):
        fedcir.evaluate(out, data_root=other)
    assert computed == []


def damage(store: Path, how: str) -> None:
    file = store / how.partition(" ")[0]
    if how.endswith("gone"):
        file.unlink()
    elif how.endswith("cut"):
        os.truncate(file, file.stat().st_size - 7)
    elif how.endswith("empty"):
        os.truncate(file, 0)
    elif how.endswith("flipped"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    else:
        file.write_text(json.dumps({"size": 8, "width": json.loads(how.partition(" ")[2])}))


HARMS = [f"{file} {how}" for file in ("features", "images", "about.json") for how in ("gone", "cut", "empty")]
HARMS += ["features flipped", "images flipped", "about.json -1", "about.json 1e9", 'about.json "x"', "about.json 7"]


@pytest.mark.parametrize("harm", HARMS)
def test_damaged_features_are_noticed_and_computed_again(harm: str, cache: FeatureCache, own_cache: Path) -> None:
    images = random_images(20)
    whole = features_in(cache, images)
    [store] = own_cache.glob("features-*")
    damage(store, harm)
    assert np.array_equal(features_in(cache, images), whole)
    assert np.array_equal(features_in(cache, images), whole)


def test_of_one_flipped_bit_only_the_image_that_it_concerns_is_computed_again(
    cache: FeatureCache, own_cache: Path, computed: list[int]
) -> None:
    images = random_images(20)
    features_in(cache, images)
    damage(next(own_cache.glob("features-*")), "features flipped")
    features_in(cache, images)
    features_in(cache, images)
    assert computed == [20, 1]


def test_a_pipe_in_the_place_of_a_file_is_no_store(cache: FeatureCache, own_cache: Path) -> None:
    features_in(cache, random_images(4))
    [store] = own_cache.glob("features-*")
    for name in ("about.json", "images", "features"):
        content = (store / name).read_bytes()
        (store / name).unlink()
        os.mkfifo(store / name)
        values, rows = FeatureStore(store).find(np.zeros(1, "V16"))
        assert (len(values), rows.tolist()) == (0, [-1])
        (store / name).unlink()
        (store / name).write_bytes(content)


def test_a_link_in_the_store_is_not_written_through(cache: FeatureCache, own_cache: Path, tmp_path: Path) -> None:
    features_in(cache, random_images(4))
    [store] = own_cache.glob("features-*")
    mine = tmp_path / "mine"
    mine.write_bytes(b"kept")
    (store / "images").unlink()
    (store / "images").symlink_to(mine)
    with pytest.raises(InputError, match="images is a link"):
        features_in(cache, random_images(6, seed=1))
    assert mine.read_bytes() == b"kept"


def test_an_interrupt_loses_only_the_images_under_way(
    cache: FeatureCache, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "CHUNK", 16)
    images = random_images(40)

    def interrupt(done: int, total: int) -> None:
        if done > 32:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.load([(images, np.arange(40))], interrupt)
    features_in(cache, images)
    assert computed == [16, 16, 8, 8]


def test_what_a_killed_process_left_at_the_end_is_overwritten(cache: FeatureCache, own_cache: Path) -> None:
    images = random_images(12)
    first = features_in(cache, images[:8])
    [store] = own_cache.glob("features-*")
    with open(store / "features", "ab") as file:
        file.write(b"x" * 999)
    with open(store / "images", "ab") as file:
        file.write(b"half")
    assert np.array_equal(features_in(cache, images)[:8], first)
    width = first.shape[1]
    assert ((store / "features").stat().st_size, (store / "images").stat().st_size) == (12 * 4 * width, 12 * 20)


def test_a_store_that_nobody_may_write_is_read(cache: FeatureCache, own_cache: Path, computed: list[int]) -> None:
    features_in(cache, random_images(4))
    [store] = own_cache.glob("features-*")
    for path in (*store.iterdir(), store, own_cache):
        path.chmod(0o555 if path.is_dir() else 0o444)
    features_in(cache, random_images(4))
    own_cache.chmod(0o700)
    store.chmod(0o700)
    assert computed == [4]


def test_an_entry_is_the_hash_of_shape_and_pixels_and_a_checksum_of_hash_and_features(
    cache: FeatureCache, own_cache: Path
) -> None:
    [image] = random_images(1)
    [row] = features_in(cache, image[None])
    [store] = own_cache.glob("features-*")
    digest = hashlib.blake2b(b"(8, 8, 3)" + image.tobytes(), digest_size=16).digest()
    assert (store / "images").read_bytes() == digest + zlib.crc32(digest + row.tobytes()).to_bytes(4, "little")
    assert (store / "features").read_bytes() == row.tobytes()


def test_an_encoder_that_fails_leaves_nothing_in_the_cache(cache: FeatureCache, own_cache: Path) -> None:
    class Broken(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        features_in(replace(cache, network=Broken()), random_images(4))
    assert [path.suffix for path in own_cache.iterdir()] == [".lock"]


def test_other_pixels_weights_and_code_are_other_features(cache: FeatureCache, tmp_path: Path) -> None:
    other = make_image_builder(cache.model, 3, 3, 1, 8).frozen
    assert other is not None
    file = tmp_path / "mine.py"
    file.write_text("one")
    own = replace(cache, model=replace(cache.model, name=f"{file}:make", width=None))
    keys = [cache.key, replace(cache, network=other).key, replace(cache, shape=(9, 9, 3)).key, own.key]
    file.write_text("two")
    keys.append(replace(own).key)
    assert len(set(keys)) == 5


def test_a_prepared_dataset_holds_the_hashes_of_its_images(tmp_path: Path, own_cache: Path) -> None:
    root = tmp_path / "data"
    for number, image in enumerate(random_images(20)):
        path = root / f"a/{'cat' if number % 2 else 'dog'}/{number:03}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    options = {"dataset": "folders", "data_root": root, "image_size": 8}
    domains, _ = partition_dataset(ConfigRequest(options=options).resolve())
    images, rows = domains["a"].train.images, domains["a"].train.where
    known = image_digests(images, rows)
    assert known.tolist() == image_digests(np.array(images), rows).tolist()
    [prepared] = own_cache.glob("prepared-*")
    (prepared / "squares.npy").unlink()  # as an earlier version left it
    assert known.tolist() == image_digests(images, rows).tolist()
