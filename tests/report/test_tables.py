import csv

from fedcir.compare import Estimate, Method, ToTarget
from fedcir.report.tables import comma_separated, comparison_numbers, comparison_rows, latex, markdown

METHODS = [
    Method(
        "fedavg",
        {"a_b": Estimate(0.5, 0.01)},
        Estimate(0.5, 0.01),
        Estimate(0.4, 0.02),
        ToTarget(9, 2e6, 3),
        None,
        None,
    ),
    Method(
        "fedcir",
        {"a_b": Estimate(0.6, 0.03)},
        Estimate(0.6, 0.03),
        Estimate(0.5, 0.0),
        ToTarget(None, None, 1),
        Estimate(0.1, 0.02),
        0.0345,
    ),
]


def test_rows_show_per_cent_with_deviation_and_the_difference_with_its_interval() -> None:
    header, fedavg, fedcir = comparison_rows(METHODS, "fedavg", seeds=3)
    assert header[-1] == "difference to fedavg (95 %)"
    assert fedavg == ["fedavg", "50.0 ± 1.0", "50.0 ± 1.0", "40.0 ± 2.0", "9", "2.0", ""]
    assert fedcir == ["fedcir", "60.0 ± 3.0", "60.0 ± 3.0", "50.0 ± 0.0", "1 of 3 seeds", "", "+10.00 ± 3.45"]


def test_a_target_that_no_seed_reached_says_so() -> None:
    method = Method(
        "m", {"d": Estimate(0.5, None)}, Estimate(0.5, None), Estimate(0.5, None), ToTarget(None, None, 0), None, None
    )
    assert comparison_rows([method], "m", seeds=1, target=0.9) == [
        ["method", "d", "mean", "worst", "rounds to 90 %", "MB to 90 %"],
        ["m", "50.0", "50.0", "50.0", "not reached", "not reached"],
    ]


def test_the_csv_holds_plain_numbers() -> None:
    first, second = csv.DictReader(comma_separated(comparison_numbers(METHODS)).splitlines())
    assert (first["mean"], first["mean_std"], first["difference"]) == ("0.5", "0.01", "")
    assert (second["difference"], second["half_width"], second["rounds_to_target"]) == ("0.1", "0.0345", "")


def test_latex_and_markdown_escape_what_they_must() -> None:
    rows = [["method", "a_b & 95 %"], ["x|y", "1 ± 2"]]
    assert latex(rows).splitlines()[2:6] == [
        r"method & a\_b \& 95 \% \\",
        r"\midrule",
        r"x|y & 1 $\pm$ 2 \\",
        r"\bottomrule",
    ]
    assert markdown(rows) == "| method | a_b & 95 % |\n| --- | ---: |\n| x\\|y | 1 ± 2 |\n"
