"""Loopback is open, everything else needs keys, and with keys only known clients get in."""

from __future__ import annotations

import shutil
import stat

import pytest
import zmq
from wire_fakes import ANY_PORT, FakeScheduler, RawClient
from wire_support import run, wait_until, zmq_context

from aioprefill.errors import ConfigError, WireError
from aioprefill.wire.client import PairClient
from aioprefill.wire.messages import Hello
from aioprefill.wire.security import (
    Authenticator,
    apply_client_security,
    apply_server_security,
    is_local,
    load_keys,
    write_keys,
)

__all__ = ["run"]


@pytest.mark.parametrize(
    ("endpoint", "local"),
    [
        ("tcp://127.0.0.1:5", True),
        ("tcp://127.9.9.9:5", True),
        ("tcp://localhost:*", True),
        ("tcp://[::1]:5", True),
        ("ipc:///tmp/x", True),
        ("inproc://x", True),
        ("tcp://0.0.0.0:5", False),
        ("tcp://*:5", False),
        ("tcp://[::]:5", False),
        ("tcp://10.0.0.1:5", False),
        ("tcp://eth0:5", False),
        ("tcp://localhost.example.com:5", False),
        ("tcp://127.0.0.1:0;10.0.0.1:5", False),
        ("tcp://127.0.0.1@10.0.0.1:5", False),
    ],
)
def test_what_counts_as_loopback(endpoint, local):
    """Only addresses that are known never to leave this machine."""
    assert is_local(endpoint) is local


@pytest.mark.parametrize("apply", [apply_server_security, apply_client_security])
def test_off_loopback_without_keys_is_refused_saying_how_to_make_them(apply):
    """On both sides; the endpoint is named."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        with pytest.raises(ConfigError, match=r"tcp://10\.0\.0\.1:5 needs keys.*aioprefill keygen DIR"):
            apply(socket, "tcp://10.0.0.1:5", None)
        assert apply(socket, "tcp://127.0.0.1:5", None) is None
        assert socket.mechanism == zmq.NULL


def test_key_folder_is_private_and_never_overwritten(tmp_path):
    """Secrets are readable by their owner only; a second keygen is an error."""
    folder = tmp_path / "new" / "keys"
    made = write_keys(folder)
    names = {str(path.relative_to(folder)) for path in made}
    assert names == {
        "server.key",
        "server.key_secret",
        "client.key",
        "client.key_secret",
        "clients/client.key",
    }
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in made:
        if path.suffix == ".key_secret":
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="holds keys already"):
        write_keys(folder)


def test_keys_are_loaded_and_not_printed(tmp_path):
    """A repr names the folder, not a key."""
    write_keys(tmp_path)
    keys = load_keys(tmp_path)
    assert len(keys.clients) == 1
    assert keys.server_secret.decode() not in repr(keys)
    assert keys.client_secret.decode() not in repr(keys)
    assert str(tmp_path) in repr(keys)


def test_missing_and_damaged_keys_are_config_errors(tmp_path):
    """Each says which file, and what to do."""
    with pytest.raises(ConfigError, match=r"no keys in .*aioprefill keygen"):
        load_keys(tmp_path)
    write_keys(tmp_path)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        only_client = tmp_path / "client_side"
        only_client.mkdir()
        shutil.copy(tmp_path / "client.key_secret", only_client)
        with pytest.raises(ConfigError, match=r"no server\.key_secret"):
            apply_server_security(socket, ANY_PORT, load_keys(only_client))
        with pytest.raises(ConfigError, match=r"no server\.key: copy it"):
            apply_client_security(socket, ANY_PORT, load_keys(only_client))
        (tmp_path / "client.key_secret").unlink()
        with pytest.raises(ConfigError, match=r"no client\.key_secret"):
            apply_client_security(socket, ANY_PORT, load_keys(tmp_path))
        (tmp_path / "clients" / "client.key").unlink()
        with pytest.raises(ConfigError, match="no client could connect"):
            apply_server_security(socket, ANY_PORT, load_keys(tmp_path))
    (tmp_path / "server.key_secret").write_text("rubbish")
    with pytest.raises(ConfigError, match=r"server\.key_secret"):
        load_keys(tmp_path)
    (tmp_path / "server.key_secret").write_text('curve\n    public-key = "short"\n')
    with pytest.raises(ConfigError, match="40 characters"):
        load_keys(tmp_path)


def test_known_client_is_served_off_loopback_address_with_curve(run, tmp_path):
    """All interfaces, keys on both sides: requests go through, encrypted."""

    async def scenario():
        write_keys(tmp_path)
        keys = load_keys(tmp_path)
        scheduler = FakeScheduler()
        async with scheduler.service("tcp://0.0.0.0:0", keys=keys) as service:
            endpoint = service.endpoint.replace("0.0.0.0", "127.0.0.1")
            async with PairClient(endpoint, keys=keys) as client:
                stream = client.submit([1, 2, 3], request_id="r")
                await wait_until(lambda: "r" in scheduler.handles, "the request")
                scheduler.publish("r")
                assert (await stream.first_token()).token_id == 7

    run(scenario())


def test_client_with_unknown_key_is_refused_and_told(run, tmp_path):
    """Knowing the server's public key is not enough; known clients are not disturbed."""

    async def scenario():
        write_keys(tmp_path / "a")
        write_keys(tmp_path / "b")
        shutil.copy(tmp_path / "a" / "server.key", tmp_path / "b" / "server.key")
        (tmp_path / "b" / "server.key_secret").unlink()
        good, stranger = load_keys(tmp_path / "a"), load_keys(tmp_path / "b")
        async with FakeScheduler().service(keys=good) as service:
            async with PairClient(service.endpoint, keys=good) as client:
                with pytest.raises(WireError, match="not authorised"):
                    await PairClient(service.endpoint, keys=stranger, timeout_s=5).__aenter__()
                assert await client.ping() > 0
            authenticator = service.server._authenticator
            assert (authenticator.admitted, authenticator.refused) == (1, 1)

    run(scenario())


def test_plain_client_of_a_curve_server_gets_nothing(run, tmp_path):
    """No downgrade: a client without keys is never greeted."""

    async def scenario():
        write_keys(tmp_path)
        async with FakeScheduler().service(keys=load_keys(tmp_path)) as service, zmq_context() as context:
            raw = RawClient(context, service.endpoint)
            raw.send(Hello("client", "c"))
            await wait_until(lambda: service.server.counters.disconnects, "the refusal")
            assert raw.got == []
            raw.pump.close()
            with pytest.raises(WireError, match=r"127\.0\.0\.1"):
                await PairClient(service.endpoint, timeout_s=1).__aenter__()

    run(scenario())


def test_without_authenticator_everybody_is_refused(run, tmp_path, monkeypatch):
    """Fails closed: a CURVE socket whose authenticator does not run admits nobody."""

    async def scenario():
        write_keys(tmp_path)
        keys = load_keys(tmp_path)
        monkeypatch.setattr(Authenticator, "start", lambda self: None)
        async with FakeScheduler().service(keys=keys) as service:
            with pytest.raises(WireError):
                await PairClient(service.endpoint, keys=keys, timeout_s=0.5).__aenter__()
            assert service.server.clients == 0

    run(scenario())
