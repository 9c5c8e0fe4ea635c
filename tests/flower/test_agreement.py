"""What sites agree on: classes, clients and their numbers."""

from dataclasses import replace

import pytest
from descriptions import config, numbers, own, share

from fedcir.data.federation import build_roster
from fedcir.errors import InputError
from fedcir.flower.site_manifest import build_site_manifest


def test_the_classes_are_those_of_all_sites_together_in_order() -> None:
    manifest, _ = build_site_manifest([own("b", "dog", "fox"), own("a", "cat", "dog")], config())
    assert manifest["classes"] == ["cat", "dog", "fox"]
    assert (manifest["dataset"], manifest["image_size"], manifest["channels"]) == ("folders", 32, 3)


def test_sites_with_the_same_classes_have_nothing_to_be_told() -> None:
    assert build_site_manifest([own("a"), own("b")], config())[1] == []


def test_notes_name_the_sites_that_miss_classes_and_those_that_are_alone_with_one() -> None:
    sites = [own("a", "cat", "dog", "fox"), own("b", "cat", "dog", "Cat"), own("c", "cat", "dog", "fox")]
    assert build_site_manifest(sites, config())[1] == [
        "site 'b' has no image of 'fox'",
        "only site 'b' has 'Cat': check that all sites spell it the same way",
    ]


def test_of_many_classes_a_note_names_five() -> None:
    many = [f"c{number}" for number in range(7)]
    _, notes = build_site_manifest([own("a"), own("b", "cat", "dog", *many)], config())
    assert notes[0].startswith("only site 'b' has 'c0', 'c1', 'c2', 'c3', 'c4' and 2 more: ")


def test_classes_that_are_configured_count_and_notes_name_sites_that_have_others() -> None:
    sites = [own("a", "cat", "dog", "fox"), own("b", "cat", "fox")]
    manifest, notes = build_site_manifest(sites, config(("dog", "cat")))
    assert manifest["classes"] == ["cat", "dog"]
    assert notes == [
        "site 'a' also has 'fox', which data.classes leaves out",
        "site 'b' has no image of 'dog'",
        "site 'b' also has 'fox', which data.classes leaves out",
    ]


def test_all_is_not_the_name_of_a_class() -> None:
    assert build_site_manifest([own("a"), own("b")], config(("all",)))[0]["classes"] == ["cat", "dog"]


def test_a_class_that_nobody_has_is_refused_and_named() -> None:
    with pytest.raises(InputError, match=r"data.classes: no site has an image of 'wolf'"):
        build_site_manifest([own("a"), own("b")], config(("cat", "wolf")))


def test_one_class_is_not_enough_for_all_nor_for_a_site() -> None:
    with pytest.raises(InputError, match="only one class, 'cat': a classifier needs two"):
        build_site_manifest([own("a"), own("b")], config(("cat",)))
    with pytest.raises(InputError, match="site 'b' has too few classes, only 'dog': add images of at least two"):
        build_site_manifest([own("a"), own("b", "dog")], config())


def test_a_site_that_names_no_class_is_refused_and_named() -> None:
    with pytest.raises(InputError, match="site 'b'"):
        build_site_manifest([own("a"), replace(own("b"), classes=())], config())


def test_two_nodes_with_one_name_are_refused_and_the_name_is_told() -> None:
    with pytest.raises(InputError, match="two nodes say that they are domain 'a': give each its own"):
        build_site_manifest([own("a"), own("b"), own("a")], config())
    with pytest.raises(InputError, match="two nodes say that they are partition-id 1"):
        build_site_manifest([share(1, "a"), share(0, "a"), share(1, "b")], config())


def test_shares_of_one_dataset_and_data_of_ones_own_do_not_mix() -> None:
    with pytest.raises(InputError, match="some nodes have a partition-id and others data of their own"):
        build_site_manifest([own("a"), share(0, "b")], config())


def test_images_of_different_sizes_are_refused_with_the_size_at_each_site() -> None:
    with pytest.raises(InputError, match=r"a 32x32x3, b 64x64x3; set data.image_size"):
        build_site_manifest([own("b", image_size=64), own("a")], config())
    with pytest.raises(InputError, match="a 32x32x1, b 32x32x3"):
        build_site_manifest([own("a", channels=1), own("b")], config())


def test_data_of_ones_own_are_not_dealt_out() -> None:
    with pytest.raises(InputError, match=r"partition.scheme=iid divides one dataset"):
        build_site_manifest([own("a"), own("b")], config(scheme="iid"))


def test_the_site_that_is_held_out_comes_last_and_trains_on_nothing() -> None:
    sites = [own("c"), own("a"), own("b")]
    manifest, _ = build_site_manifest(sites, config(hold_out="a"))
    assert numbers(manifest) == {"b": 0, "c": 1, "a": 2}
    assert [client["train"] for client in manifest["clients"]] == [8, 8, 0]
    assert [client["test"] for client in manifest["clients"]] == [2, 2, 2]


def test_holding_out_a_site_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(InputError, match=r"partition.hold_out: there is no site 'd'; choose from a, b"):
        build_site_manifest([own("b"), own("a")], config(hold_out="d"))


def test_sites_are_numbered_by_name() -> None:
    assert numbers(build_site_manifest([own("north"), own("east"), own("south")], config())[0]) == {
        "east": 0,
        "north": 1,
        "south": 2,
    }


def test_shares_are_numbered_by_their_partition_ids() -> None:
    sites = [share(10, "a"), share(2, "c"), share(0, "b")]
    assert [client["id"] for client in build_site_manifest(sites, config())[0]["clients"]] == [0, 2, 10]
    assert [client["partition"] for client in build_site_manifest(sites, config())[0]["clients"]] == [0, 2, 10]


def test_the_hash_does_not_depend_on_who_came_first_and_the_key_is_another_each_time() -> None:
    sites = [own("a"), own("b", "cat", "fox"), own("c")]
    (one, _), (two, _) = build_site_manifest(sites, config()), build_site_manifest(reversed(sites), config())
    assert one["hash"] == two["hash"]
    assert one["key"] != two["key"]
    assert {**one, "key": ""} == {**two, "key": ""}
    assert int(one["key"], 16) >= 0


def test_the_hash_is_another_for_other_data() -> None:
    one, two = (build_site_manifest([own("a"), own("b", content=text)], config())[0] for text in ("x", "y"))
    assert one["hash"] != two["hash"]


def test_a_site_with_other_versions_is_named() -> None:
    sites = [replace(own(name), versions=f"fedcir {number}") for number, name in enumerate("ab")]
    _, notes = build_site_manifest(sites, config())
    assert notes == ["site 'b' runs fedcir 1, but site 'a' runs fedcir 0"]


def test_everyone_trains_and_tests_but_the_site_that_is_held_out_which_only_tests() -> None:
    roster = build_roster(build_site_manifest([own("a"), own("b"), own("c")], config(hold_out="b"))[0], config())
    assert roster.trainers == (0, 1)
    assert roster.evaluators == {0: "a", 1: "c", 2: "b"}
    assert roster.unseen == ("b",)
    assert roster.builder.num_classes == 2
    assert roster.card["classes"] == ["cat", "dog"]


def test_of_the_shares_of_a_domain_the_first_tests() -> None:
    sites = [share(3, "b"), share(0, "a"), share(1, "a"), share(2, "b", train=0)]
    roster = build_roster(build_site_manifest(sites, config(scheme="dirichlet", clients=4))[0], config())
    assert roster.trainers == (0, 1, 3)
    assert roster.evaluators == {0: "a", 2: "b"}


def test_forty_thousand_classes_are_agreed_on() -> None:
    many = [f"class {number}" for number in range(40_000)]
    sites = [own("a", *many), own("b", *many), own("c", *many[:-1], "another")]
    manifest, notes = build_site_manifest(sites, config())
    assert len(manifest["classes"]) == 40_001
    assert notes == [
        f"site 'c' has no image of {many[-1]!r}",
        "only site 'c' has 'another': check that all sites spell it the same way",
    ]
    assert len(build_site_manifest(sites, config(tuple(many[:-1])))[1]) == 3
