"""Published train and test lists: what their lines may hold, and how images are matched with them."""

from pathlib import Path

import pytest

from fedcir.data.sources.published import read_list, with_lists
from fedcir.data.sources.source import ImageRecord
from fedcir.errors import InputError


def listed(folder: Path, text: str | bytes) -> Path:
    path = folder / "photo_train.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def items(*names: str) -> list[ImageRecord]:
    return [ImageRecord(name, *name.split("/")[:2]) for name in names]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("photo/dog/1.jpg 0\nphoto/dog/2.jpg 0\n", ["photo/dog/1.jpg", "photo/dog/2.jpg"]),
        ("photo/dog/1.jpg 0", ["photo/dog/1.jpg"]),
        ("photo/dog/1.jpg 1\nphoto/person/2.jpg 7\n", ["photo/dog/1.jpg", "photo/person/2.jpg"]),
        ("photo/hot dog/my  dog 3.jpg 12\n", ["photo/hot dog/my  dog 3.jpg"]),
        ("photo/dog/a,b.jpg 1\n", ["photo/dog/a,b.jpg"]),
        ("photo/dog/été ✓.jpg 1\n", ["photo/dog/été ✓.jpg"]),
        ("\nphoto/dog/1.jpg 0\n\n   \nphoto/dog/2.jpg 0\n\n", ["photo/dog/1.jpg", "photo/dog/2.jpg"]),
        ("photo/dog/1.jpg 0\r\nphoto/dog/2.jpg 0\r\n", ["photo/dog/1.jpg", "photo/dog/2.jpg"]),
        ("photo/dog/1.jpg 0  \n", ["photo/dog/1.jpg"]),
        ("\ufeffphoto/dog/1.jpg 0\n", ["photo/dog/1.jpg"]),
        ("", []),
    ],
    ids=["plain", "no end", "from 1", "spaces", "comma", "utf-8", "blank", "crlf", "trailing", "bom", "empty"],
)
def test_a_list_gives_its_paths_whatever_they_hold(text: str, names: list[str], tmp_path: Path) -> None:
    assert list(read_list(listed(tmp_path, text))) == names


@pytest.mark.parametrize(
    "line", ["photo/dog/2.jpg", "photo/dog/2.jpg dog", "photo/dog/2.jpg -1", "12", "photo/dog/2.jpg 1.5", "<html>"]
)
def test_a_line_that_is_no_path_and_label_is_named_by_file_and_number(line: str, tmp_path: Path) -> None:
    path = listed(tmp_path, f"photo/dog/1.jpg 0\n\n{line}\nphoto/dog/3.jpg 0\n")
    with pytest.raises(InputError) as refused:
        read_list(path)
    assert str(refused.value) == f"{path}, line 3: expected `path label`, got {line!r}"


def test_a_list_that_is_not_there_or_not_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read the list .*/photo_train\.txt: .*No such file"):
        read_list(tmp_path / "photo_train.txt")
    with pytest.raises(InputError, match=r"cannot read the list .*/photo_train\.txt"):
        read_list(listed(tmp_path, b"photo/dog/\xff.jpg 0\n"))


def test_a_list_decides_what_is_train_and_what_is_test() -> None:
    a, b, c = items("photo/dog/1.jpg", "photo/dog/2.jpg", "photo/cat/1.jpg")
    marked = with_lists([a, b, c], ["photo/dog/2.jpg", "photo/cat/1.jpg"], ["photo/dog/1.jpg"])
    assert marked == [a._replace(part="test"), b._replace(part="train"), c._replace(part="train")]


def test_an_image_that_no_list_names_is_left_out() -> None:
    marked = with_lists(items("photo/dog/1.jpg", "photo/dog/2.jpg"), ["photo/dog/2.jpg"], [])
    assert [item.name for item in marked] == ["photo/dog/2.jpg"]


def test_endings_of_list_and_files_may_differ() -> None:
    names = ("sketch/dog/1.jpg", "sketch/dog/n021_343-1.JPEG", "sketch/dog/b.c.webp")
    train, test = ["sketch/dog/1.png", "sketch/dog/b.c.png"], ["sketch/dog/n021_343-1.png"]
    assert [item.part for item in with_lists(items(*names), train, test)] == ["train", "test", "train"]


@pytest.mark.parametrize("ending", [".jpg", ".png"])
def test_an_image_in_both_lists_is_refused(ending: str) -> None:
    there = items("photo/dog/1.jpg", "photo/dog/2.jpg")
    with pytest.raises(InputError, match=r"photo/dog/1.* is in the train list and in the test list"):
        with_lists(there, ["photo/dog/1.jpg", "photo/dog/2.jpg"], [f"photo/dog/1{ending}"])


def test_an_image_twice_in_one_list_is_taken_once() -> None:
    there = items("photo/dog/1.jpg", "photo/dog/2.jpg")
    marked = with_lists(there, ["photo/dog/1.jpg", "photo/dog/1.jpg"], ["photo/dog/2.jpg"])
    assert [item.part for item in marked] == ["train", "test"]


def test_listed_images_that_are_not_there_are_named_and_counted() -> None:
    with pytest.raises(InputError, match=r"the lists name images that do not exist: 'photo/cat/7.*' and 2 more"):
        with_lists(
            items("photo/dog/1.jpg"), ["photo/dog/1.jpg", "photo/cat/8.jpg", "photo/cat/7.jpg"], ["photo/x/9.jpg"]
        )


def test_one_listed_image_that_is_not_there_is_named_as_the_list_has_it() -> None:
    with pytest.raises(InputError, match=r"photo/cat/7\.jpg") as refused:
        with_lists(items("photo/dog/1.jpg"), ["photo/dog/1.jpg", "photo/cat/7.jpg"], [])
    assert "0 more" not in str(refused.value)
