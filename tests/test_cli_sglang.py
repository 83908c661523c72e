"""`aioprefill sglang`: what it refuses, and what it starts, with a stand-in for SGLang's launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCHER = """
import json, os, sys
names = ("AIOPREFILL", "AIOPREFILL_PAUSE_BARRIER", "AIOPREFILL_STALL_LIMIT_S", "SGLANG_PLUGINS")
print(json.dumps({"pid": os.getpid(), "argv": sys.argv[1:], **{n: os.environ.get(n) for n in names}}))
"""
PREFILL = ["--model-path", "tiny", "--disaggregation-mode", "prefill"]


def install_sglang(folder: Path, release: str) -> Path:
    """A folder for PYTHONPATH in which `release` of SGLang seems to be installed."""
    metadata = folder / f"sglang-{release}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {release}\n")
    (folder / "sglang").mkdir()
    (folder / "sglang" / "__init__.py").write_text("")
    (folder / "sglang" / "launch_server.py").write_text(LAUNCHER)
    return folder


@pytest.fixture
def start(tmp_path):
    """Runs `aioprefill sglang` in a process of its own; (that process, its id)."""

    def run(*arguments, path=None, **variables):
        known = {name: value for name, value in os.environ.items() if not name.startswith("AIOPREFILL")}
        clean = {**known, "XDG_CONFIG_HOME": str(tmp_path), "NO_COLOR": "1", "TERM": "dumb"}
        if path is not None:
            clean["PYTHONPATH"] = str(path)
        with subprocess.Popen(
            [sys.executable, "-m", "aioprefill", "sglang", *arguments],
            env={**clean, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            output, errors = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors), process.pid

    return run


def one_error(run):
    """The only line of a command that failed by wrong usage."""
    assert run.returncode == 2 and run.stdout == ""
    (line,) = run.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def test_missing_sglang_is_told_with_how_to_get_it(start):
    """This environment has none."""
    run, _ = start("--", *PREFILL)
    line = one_error(run)
    assert "not installed" in line and "0.5.23" in line and sys.prefix in line and "docs/sglang.md" in line


def test_unsupported_release_is_refused_and_named(start, tmp_path):
    """Nothing is started."""
    run, _ = start("--", *PREFILL, path=install_sglang(tmp_path, "0.5.22"))
    line = one_error(run)
    assert "SGLang 0.5.22 is not supported, only 0.5.23" in line and "sglang.launch_server" in line


@pytest.mark.parametrize(
    ("arguments", "variables", "word"),
    [
        (["--stall-limit-s", "soon"], {}, "stall-limit-s"),
        ([], {"AIOPREFILL": "perhaps"}, "AIOPREFILL='perhaps'"),
        ([], {"AIOPREFILL_SHUTDOWN_TIMEOUT_S": "-1"}, "AIOPREFILL_SHUTDOWN_TIMEOUT_S"),
    ],
)
def test_wrong_settings_are_told_before_anything_starts(start, tmp_path, arguments, variables, word):
    """Not by a scheduler process that dies a minute later."""
    path = install_sglang(tmp_path, "0.5.23")
    run, _ = start(*arguments, "--", *PREFILL, path=path, **variables)
    assert word in one_error(run)


def test_launcher_gets_its_arguments_the_mode_and_the_settings_in_the_same_process(start, tmp_path):
    """Flags become the variables that SGLang's processes read."""
    path = install_sglang(tmp_path, "0.5.23")
    given = [*PREFILL, "--tp", "1", "--host=::1"]
    run, pid = start("--pause-barrier", "--stall-limit-s", "7.5", "--", *given, path=path)
    assert (run.returncode, run.stderr) == (0, "")
    assert json.loads(run.stdout) == {
        "pid": pid,
        "argv": given,
        "AIOPREFILL": "1",
        "AIOPREFILL_PAUSE_BARRIER": "true",
        "AIOPREFILL_STALL_LIMIT_S": "7.5",
        "SGLANG_PLUGINS": None,
    }


def test_require_is_passed_on_and_stays(start, tmp_path):
    """By the option, and where the environment says so already."""
    path = install_sglang(tmp_path, "0.5.23")
    asked, _ = start("--require", "--", *PREFILL, path=path)
    inherited, _ = start("--", *PREFILL, path=path, AIOPREFILL="require")
    assert [json.loads(run.stdout)["AIOPREFILL"] for run in (asked, inherited)] == ["require", "require"]


def test_allow_list_of_plugins_lets_this_one_in(start, tmp_path):
    """SGLang would leave it out without a word."""
    path = install_sglang(tmp_path, "0.5.23")
    run, _ = start("--", *PREFILL, path=path, SGLANG_PLUGINS="mine, other")
    again, _ = start("--", *PREFILL, path=path, SGLANG_PLUGINS="aioprefill")
    assert json.loads(run.stdout)["SGLANG_PLUGINS"] == "mine,other,aioprefill"
    assert json.loads(again.stdout)["SGLANG_PLUGINS"] == "aioprefill"


@pytest.mark.parametrize(
    ("arguments", "noted"),
    [
        (["--disaggregation-mode", "decode"], True),
        (["--model-path", "prefill"], True),
        (["--disaggregation-mode=prefill"], False),
        (["--config", "server.yaml"], False),
    ],
)
def test_server_without_a_prefill_loop_is_started_with_a_note(start, tmp_path, arguments, noted):
    """aioprefill would do nothing in it, also with --require."""
    run, _ = start("--require", "--", *arguments, path=install_sglang(tmp_path, "0.5.23"))
    assert json.loads(run.stdout)["argv"] == arguments
    assert run.stderr.startswith("note: ") == noted
