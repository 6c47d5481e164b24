"""docs/features.md: every row of the guide is in it once, and what it names exists. What is not built says "planned"."""
import re

import pytest
from test_docs import ROOT, exists

PAGE = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (S\d[\w.-]*) \| (.+?) \| (.+) \|$", PAGE, re.MULTILINE)

# The guide's rows: under a section, how many of its rows are numbered from 1, or their names.
NUMBERED = {"S0": 7, "S1": 4, "S2": 1, "S2.1": 5, "S2.2": 10, "S3": 6, "S4": 1, "S4.1": 4, "S4.2": 12, "S4.3": 3, "S5": 3, "S5.1": 1,
            "S5.2": 1, "S5.3": 1, "S6": 2, "S6.1": 4, "S7": 2, "S8": 4, "S9.1": 3, "S9.2": 7, "S9.3": 6, "S9.4": 1, "S9.5": 2, "S9.6": 7,
            "S9.7": 2, "S9.8": 7, "S9.9": 2, "S10.1": 4, "S10.2": 1, "S10.3": 1, "S10.4": 3, "S10.5": 4, "S11.1": 5, "S11.2": 2,
            "S11.3": 3, "S12.1": 5, "S12.2": 2, "S13": 1, "S13.1": 1, "S13.2": 2, "S13.3": 2, "S13.4": 2, "S14": 2, "S15.1": 3,
            "S15.2": 8, "S15.3": 1, "S16": 1, "S16.1": 2, "S16.2": 2, "S16.3": 2, "S16.4": 1, "S17.1": 1, "S17.2": 1, "S17.3": 2, "S18": 1,
            "S19": 2,
            "S20": 2, "S21": 2}
NAMED = """S4-x S20-X1 S20-X2 S20-X3 S20-X4 S20-Q1..Q5 S20-Q6..Q9 S20-Q10 S20-Q11 S20-Q12 S20-C1..C5 S20-C6..C11 S20-C12..C16 S21-A1
           S21-A2""".split()


def test_every_row_of_the_guide_is_here_once():
    expected = [f"{section}-{i}" for section, n in NUMBERED.items() for i in range(1, n + 1)] + NAMED
    assert sorted(row for row, _, _ in ROWS) == sorted(expected)


def there(code):
    """A path of the repository, or a dotted name of the library."""
    return (ROOT / code).exists() if "/" in code else "." in code and exists(code)


@pytest.mark.parametrize("row, what, served", ROWS, ids=[row for row, _, _ in ROWS])
def test_what_a_row_names_exists(row, what, served):
    codes = re.findall(r"`([^`]+)`", served)
    assert codes or "planned" in served or "this page" in served
    assert [code for code in codes if not there(code)] == []


def test_what_is_missing_would_be_noticed():
    assert there("nn.Linear") and there("docs/features.md")
    for code in ("nn.NoSuchLayer", "docs/no_such_page.md", "Linear", "no.such.name"):
        assert not there(code), code


def test_figures_say_that_they_are_planned():
    """When figures are drawn, their rows name them, and this test goes."""
    assert [row for row, what, served in ROWS if what.startswith("figure") and "planned" not in served] == []
