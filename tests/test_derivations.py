"""The derivation pages quote the source: each line in a table under "In the source" stands in the file that the page names."""
import re
from pathlib import Path

import pytest

from tinygrad_tf.autograd import Function

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(page for page in (ROOT / "docs" / "derivations").glob("*.md") if page.name != "README.md")
DERIVED = ("Softmax", "LayerNorm", "RMSNorm", "Gelu", "CrossEntropy", "Attention", "Embedding", "Rotary")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def in_the_source(page):
    return re.search(r"^## In the source\n(.*?)^## ", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[1]


def quoted(section):
    return re.findall(r"\| `([^`]+)` \|$", section, re.MULTILINE)


def source(section):
    files = re.findall(r"`(tinygrad_tf/ops/\w+\.py)`", section)
    return {re.sub(r" +# .*", "", line).strip() for file in files for line in (ROOT / file).read_text(encoding="utf-8").splitlines()}


@pages
def test_quoted_lines_are_in_the_source(page):
    section = in_the_source(page)
    assert len(quoted(section)) >= 3
    assert [line for line in quoted(section) if line not in source(section)] == []


def test_a_changed_line_would_be_noticed():
    section = in_the_source(PAGES[0])
    assert "dx = dy + dy" not in source(section)


@pages
def test_every_page_derives_computes_and_warns(page):
    headings = re.findall(r"^## (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[:4] == ["Forward", "Backward, step by step", "In the source", "By numbers"]
    assert headings[4].startswith("Pitfall")
    assert len(re.findall(r"^ *print\(.*\) +# .+$", page.read_text(encoding="utf-8"), re.MULTILINE)) >= 4


@pytest.mark.parametrize("name", DERIVED)
def test_every_fused_operation_has_its_page(name):
    assert any(cls.__name__ == name for cls in Function.registry.values())
    assert any(re.search(rf"class(es)? `{name}`", in_the_source(page)) for page in PAGES)
