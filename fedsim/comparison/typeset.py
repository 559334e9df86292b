"""The table of a comparison in Markdown and LaTeX, for documents and papers."""

from __future__ import annotations

import re
from collections.abc import Callable

from fedsim.comparison.compared_runs import ComparedRuns
from fedsim.comparison.tables import comparison_text, shown_columns, table_notes

LATEX = {character: f"\\{character}" for character in "&%$#_{}"} | {
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"±": r"$\pm$", "≈": r"$\approx$", "<": "$<$", ">": "$>$", "|": r"\textbar{}"},
}
SIGNED = re.compile(r"(?<![\w.-])-(?=\d)")  # the sign of a negative number


def markdown(comparison: ComparedRuns) -> str:
    """Return the table of results in Markdown, followed by its notes.

    The best results are bold, and those not significantly different from them are in italics.
    """
    head, groups = _cells(comparison, _markdown_text, {"*": "**{}**", "~": "*{}*", "": "{}"})
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *(c for g in groups for c in g))]
    notes = table_notes(comparison, "**bold**:", "*italics*:")
    return "\n".join([*lines, "", *(f"- {_indented(note)}" for note in notes)])


def latex(comparison: ComparedRuns) -> str:
    """Return the table of results in LaTeX, for the package booktabs. Its notes follow as comments.

    The best results are bold, and those not significantly different from them are underlined.
    """
    head, groups = _cells(comparison, _latex_text, {"*": r"\textbf{{{}}}", "~": r"\underline{{{}}}", "": "{}"})
    bodies = ["\n".join(f"  {' & '.join(cells)} \\\\" for cells in group) for group in groups]
    body = "\n  \\midrule\n".join(bodies)
    notes = table_notes(comparison, "bold:", "underlined:")
    return "\n".join(
        [
            f"\\begin{{tabular}}{{{'l' * len(head)}}}",
            f"  \\toprule\n  {' & '.join(head)} \\\\\n  \\midrule\n{body}\n  \\bottomrule",
            "\\end{tabular}",
            *(f"% {_indented(note, '% ')}" for note in notes),
        ]
    )


TABLES: dict[str, Callable[[ComparedRuns], str]] = {"text": comparison_text, "markdown": markdown, "latex": latex}


def _cells(
    comparison: ComparedRuns, escaped: Callable[[str], str], marks: dict[str, str]
) -> tuple[list[str], list[list[list[str]]]]:
    """Return the headings of the table, and the cells of each line of each group.

    `escaped` makes texts safe for the output format. `marks` maps each mark to a format string for the score.
    """
    columns = shown_columns(comparison)
    columns.pop("mark", None)
    head, *lines = map(list, zip(*(map(escaped, column) for column in columns.values()), strict=True))
    score, groups = list(columns).index("score"), []
    for group in comparison.groups:
        groups.append([lines.pop(0) for _ in group])
        for row, line in zip(group, groups[-1], strict=True):
            line[score] = marks[row.mark].format(line[score])
    return head, groups


def _markdown_text(text: str) -> str:
    return re.sub(r"([\\`*|<>\[\]]|\b_|_\b)", r"\\\1", text)


def _latex_text(text: str) -> str:
    return SIGNED.sub("$-$", "".join(LATEX.get(character, character) for character in text))


def _indented(note: str, prefix: str = "  ") -> str:
    return note.replace("\n", f"\n{prefix}")
