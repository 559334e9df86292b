"""Tables in Markdown and LaTeX, p-values of pairs, and other names of keys and values."""

from __future__ import annotations

import re

import pytest
from scipy import stats

import fedsim
from fedsim.comparison.labels import labels_of
from fedsim.comparison.rows import ComparisonSettings
from fedsim.comparison.tables import pairs_csv
from tests.comparison.made_up import compared, lines_of

AXES = {"aggregate.rule": ["mean", "trimmed_mean", "krum"], "attack.scale": [0.1, 2], "seed": [0, 1, 2]}
FINAL = {"mean": [0.80, 0.85, 0.90], "trimmed_mean": [0.81, 0.87, 0.92], "krum": [0.60, 0.66, 0.70]}
TAUGHT = {"aggregate.rule": "Rule_1", "trimmed_mean": "50 % & more", "2": "two"}


@pytest.fixture(scope="module")
def comparison():
    return compared(AXES, lambda point: [0.1, FINAL[point["aggregate.rule"]][point["seed"]]])


def test_p_values_are_those_of_the_paired_t_test_for_every_pair(comparison):
    lines = lines_of(pairs_csv(comparison))
    assert len(lines) == len(comparison.pairs) == 6
    for line, pair in zip(lines, comparison.pairs, strict=True):
        first, second = FINAL[line["aggregate.rule"]], FINAL[line["aggregate.rule_2"]]
        assert float(line["p_value"]) == pytest.approx(stats.ttest_rel(second, first).pvalue, rel=1e-9)
        assert float(line["difference"]) == pytest.approx(sum(second) / 3 - sum(first) / 3)
        assert (pair.difference.p_value < 0.05) is not pair.difference.includes(0)
        assert pair.first.point["attack.scale"] == pair.second.point["attack.scale"] == float(line["attack.scale"])


@pytest.mark.parametrize(("values", "p_value"), [([0.5], None), ([0.0, 0.0], 1.0), ([0.1, 0.1], 0.0)])
def test_p_values_of_one_run_and_of_equal_differences(values, p_value):
    assert fedsim.core.confidence.estimate(values).p_value == p_value


def test_a_latex_table_has_one_cell_per_column_escapes_names_and_marks_the_best_as_the_text_does(comparison):
    text = comparison.renamed(TAUGHT).to_latex()
    columns = re.search(r"\{(l+)\}", text)[1]
    rows = [line for line in text.splitlines() if line.endswith("\\\\")]
    assert all(len(re.findall(r"(?<!\\)&", row)) == len(columns) - 1 for row in rows)
    assert rows[0].startswith(r"  Rule\_1 & attack.scale & test accuracy")
    best = [row for row in rows if "textbf" in row]
    assert [row.split(" & ")[1] for row in best] == ["0.1", "two"]
    assert all(r"50 \% \& more" in row and r"\textbf{0.8667 $\pm$ 0.1368}" in row for row in best)
    assert r" & $-$0.1967 $\pm$ 0.0143 & " in text
    assert text.count(r"\midrule") == 2


def test_names_with_special_characters_leave_latex_and_markdown_intact(comparison):
    name = r"a_1 {b} \c $d$ #e ~f ^g <h> |i| *j* `k` [l](m) _n_ 10 % & -3"
    latex = comparison.renamed({"trimmed_mean": name}).to_latex()
    (cell, *_) = {line.split(" & ")[0] for line in latex.splitlines() if "textbackslash" in line}
    escaped = r"a\_1 \{b\} \textbackslash{}c \$d\$ \#e \textasciitilde{}f \textasciicircum{}g $<$h$>$ "
    assert cell.strip().startswith(escaped + r"\textbar{}i\textbar{} *j*")
    rows = "".join(line for line in latex.splitlines() if not line.startswith("%"))
    plain = re.sub(r"\\[&%$#_{}\\]", "", rows)
    assert plain.count("{") == plain.count("}")
    assert plain.count("$") % 2 == 0
    assert not re.search(r"[%#_~^|]", plain)
    (line, *_) = [
        line for line in comparison.renamed({"trimmed_mean": name}).to_markdown().splitlines() if "a_1" in line
    ]
    assert r"\<h\> \|i\| \*j\* \`k\` \[l\](m) \_n\_ 10 % & -3" in line


def test_a_markdown_table_has_the_same_cells(comparison):
    lines = comparison.to_markdown().splitlines()
    assert lines[0].startswith("| aggregate.rule | attack.scale | test accuracy | difference to mean |")
    assert lines[3].startswith("| trimmed_mean | 0.1 | **0.8667 ± 0.1368** | +0.0167 ± 0.0143 |")
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1


def test_other_names_are_in_text_figures_and_settings_and_change_no_number(comparison):
    settings = ComparisonSettings(worst="attack.scale")
    shown = fedsim.comparison.Comparison(comparison.name, comparison.axes, comparison.runs, settings)
    table = shown.renamed({"attack.scale": "Scale"}).table
    assert "worst Scale" in table
    numbers = [re.findall(r"\d\.\d{4}", text) for text in (table, shown.table)]
    assert numbers[0] == numbers[1]
    figure = fedsim.plot(comparison, labels=TAUGHT)
    assert "50 % & more" in [text.get_text() for text in figure.legends[0].get_texts()]
    assert figure.axes[1].get_title().endswith("two")


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["krun=Krum"], 'label "krun": is not a compared key or value; did you mean "krum"?'),
        (["seed=Seed"], 'label "seed": is not a compared key or value; allowed: aggregate.rule'),
        (["krum"], 'label "krum" = "": must be a non-empty string, as in krum=NEW'),
        (["krum=A,mean=B"], 'label "krum=A,mean=B": would rename only krum; write --label for each name'),
        (["krum=mean"], 'label "mean": would name two keys or values; use different labels'),
    ],
)
def test_wrong_names_are_refused(words, answer):
    with pytest.raises(fedsim.errors.ExperimentError) as refusal:
        labels_of(words, AXES)
    assert str(refusal.value).startswith(answer)


def test_an_old_name_may_contain_equals_signs():
    assert labels_of(["krum,f=2=Krum (f=2)"], {"aggregate": [{"rule": "krum", "f": 2}]}) == {"krum,f=2": "Krum (f=2)"}
