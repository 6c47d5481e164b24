"""What a wheel would hold: every file of the package, those that are not Python too."""
import configparser
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def listed():
    """The files that the globs of setup.cfg find, from the root."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    return {path for package, globs in config["options.package_data"].items()
            for glob in globs.split() for path in ROOT.joinpath(*package.split(".")).glob(glob)}


def others():
    files = (path for path in (ROOT / "tinygrad_tf").rglob("*") if path.is_file())
    caches = re.compile(r"(^|/)(__pycache__|\..*)(/|$)")                # of the interpreter, of tools, of editors
    return {path for path in files if path.suffix != ".py" and not caches.search(path.relative_to(ROOT).as_posix())}


def test_files_that_are_not_python_are_in_the_package_data():
    """If this fails for a file of yours: add a glob to [options.package_data] of setup.cfg, or keep the file elsewhere."""
    assert sorted(path.relative_to(ROOT).as_posix() for path in others() - listed()) == []


def test_every_glob_of_the_package_data_finds_something():
    assert {path.suffix for path in listed()} >= {".cu", ".h", ".cpp"} and listed() <= others()


def test_folders_with_python_are_packages():
    """find: takes only folders with an __init__.py; others would be missing from a wheel without a word."""
    folders = {path.parent for path in (ROOT / "tinygrad_tf").rglob("*.py")}
    assert [folder.name for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []
