"""The entry point: what AIOPREFILL says, what is missing, and that its absence costs nothing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from harness import Arrival, Bench
from messages import prompt, request

from aioprefill.errors import ConfigError, DeviceError
from aioprefill.sglang import completion, plugin, shape
from aioprefill.sglang.contract import class_faults, instance_faults, release_fault
from aioprefill.sglang.shape import Shape

LOOPS = (plugin.OVERLAP_LOOP, *plugin.OTHER_LOOPS)


@pytest.fixture
def sglang_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """SGLang's own loading of plugins, as in a process that has loaded none; the class is put back."""
    from sglang.srt import plugins
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.delenv("AIOPREFILL", raising=False)
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    before = dict(vars(Scheduler))
    yield plugins
    for name in vars(Scheduler).keys() - before.keys():
        delattr(Scheduler, name)
    for name in LOOPS:
        if name in before:
            setattr(Scheduler, name, before[name])


def members(scheduler_class: type) -> dict[str, Any]:
    """Everything that instances find on the class and its bases."""
    found: dict[str, Any] = {}
    for base in reversed(scheduler_class.__mro__):
        found.update(vars(base))
    return found


def test_unset_leaves_the_scheduler_class_untouched(bench: Bench, sglang_plugins: Any) -> None:
    """SGLang finds and calls the entry point; every member of its class is the very same object after."""
    scheduler_class = type(bench.scheduler)
    before = members(scheduler_class)
    found = sglang_plugins.load_plugins_by_group(sglang_plugins.GENERAL_PLUGINS_GROUP)
    assert found["aioprefill"][0] is plugin.register
    sglang_plugins.load_plugins()
    after = members(scheduler_class)
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)


def test_set_runs_the_loop_through_sglangs_own_hooks(
    bench: Bench, sglang_plugins: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """AIOPREFILL=1: the hooked method of the class runs aioprefill's loop, with the same outcome."""
    script = [Arrival(request("a", prompt(1, 150)))]
    stock = bench.run("blocking", script)
    monkeypatch.setenv("AIOPREFILL", "1")
    sglang_plugins.load_plugins()
    with caplog.at_level(logging.INFO, logger="aioprefill"):
        hooked = bench.run("hooked", [Arrival(request("a", prompt(1, 150)))])
    assert any("runs the prefill loop of SGLang 0.5.23" in r.getMessage() for r in caplog.records)
    assert hooked.tokens() == stock.tokens()
    assert hooked.sends == stock.sends


@pytest.mark.parametrize("value", ["yes", "requird", "2"])
def test_nonsense_is_refused_with_the_values_that_mean_something(
    sglang_plugins: Any, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """SGLang only logs what a plugin raises, so the refusal leaves by SystemExit, through its loader."""
    monkeypatch.setenv("AIOPREFILL", value)
    with pytest.raises(SystemExit, match=f"AIOPREFILL='{value}' means nothing.*require"):
        sglang_plugins.load_plugins()


def test_nonsense_in_a_setting_is_refused(sglang_plugins: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the variable."""
    monkeypatch.setenv("AIOPREFILL", "1")
    monkeypatch.setenv("AIOPREFILL_PAUSE_BARRIER", "perhaps")
    with pytest.raises(SystemExit, match="AIOPREFILL_PAUSE_BARRIER"):
        sglang_plugins.load_plugins()


def lack_release(monkeypatch: pytest.MonkeyPatch) -> str:
    """Another SGLang."""
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.6.0")
    return "SGLang 0.6.0 is not supported, only 0.5.23"


def lack_metadata(monkeypatch: pytest.MonkeyPatch) -> str:
    """An SGLang that is imported from a checkout on the path."""

    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    return "SGLang's release is not known"


def lack_uvloop(monkeypatch: pytest.MonkeyPatch) -> str:
    """No uvloop."""
    own = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvloop" else own(name))
    return "uvloop is not installed: pip install uvloop"


@pytest.mark.parametrize("lack", [lack_release, lack_metadata, lack_uvloop])
def test_what_is_missing_falls_back_or_refuses(
    bench: Bench,
    sglang_plugins: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    lack: Any,
) -> None:
    """1 warns and leaves the class as it is; require ends the process. Both say what is missing."""
    words = lack(monkeypatch)
    before = members(type(bench.scheduler))
    monkeypatch.setenv("AIOPREFILL", "1")
    sglang_plugins.load_plugins()
    assert any(words in r.getMessage() and "own prefill loop" in r.getMessage() for r in caplog.records)
    assert members(type(bench.scheduler)) == before
    monkeypatch.setattr(sglang_plugins, "_plugins_loaded", False)
    monkeypatch.setenv("AIOPREFILL", "require")
    with pytest.raises(SystemExit, match=words):
        sglang_plugins.load_plugins()


def test_unsupported_shape_warns_once_and_runs_its_own_loop(
    bench: Bench, sglang_plugins: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Entered twice: one warning that names the shape, SGLang's own loop both times."""
    monkeypatch.setattr(shape, "shape_of", lambda _: Shape(speculative=True))
    monkeypatch.setenv("AIOPREFILL", "1")
    sglang_plugins.load_plugins()
    for _ in range(2):
        run = bench.run("hooked", [Arrival(request("a", prompt(1, 30)))])
        assert run.results == 1
    warnings = [r.getMessage() for r in caplog.records if "speculative decoding" in r.getMessage()]
    assert len(warnings) == 1
    assert "SGLang's own prefill loop runs" in warnings[0]


def test_unsupported_shape_is_refused_where_the_loop_is_required(
    bench: Bench, sglang_plugins: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the loop ends SGLang's process, and so the start of its server."""
    monkeypatch.setattr(shape, "shape_of", lambda _: Shape(attention_data_ranks=2))
    monkeypatch.setenv("AIOPREFILL", "require")
    sglang_plugins.load_plugins()
    with pytest.raises(ConfigError, match=r"attention data parallelism.*refuses"):
        bench.run("hooked", [Arrival(request("a", prompt(1, 30)))])


def test_overlap_off_and_pipeline_loops_are_hooked_too(
    sglang_plugins: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else `require` would run SGLang's own loop silently there."""
    from sglang.srt.managers.scheduler import Scheduler

    before = {name: getattr(Scheduler, name) for name in LOOPS}
    monkeypatch.setenv("AIOPREFILL", "1")
    sglang_plugins.load_plugins()
    assert all(getattr(Scheduler, name) is not before[name] for name in LOOPS)


def test_contract_is_whole_on_the_supported_release(bench: Bench) -> None:
    """Nothing is missing; and the release is the one that is tested."""
    assert list(instance_faults(bench.scheduler)) == []
    assert release_fault(importlib.metadata.version("sglang")) is None


def test_contract_says_what_is_missing() -> None:
    """A method, a parameter, an attribute of an attribute."""

    class Other:
        def run_batch(self) -> None: ...

        def on_idle(self) -> None: ...

    faults = list(class_faults(Other))
    assert "no method ingest_requests" in faults
    assert "run_batch takes no 'batch'" in faults
    assert not any("on_idle" in fault for fault in faults)
    assert "no load_publisher.publish_load_stat" in list(instance_faults(Other()))


def test_contract_fault_falls_back(
    bench: Bench, sglang_plugins: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A scheduler of the right release but another make: the loop does not try."""
    monkeypatch.setattr(plugin, "instance_faults", lambda _: iter(["no method run_batch"]))
    monkeypatch.setenv("AIOPREFILL", "1")
    sglang_plugins.load_plugins()
    assert bench.run("hooked", [Arrival(request("a", prompt(1, 30)))]).results == 1
    assert any("no method run_batch" in r.getMessage() for r in caplog.records)


def runtime(status: str) -> Any:
    """Stands for cuda.bindings.runtime, with every call ending in `status`."""
    codes = SimpleNamespace(
        **{n: SimpleNamespace(name=n) for n in ("cudaSuccess", "cudaErrorNotReady", status)}
    )
    answer = getattr(codes, status)
    return SimpleNamespace(
        cudaError_t=codes, cudaGetDeviceCount=lambda: (answer, 0), cudaEventQuery=lambda _: (answer,)
    )


def test_gpu_without_binding_or_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install, or the driver's own name for what is wrong; and nothing is asked on a CPU."""
    assert completion.cuda_for("cpu") is None
    monkeypatch.setattr(completion, "cuda_runtime", lambda: runtime("cudaErrorInsufficientDriver"))
    with pytest.raises(DeviceError, match=r"cudaErrorInsufficientDriver.*driver installed"):
        completion.cuda_for("cuda")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(ConfigError, match="pip install cuda-bindings"):
        completion.cuda_for("cuda")


@pytest.fixture(params=["cuda-bindings", "cudaErrorNoDevice"])
def broken_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A scheduler that believes to be on a GPU, without the binding or a driver; what is told of it."""
    if request.param == "cuda-bindings":
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    else:
        monkeypatch.setattr(completion, "cuda_runtime", lambda: runtime("cudaErrorNoDevice"))
    own = completion.cuda_for
    monkeypatch.setattr(completion, "cuda_for", lambda _: own("cuda"))
    return str(request.param)


def test_gpu_fault_falls_back(
    bench: Bench,
    sglang_plugins: Any,
    broken_gpu: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """AIOPREFILL=1 on a GPU that cannot be asked: SGLang's own loop, with the reason."""
    monkeypatch.setenv("AIOPREFILL", "1")
    sglang_plugins.load_plugins()
    assert bench.run("hooked", [Arrival(request("a", prompt(1, 30)))]).results == 1
    warnings = [r.getMessage() for r in caplog.records if broken_gpu in r.getMessage()]
    assert len(warnings) == 1
    assert "SGLang's own prefill loop runs" in warnings[0]


def test_gpu_fault_is_refused_where_the_loop_is_required(
    bench: Bench, sglang_plugins: Any, broken_gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AIOPREFILL=require: an error that ends SGLang's process, and says what is missing."""
    monkeypatch.setenv("AIOPREFILL", "require")
    sglang_plugins.load_plugins()
    with pytest.raises(ConfigError, match=f"{broken_gpu}.*refuses"):
        bench.run("hooked", [Arrival(request("a", prompt(1, 30)))])


@pytest.mark.parametrize(
    ("status", "outcome"),
    [("cudaSuccess", True), ("cudaErrorNotReady", False), ("cudaErrorIllegalAddress", None)],
)
def test_cuda_events_are_asked_by_their_handle(status: str, outcome: bool | None) -> None:
    """Success, not ready, and every other code an error with its name; torch's own query is not asked."""
    event = SimpleNamespace(cuda_event=0x1234, query=lambda: 1 / 0)
    if outcome is None:
        with pytest.raises(DeviceError, match=status) as failed:
            completion.ask(event, runtime(status))
        assert failed.value.sticky
    else:
        assert completion.ask(event, runtime(status)) is outcome
