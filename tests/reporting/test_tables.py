import csv
from dataclasses import replace

from fedcir.reporting.methods import comparison_numbers, comparison_rows
from fedcir.reporting.page import join_markdown, to_csv, to_latex, to_markdown, to_text_rows
from fedcir.runs.statistics import CostToTarget, Estimate, MethodResult

METHODS = [
    MethodResult(
        "fedavg",
        {"a_b": Estimate(0.5, 0.01)},
        Estimate(0.5, 0.01),
        Estimate(0.4, 0.02),
        CostToTarget(9, 2e6, 3),
        None,
        None,
    ),
    MethodResult(
        "fedcir",
        {"a_b": Estimate(0.6, 0.03)},
        Estimate(0.6, 0.03),
        Estimate(0.5, 0.0),
        CostToTarget(None, None, 1),
        Estimate(0.1, 0.02),
        0.0345,
    ),
]


def test_rows_show_per_cent_with_deviation_and_the_difference_with_its_interval() -> None:
    header, fedavg, fedcir = comparison_rows(METHODS, "fedavg", seeds=3)
    assert header[-1] == "difference to fedavg (95 %, seeds and test images)"
    assert fedavg == ["fedavg", "50.0 ± 1.0", "50.0 ± 1.0", "40.0 ± 2.0", "9", "2 MB", ""]
    assert fedcir == ["fedcir", "60.0 ± 3.0", "60.0 ± 3.0", "50.0 ± 0.0", "1 of 3 seeds", "", "+10.00 ± 3.45"]


def test_a_target_that_no_seed_reached_says_so() -> None:
    method = MethodResult(
        "m",
        {"d": Estimate(0.5, None)},
        Estimate(0.5, None),
        Estimate(0.5, None),
        CostToTarget(None, None, 0),
        None,
        None,
    )
    assert comparison_rows([method], "m", seeds=1, target=0.9) == [
        ["method", "d", "mean", "worst", "rounds to reach 90 %", "data moved to reach 90 %"],
        ["m", "50.0", "50.0", "50.0", "not reached", "not reached"],
    ]


def held_out(method: MethodResult, domain: str) -> MethodResult:
    return replace(method, domains={**method.domains, "c": Estimate(0.3, 0.01)}, unseen=(domain,), unseen_mean=TWENTY)


TWENTY = Estimate(0.2, 0.01)


def test_a_domain_that_nobody_trains_on_is_marked_and_has_a_mean_of_its_own() -> None:
    header, fedavg, _ = comparison_rows([held_out(method, "c") for method in METHODS], "fedavg", seeds=3)
    assert header[:6] == ["method", "a_b", "c (not trained on)", "seen mean", "worst", "unseen mean"]
    assert fedavg[2:6] == ["30.0 ± 1.0", "50.0 ± 1.0", "40.0 ± 2.0", "20.0 ± 1.0"]
    first, _ = csv.DictReader(
        to_csv(to_text_rows(comparison_numbers([held_out(m, "c") for m in METHODS]))).splitlines()
    )
    assert (first["c"], first["mean"], first["unseen_mean"]) == ("0.3", "0.5", "0.2")


def test_where_each_method_holds_out_another_domain_the_numbers_are_marked() -> None:
    methods = [held_out(METHODS[0], "c"), held_out(METHODS[1], "a_b")]
    header, fedavg, fedcir = comparison_rows(methods, "fedavg", seeds=3)
    assert header[1:3] == ["a_b", "c"]
    assert fedavg[1:3] == ["50.0 ± 1.0", "30.0 ± 1.0 (not trained on)"]
    assert fedcir[1:3] == ["60.0 ± 3.0 (not trained on)", "30.0 ± 1.0"]


def test_the_csv_holds_plain_numbers() -> None:
    first, second = csv.DictReader(to_csv(to_text_rows(comparison_numbers(METHODS))).splitlines())
    assert (first["mean"], first["mean_std"], first["difference"]) == ("0.5", "0.01", "")
    assert (second["difference"], second["half_width"], second["rounds_to_target"]) == ("0.1", "0.0345", "")


def test_latex_and_markdown_escape_what_they_must() -> None:
    rows = [["method", "a_b & 95 %"], ["x|y", "1 ± 2"]]
    assert to_latex(rows).splitlines()[2:6] == [
        r"method & a\_b \& 95 \% \\",
        r"\midrule",
        r"x|y & 1 $\pm$ 2 \\",
        r"\bottomrule",
    ]
    assert to_markdown(rows) == "| method | a_b &amp; 95 % |\n| --- | ---: |\n| x\\|y | 1 ± 2 |\n"
    assert join_markdown([["`a`", "x|y"]]) == "| `a` | x\\|y |\n| --- | ---: |\n"
