"""Camelyon17 and iWildCam as WILDS unpacks them, in small."""

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedcir.config import DataConfig
from fedcir.data.domains import Domains
from fedcir.data.opening import open_dataset
from fedcir.data.sources.published import Camelyon17, IWildCam
from fedcir.errors import InputError

CAMELYON = ",patient,node,x_coord,y_coord,tumor,slide,center,split"
IWILDCAM = "split,location_remapped,location,sequence_remapped,y,category_id,datetime,filename,image_id"


def write_table(path: Path, header: str, rows: Sequence[Sequence[Any]], encoding: str = "utf-8") -> None:
    with open(path, "w", newline="", encoding=encoding) as file:
        csv.writer(file).writerows([header.split(","), *rows])


def picture(path: Path, number: int) -> None:
    """A small image that differs from all others in its bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    red, green = divmod(number, 256)
    Image.new("RGB", (2, 2), (red, green, 77)).save(path, format="PNG")


def hospitals(root: Path, *, encoding: str = "utf-8") -> Path:
    """Five centers of two patients each, with four normal and four tumor patches a patient: 80 in all."""
    rows: list[list[Any]] = []
    for center in range(5):
        for patient in (f"{20 * center + 4:03d}", f"{20 * center + 17:03d}"):
            for i in range(8):
                x, y = 3328 + 32 * i, 21792
                rows.append([len(rows), patient, 4, x, y, i % 2, 2 * center, center, 0])
                slide = f"patient_{patient}_node_4"
                picture(root / f"patches/{slide}/patch_{slide}_x_{x}_y_{y}.png", len(rows))
    write_table(root / "metadata.csv", CAMELYON, rows, encoding)
    return root


def cameras(root: Path, shots: Sequence[tuple[int, int, int, int]], names: dict[int, str] | None = None) -> Path:
    """A table of (camera, category, burst, so many images), with the images."""
    rows: list[list[Any]] = []
    for camera, category, burst, count in shots:
        for _ in range(count):
            file = f"8{len(rows):07d}.jpg"
            rows.append(
                ["train", camera, 900 - camera, burst, category % 7, category, "2013-01-17 13:05:00", file, file[:-4]]
            )
            picture(root / "train" / file, len(rows))
    write_table(root / "metadata.csv", IWILDCAM, rows)
    if names is not None:
        write_table(
            root / "categories.csv", "y,category_id,name", [[i, *named] for i, named in enumerate(names.items())]
        )
    return root


def opened(name: str, root: Path, seed: int = 0) -> Domains:
    return open_dataset(DataConfig(name, str(root), image_size=4), seed)


def edited(root: Path, change: Callable[[list[str]], list[str]], file: str = "metadata.csv") -> None:
    path = root / file
    path.write_text("\n".join(change(path.read_text(encoding="utf-8").splitlines())) + "\n", encoding="utf-8")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_camelyon17_has_a_domain_for_each_center_and_finds_patients_with_leading_zeros(
    encoding: str, tmp_path: Path
) -> None:
    domains = opened("camelyon17", hospitals(tmp_path, encoding=encoding))
    assert domains.names == tuple(f"hospital-{center}" for center in range(5))
    assert domains.classes == ("normal", "tumor")
    assert [(len(d.train), len(d.test)) for d in domains] == [(8, 8)] * 5  # of two patients, one
    parts = [part for domain in domains for part in (domain.train, domain.test)]
    labels = {name: label for part in parts for name, label in zip(part.ids, part.labels, strict=True)}
    assert labels["patches/patient_004_node_4/patch_patient_004_node_4_x_3328_y_21792.png"] == 0
    assert labels["patches/patient_097_node_4/patch_patient_097_node_4_x_3360_y_21792.png"] == 1
    assert len(labels) == 80


def test_a_patient_of_camelyon17_is_on_one_side_of_the_split(tmp_path: Path) -> None:
    for domain in opened("camelyon17", hospitals(tmp_path)):
        seen, tested = ({name.split("/")[1] for name in part.ids} for part in (domain.train, domain.test))
        assert len(seen) == len(tested) == 1
        assert not seen & tested


def test_camelyon17_names_a_patch_that_is_missing(tmp_path: Path) -> None:
    patch = hospitals(tmp_path) / "patches/patient_044_node_4/patch_patient_044_node_4_x_3360_y_21792.png"
    patch.unlink()
    with pytest.raises(InputError, match=f"{patch} is missing"):
        opened("camelyon17", tmp_path)


def test_camelyon17_without_one_of_its_centers_is_refused(tmp_path: Path) -> None:
    edited(hospitals(tmp_path), lambda lines: [line for line in lines if not line.endswith(",3,0")])
    with pytest.raises(InputError, match=r"lacks the domain 'hospital-3' of camelyon17"):
        opened("camelyon17", tmp_path)


@pytest.mark.parametrize(
    "row",
    ["1,004,4,3360", "1,004,4,3360,21792,1,0,", "1,004,4,3360,21792,1,0,x,0", "1,004,4,3360,21792,2,0,0,0"],
    ids=["short", "cut at a comma", "no center", "no tumor"],
)
def test_a_row_of_camelyon17_that_is_cut_short_or_odd_is_named_by_its_line(row: str, tmp_path: Path) -> None:
    edited(hospitals(tmp_path), lambda lines: [*lines[:2], row, *lines[3:]])
    with pytest.raises(InputError, match=r"metadata\.csv, line 3\b"):
        opened("camelyon17", tmp_path)


def test_a_column_that_is_missing_is_named_with_those_there_are(tmp_path: Path) -> None:
    edited(hospitals(tmp_path), lambda lines: [lines[0].replace("center", "hospital"), *lines[1:]])
    with pytest.raises(
        InputError, match=r"metadata\.csv has no column 'center'; it has .*patient, node, .*hospital, split"
    ):
        Camelyon17().list_images(tmp_path, DataConfig())
    write_table(tmp_path / "metadata.csv", IWILDCAM.replace("location_remapped", "camera"), [])
    with pytest.raises(InputError, match=r"no column 'location_remapped'; it has split, camera, location, "):
        IWildCam().list_images(tmp_path, DataConfig())


@pytest.mark.parametrize("name", ["camelyon17", "iwildcam"])
def test_a_folder_without_the_table_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"{tmp_path} holds no metadata\.csv"):
        opened(name, tmp_path)


TWO = [
    (camera, category, 100 * camera + 10 * category + burst, 1)
    for camera in (5, 12)
    for category in (3, 40)
    for burst in range(5)
]


def test_iwildcam_names_cameras_by_number_and_animals_by_name_though_ids_have_gaps(tmp_path: Path) -> None:
    names = {0: "empty", 3: "tayassu pecari", 40: "fox, red", 571: "lynx"}
    domains = opened("iwildcam", cameras(tmp_path, TWO, names))
    assert domains.names == ("camera-005", "camera-012")
    assert domains.classes == ("fox, red", "tayassu pecari")
    assert [(len(d.train), len(d.test)) for d in domains] == [(8, 2), (8, 2)]


def test_iwildcam_without_its_table_of_names_numbers_the_animals(tmp_path: Path) -> None:
    assert opened("iwildcam", cameras(tmp_path, TWO)).classes == ("category-003", "category-040")


def test_columns_that_nobody_asked_for_are_passed_over(tmp_path: Path) -> None:
    edited(cameras(tmp_path, TWO), lambda lines: [f"extra,{lines[0]}", *(f'"a, b",{line}' for line in lines[1:])])
    assert opened("iwildcam", tmp_path).names == ("camera-005", "camera-012")


def test_iwildcam_names_an_image_that_is_missing(tmp_path: Path) -> None:
    gone = cameras(tmp_path, TWO) / "train/80000007.jpg"
    gone.unlink()
    with pytest.raises(InputError, match=f"{gone} is missing"):
        opened("iwildcam", tmp_path)


def test_the_ten_cameras_with_most_animals_are_taken_and_of_equal_ones_the_lower_number(tmp_path: Path) -> None:
    # Cameras 1 to 9 show 6 animals; 10, 30 and 200 show 4. Camera 99 shows 50 times nothing and 3 animals.
    shots = [(c, a, 1000 * c + i, 1) for c in range(1, 10) for a in (1, 2) for i in (a, a + 10, a + 20)]
    shots += [(c, a, 1000 * c + i, 1) for c in (200, 30, 10) for a in (1, 2) for i in (a, a + 10)]
    shots += [(99, 0, 99000, 50), (99, 1, 99001, 1), (99, 2, 99002, 1), (99, 2, 99003, 1)]
    assert opened("iwildcam", cameras(tmp_path, shots)).names == tuple(f"camera-{n:03d}" for n in range(1, 11))


def test_the_ten_most_frequent_animals_of_the_cameras_are_taken_and_never_the_empty_one(tmp_path: Path) -> None:
    # Animals 11 to 19 appear 4 times, and so do 300 and 7, of which one is the tenth; 9 appears twice, none 60 times.
    often = range(11, 20)
    shots = [(c, a, 1000 * c + 10 * a + i, 1) for c in (1, 2) for a in (*often, 300, 7) for i in (0, 1)]
    shots += [(1, 9, 1999, 1), (2, 9, 2999, 1), (1, 0, 1, 30), (2, 0, 2, 30)]
    domains = opened("iwildcam", cameras(tmp_path, shots))
    assert domains.classes == ("category-007", *(f"category-{a:03d}" for a in often))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_burst_is_never_divided_and_a_cameras_shares_of_animals_are_kept(seed: int, tmp_path: Path) -> None:
    # Bursts of three images: camera 1 has 20 of one animal and 5 of the other, camera 2 has 5 and 15.
    counts = {(1, 1): 20, (1, 2): 5, (2, 1): 5, (2, 2): 15}
    shots = [(c, a, 1000 * c + 100 * a + burst, 3) for (c, a), n in counts.items() for burst in range(n)]
    cameras(tmp_path, shots)
    with open(tmp_path / "metadata.csv", newline="") as file:
        burst_of = {f"train/{row['filename']}": row["sequence_remapped"] for row in csv.DictReader(file)}
    domains = opened("iwildcam", tmp_path, seed)
    for domain, whole in zip(domains, ([20, 5], [5, 15]), strict=True):
        train, test = ({burst_of[name] for name in part.ids} for part in (domain.train, domain.test))
        assert not train & test
        assert np.bincount(domain.test.labels).tolist() == [3 * n // 5 for n in whole]
        assert np.bincount(domain.train.labels).tolist() == [3 * n * 4 // 5 for n in whole]


@pytest.mark.parametrize(
    "row",
    [
        "train,5,895,503",
        "train,,895,503,3,3,2013,80000001.jpg,80000001",
        "train,5,895,503,3,fox,2013,80000001.jpg,80000001",
        "train,5,895,503,3,3,2013,,",
    ],
    ids=["short", "no camera", "no number", "no file"],
)
def test_a_row_of_iwildcam_that_is_cut_short_or_odd_is_named_by_its_line(row: str, tmp_path: Path) -> None:
    edited(cameras(tmp_path, TWO), lambda lines: [*lines[:4], row, *lines[5:]])
    with pytest.raises(InputError, match=r"metadata\.csv, line 5\b"):
        IWildCam().list_images(tmp_path, DataConfig())


def test_a_table_of_nothing_but_empty_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="names no image of an animal"):
        opened("iwildcam", cameras(tmp_path, [(1, 0, 1, 4), (2, 0, 2, 4)]))


@pytest.mark.parametrize(
    "text",
    [b"y,name\n0,empty\n1,fox\n", "y,category_id,name\n1,3,Rüppell\n".encode("latin-1")],
    ids=["column", "latin-1"],
)
def test_a_table_of_names_that_does_not_read_is_named(text: bytes, tmp_path: Path) -> None:
    (cameras(tmp_path, TWO) / "categories.csv").write_bytes(text)
    with pytest.raises(InputError, match=r"categories\.csv"):
        opened("iwildcam", tmp_path)
