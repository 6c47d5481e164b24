"""The docs tell the truth: every file, name and link that a page gives exists, and its Python runs.

Inline code is held to be a name of the library where it looks like one: `nn.Linear`, `Tensor.detach()`, `.detach()`,
`tests/gradcases.py`; after the word "no" it must not be one. Fenced python blocks of a page run in order, in one namespace
and an empty folder; a block that shows a class of the library must be its source, word for word.
"""
import ast
import contextlib
import functools
import importlib
import inspect
import io
import pkgutil
import re
import sys
from pathlib import Path

import numpy
import pytest

import tinygrad_tf
from tinygrad_tf.autograd import Function

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md")) + [page for page in (ROOT / "CONTRIBUTING.md", ROOT / "README.md") if page.exists()]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"\.(py|md|cfg|toml|npz|png|txt|csv|safetensors|jsonl?|sh)$")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


# --- the names that there are ---------------------------------------------------------------------------------------

def modules():
    """The modules of the package, under their full names, the same without the package's, and the usual short ones."""
    found = {"tinygrad_tf": tinygrad_tf, "torch": tinygrad_tf, "F": tinygrad_tf.nn.functional, "np": importlib.import_module("numpy")}
    for info in pkgutil.walk_packages(tinygrad_tf.__path__, "tinygrad_tf."):
        if info.name != "tinygrad_tf.__main__":             # importing it runs the command line
            found[info.name] = found[info.name.removeprefix("tinygrad_tf.")] = importlib.import_module(info.name)
    return found


MODULES = {**modules(), "xp": numpy}
FOREIGN = {"ml_dtypes", "mma", "ldmatrix", "cp"}           # a package that need not be there; instructions of a GPU
CLASSES = {}                                                # name → the classes of the package that bear it
for _module in {id(m): m for name, m in MODULES.items() if name.startswith("tinygrad_tf.")}.values():
    for _cls in vars(_module).values():
        if isinstance(_cls, type) and _cls.__module__ == _module.__name__:
            CLASSES.setdefault(_cls.__name__, []).append(_cls)


def exists(dotted):
    """True where a name is found from a module or class of the package, or in the standard library; `self` is an operation."""
    parts = dotted.split(".")
    starts = [(MODULES[".".join(parts[:i])], parts[i:]) for i in range(len(parts), 0, -1) if ".".join(parts[:i]) in MODULES]
    starts += [(tinygrad_tf, parts), *((cls, parts[1:]) for cls in CLASSES.get(parts[0], []))]
    starts += [(Function, parts[1:])] if parts[0] == "self" else []
    if parts[0] in sys.stdlib_module_names:
        starts.append((importlib.import_module(parts[0]), parts[1:]))
    return parts[0] in FOREIGN or any(reaches(thing, names) for thing, names in starts)


def reaches(thing, names):
    for name in names:
        if inspect.ismodule(thing) and not hasattr(thing, name) and hasattr(thing, "__path__"):
            with contextlib.suppress(ImportError):
                importlib.import_module(f"{thing.__name__}.{name}")
        if not hasattr(thing, name):
            return False
        thing = getattr(thing, name)
    return True


def test_the_search_for_names_is_not_fooled():
    for name in ("nn.Linear", "torch.randn", "tinygrad_tf.ops.softmax.Softmax", "Function.saved", "self.needs", "Tensor.detach",
                 "tensor.Tensor", "F.softmax", "data.load_text", "copy.deepcopy",
                 "pydoc_data.topics", "xp.copyto"):
        assert exists(name), name
    for name in ("nn.Linnear", "ops.softmax.Softmin", "Function.save", "self.need", "torch.vmap", "copy.deep", "no_such.thing",
                 "xp.copytoo"):
        assert not exists(name), name


# --- what a page says ------------------------------------------------------------------------------------------------

def text(page):
    return page.read_text(encoding="utf-8")


def prose(page):
    return FENCE.sub("", text(page))


def inline_code(page, before=""):
    return re.findall(before + r"`([^`\n]+)`", prose(page))


def names(codes):
    """Of pieces of inline code those that are dotted names, with or without arguments behind them."""
    return [code.partition("(")[0] for code in codes
            if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+(\(.*\))?", code) and not FILE.search(code)]


@pages
def test_dotted_names_exist_and_those_after_no_do_not(page):
    absent = names(inline_code(page, before=r"\bno "))
    assert [name for name in names(inline_code(page)) if name not in absent and not exists(name)] == []
    assert [name for name in absent if exists(name)] == []


@pages
def test_methods_exist(page):
    """`.detach()` is a method or attribute of a tensor, a module, an operation, an optimizer or a schedule."""
    homes = [tinygrad_tf.Tensor, tinygrad_tf.nn.Module(), Function, tinygrad_tf.optim.Optimizer, tinygrad_tf.optim.lr_scheduler.LRScheduler]
    methods = [found[1] for code in inline_code(page) if (found := re.fullmatch(r"\.([a-z_]\w*)(\(.*\))?", code))]
    assert [name for name in methods if not any(hasattr(home, name) for home in homes)] == []


@pages
def test_paths_exist(page):
    paths = re.findall(r"(?:tinygrad_tf|tests|examples|docs|\.ci)/[\w./-]*\w", prose(page))
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pages
def test_relative_links_lead_somewhere(page):
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if not re.match(r"[a-z]+:", link)]
    assert [link for link in links if not leads_somewhere(page, link)] == []


def leads_somewhere(page, link):
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return target.exists() and (not anchor or anchor in anchors(target))


def anchors(page):
    """The names that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


# --- what a page shows -----------------------------------------------------------------------------------------------

@pages
@pytest.mark.host("a page shows what the CPU prints: on a device a tensor also says where it is")
def test_python_blocks_run_and_print_what_they_say(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Function, "registry", dict(Function.registry))      # operations of a page are not the library's
    namespace = {"__name__": "__docs__"}
    for block in (block for language, block in FENCE.findall(text(page)) if language == "python"):
        shown = re.match(r"class (\w+)", block)
        if shown and shown[1] in CLASSES:
            assert block.strip() in [inspect.getsource(cls).strip() for cls in CLASSES[shown[1]]]
        else:
            run(block, page.name, namespace)


def run(block, name, namespace):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(block, f"<{name}>", "exec"), namespace)
    missing = [said for said in promised(block) if said not in printed.getvalue()]
    assert missing == [], f"the block printed:\n{printed.getvalue()}"


def promised(block):
    """What the comments behind print(...) say that it prints; up to an ellipsis, which stands for the rest."""
    return [said.partition("…")[0].strip() for said in re.findall(r"^ *print\(.*\) +# (.+)$", block, re.MULTILINE)]


# --- nothing is left out ---------------------------------------------------------------------------------------------

def test_every_page_is_in_the_index():
    """Of its folder; the index of a folder is in that of the docs."""
    pages = [page for page in DOCS.rglob("*.md") if page != DOCS / "README.md"]
    index = {page: (page.parent.parent if page.name == "README.md" else page.parent) / "README.md" for page in pages}
    assert [page.name for page in pages if f"({page.relative_to(index[page].parent).as_posix()})" not in text(index[page])] == []


def test_every_source_file_is_in_the_reading_order():
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tinygrad_tf").rglob("*.py")]
    assert [path for path in sorted(files) if not path.rpartition("/")[2].startswith("_") and path not in text(DOCS / "README.md")] == []


def test_files_import_only_from_above_in_the_reading_order():
    index = text(DOCS / "README.md")
    order = re.findall(r"`(tinygrad_tf/[\w/]+\.py)`", index[index.index("reading order of the source"):])
    assert len(order) == len(set(order))
    later = {(file, imported) for i, file in enumerate(order) for imported in imports(file) & set(order[i:])}
    assert sorted(later) == []


def imports(file):
    """The files of the package that a file imports when it is loaded."""
    found, folder = set(), Path(file).parent
    for node in ast.parse(text(ROOT / file)).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = folder.parents[node.level - 2] if node.level > 1 else folder
            base = base.joinpath(*(node.module or "").split("."))
            found |= {f"{path.as_posix()}.py" for path in (base, *(base / name.name for name in node.names))}
    return found


def test_every_operation_is_in_the_table():
    """If this fails for an operation of yours: add it to the table."""
    ops = [cls for cls in Function.registry.values() if cls.__module__.startswith("tinygrad_tf.") and cls.backward is not Function.backward]
    assert [cls.__name__ for cls in ops if f"`{cls.__name__}`" not in text(DOCS / "operations.md")] == []


# --- docs/names.md: all public names, and no other ----------------------------------------------------------------------

ROOMS = {"torch": "", "Tensor": "Tensor", **{room: room for room in ("nn", "nn.functional", "nn.init", "nn.utils", "optim",
                                                                    "optim.lr_scheduler", "amp")}}
rooms = pytest.mark.parametrize("room", ROOMS)


def listed(room, ours=None):
    """The names in the table under a heading; of the rows called "ours", or of all others, where that is said."""
    table = re.search(rf"^### {re.escape(room)}\n+((?:\|.*\n)+)", text(DOCS / "names.md"), re.MULTILINE)[1]
    rows = re.findall(r"^\| (.+) \| `([^`]+)` \|$", table, re.MULTILINE)
    return [name for group, names in rows if ours in (None, group.startswith("ours")) for name in names.split()]


def public(room):
    """A list of public names where there is one; else what is defined there or in a file of the package's, without helpers of modules."""
    thing = MODULES.get(room) or tinygrad_tf.Tensor
    if not inspect.ismodule(thing):
        return [name for name in dir(thing) if not name.startswith("_")]
    if hasattr(thing, "__all__"):
        return thing.__all__
    own = room in ("nn.init", "nn.utils", "optim.lr_scheduler")         # files that hold code; the others only gather names
    names = [name for name, value in vars(thing).items()
             if not name.startswith("_") and callable(value) and name not in ("absent", "publish")
             and (not own or value.__module__ == thing.__name__)]
    return names + ["functional", "init", "masks", "utils"] * (room == "nn")


@rooms
def test_the_page_of_names_is_complete_and_true(room):
    assert sorted(listed(room)) == sorted(public(room))


def test_every_room_of_the_page_of_names_is_looked_at():
    assert re.findall(r"^### (.+)$", text(DOCS / "names.md"), re.MULTILINE) == list(ROOMS)


@rooms
@pytest.mark.torch
def test_which_names_are_ours_and_which_are_pytorchs(room):
    pytorch = pytest.importorskip("torch")
    there = pytorch.autograd if room == "torch" else None
    thing = functools.reduce(getattr, filter(None, ROOMS[room].split(".")), pytorch)
    assert [name for name in listed(room, ours=True) if hasattr(thing, name)] == []
    assert [name for name in listed(room, ours=False) if not hasattr(thing, name) and not hasattr(there, name)] == []


# --- directions -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("page", sorted((DOCS / "derivations").glob("*.md")), ids=lambda page: page.stem)
def test_pushes_say_that_they_are_steps_of_descent(page):
    """A positive gradient lowers a score: "pushed up" alone does not say whether gradient or step is meant."""
    assert re.findall(r"push(?:ed|es)[^.]{0,40}\b(?:up|down)\b", prose(page)) == []


@pages
def test_layers_are_counted_by_the_letter_of_the_index(page):
    """L layers, and the loss is a word."""
    assert re.findall(r"\bN (?:layers|blocks)\b|\bL = −|δL\b|∂L\b|e\^L\b", text(page)) == []
