"""Who may talk to a socket. Loopback is open; anything else needs CURVE keys on both sides.

A key folder, as `write_keys` makes it, holds

    server.key_secret   for servers (prefill, decode)
    server.key          their public half, for clients
    client.key_secret   for clients; a prefill server is a client of its decode workers
    clients/*.key       public keys of the clients that servers admit

Rule: with keys, a server admits exactly the clients in `clients/`. CURVE alone would admit everybody who
knows the server's public key, which is no secret. The list is read once, at start. An `Authenticator`
answers libzmq's questions (ZAP); without a running one libzmq is told to refuse, not to admit.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.auth
from zmq.utils import z85

from aioprefill.errors import ConfigError
from aioprefill.wire.pump import ZmqPump

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = "aioprefill"


@dataclass(frozen=True, slots=True, repr=False)
class CurveKeys:
    """Keys of one folder, Z85 text. A machine that only serves or only connects may lack the other half."""

    source: Path
    server_public: bytes | None = None
    server_secret: bytes | None = None
    client_public: bytes | None = None
    client_secret: bytes | None = None
    clients: frozenset[bytes] = frozenset()
    """Public keys of admitted clients, 32 raw bytes each."""

    def __repr__(self) -> str:
        # never the keys themselves: a repr ends up in logs
        return f"<CurveKeys {self.source} clients={len(self.clients)}>"


def write_keys(directory: Path) -> list[Path]:
    """Make a key folder for one server and one client; the files made. Secret files are mode 0600.

    Raises `ConfigError` when there are keys in it already, or it cannot be written.
    """
    directory = Path(directory)
    if any((directory / name).exists() for name in ("server.key_secret", "client.key_secret")):
        raise ConfigError(f"{directory} holds keys already: choose another folder, or remove them first")
    try:
        clients = directory / "clients"
        clients.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)  # before the secrets are written, which zmq.auth does with the default mode
        made = []
        for name in ("server", "client"):
            public, secret = map(Path, zmq.auth.create_certificates(directory, name))
            secret.chmod(0o600)
            made += [public, secret]
        admitted = clients / "client.key"
        admitted.write_bytes((directory / "client.key").read_bytes())
    except OSError as err:
        raise ConfigError(f"cannot write keys to {directory}: {err}") from err
    return [*made, admitted]


def load_keys(directory: Path) -> CurveKeys:
    """Read a key folder. Raises `ConfigError` when there are no keys in it, or a file is damaged."""
    directory = Path(directory)
    server_public, server_secret = _load_pair(directory / "server")
    client_public, client_secret = _load_pair(directory / "client")
    if server_public is None and client_secret is None:
        raise ConfigError(f"no keys in {directory}: make them with `aioprefill keygen {directory}`")
    clients = {z85.decode(_load(path)[0]) for path in sorted((directory / "clients").glob("*.key"))}
    return CurveKeys(
        directory, server_public, server_secret, client_public, client_secret, frozenset(clients)
    )


def _load_pair(stem: Path) -> tuple[bytes | None, bytes | None]:
    secret, public = stem.with_suffix(".key_secret"), stem.with_suffix(".key")
    if secret.exists():
        return _load(secret)
    return (_load(public)[0], None) if public.exists() else (None, None)


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as err:
        raise ConfigError(f"cannot read the key file {path}: {err}") from err
    if any(key is not None and len(key) != 40 for key in (public, secret)):
        raise ConfigError(f"{path} is damaged: a CURVE key has 40 characters")
    return public, secret


def is_local(endpoint: str) -> bool:
    """True when nobody off this machine can reach the endpoint (loopback address, ipc, inproc).

    Raises `ConfigError` when it is no endpoint: tcp://HOST:PORT, ipc://PATH or inproc://NAME.
    """
    address = _split_tcp(endpoint)
    if address is None:
        return True
    host, _ = address
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False  # a host name, an interface or *: cannot be known to stay on this machine


def _split_tcp(endpoint: str) -> tuple[str, str] | None:
    """Host and port of a TCP endpoint, None for ipc and inproc. Raises `ConfigError` for anything else."""
    scheme, _, address = endpoint.partition("://")
    if scheme in ("ipc", "inproc") and address:
        return None
    host, _, port = address.rpartition(":")
    if scheme == "tcp" and host and (port == "*" or (port.isdecimal() and int(port) < 1 << 16)):
        return host, port
    raise ConfigError(f"endpoint {endpoint!r}: expected tcp://HOST:PORT")


def apply_server_security(
    socket: zmq.Socket[bytes], endpoint: str, keys: CurveKeys | None
) -> Authenticator | None:
    """Prepare a socket for binding; call it before `bind`.

    With keys the result is the authenticator of the socket's context: start it before binding, and
    close it after the socket. Raises `ConfigError` for an endpoint off loopback without keys, for keys
    without the server's secret, and for an empty list of clients.
    """
    _require_local(endpoint, keys, "serving on")
    if keys is None:
        return None
    if keys.server_secret is None:
        raise ConfigError(f"{keys.source} has no server.key_secret, which serving needs")
    if not keys.clients:
        raise ConfigError(f"{keys.source / 'clients'} has no *.key files: no client could connect")
    socket.curve_server = True
    socket.curve_secretkey = keys.server_secret
    socket.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no authenticator: refuse, do not admit
    return Authenticator(socket.context, keys.clients)


def apply_client_security(socket: zmq.Socket[bytes], endpoint: str, keys: CurveKeys | None) -> None:
    """Prepare a socket for connecting; call it before `connect`.

    Raises `ConfigError` for an endpoint off loopback without keys, and for keys without the client's
    secret or the server's public key.
    """
    _require_local(endpoint, keys, "connecting to")
    if keys is None:
        return
    if keys.server_public is None:
        raise ConfigError(f"{keys.source} has no server.key: copy it from the server's key folder")
    if keys.client_secret is None:
        raise ConfigError(f"{keys.source} has no client.key_secret, which connecting needs")
    socket.curve_serverkey = keys.server_public
    socket.curve_publickey = keys.client_public
    socket.curve_secretkey = keys.client_secret


def _require_local(endpoint: str, keys: CurveKeys | None, what: str) -> None:
    if not is_local(endpoint) and keys is None:
        raise ConfigError(
            f"{what} {endpoint} needs keys, because it is not a loopback address: make a key folder with "
            "`aioprefill keygen DIR` and give it to both sides (--curve-keys DIR)"
        )


class Authenticator:
    """Answers libzmq's question "may this client connect?" for all CURVE servers of one context."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], clients: frozenset[bytes]) -> None:
        self._clients = clients
        self._socket = context.socket(zmq.REP)
        # batch 1: a REP socket wants its answer sent before the next question is read
        self._pump = ZmqPump(self._socket, self._answer, name="authenticator", batch=1)
        self.admitted = 0
        self.refused = 0

    def start(self) -> None:
        """Begin, on the running loop. Raises `ConfigError` when the context has an authenticator."""
        try:
            self._socket.bind(ZAP_ENDPOINT)
        except zmq.ZMQError as err:
            raise ConfigError("this ZMQ context has an authenticator already: use one per context") from err
        self._pump.start()

    def close(self) -> None:
        """Stop; from then on libzmq refuses every client. Idempotent."""
        self._pump.close()

    def _answer(self, frames: list[bytes]) -> None:
        version, question, mechanism, credentials = frames[0], frames[1], frames[5], frames[6:]
        known = mechanism == b"CURVE" and len(credentials) == 1 and credentials[0] in self._clients
        if known:
            self.admitted += 1
        else:
            self.refused += 1
        status, text = (b"200", b"OK") if known else (b"400", b"unknown client key")
        self._pump.send([version, question, status, text, b"", b""])
