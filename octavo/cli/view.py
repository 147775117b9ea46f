"""``octavo view``: shows a recording of an engine in the browser, on the page that a server has."""

from __future__ import annotations

import contextlib
import webbrowser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from octavo.cli.parsing import Arguments, Parser, check_range
from octavo.core.errors import ConfigError

EXAMPLE = """\
examples:
  octavo simulate --request-rate 4 --num-requests 200 --num-gpu-blocks-override 400 --record run.jsonl
  octavo view run.jsonl
  octavo view ~/.cache/octavo/dumps/step-20260102-030405-6-789.jsonl

Recordings are written by 'octavo simulate --record', and by the button "Save" of a server's page; dumps by an engine
when a step fails: the error is printed, the page shows queues and blocks. Only this machine reaches the page; Ctrl-C
ends it.
"""
HOST = "127.0.0.1"


def make_parser() -> Parser:
    parser = Parser(
        prog="octavo view",
        usage="octavo view [options] FILE",
        description="Shows a recording of an engine's blocks, queues and steps as a page in the browser.",
        epilog=EXAMPLE,
    )
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port of the page (a free one)")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    return parser


def run(arguments: Arguments) -> int:
    from octavo.core.stats import read_recording
    from octavo.engine.step_dumps import read_failure

    if len(arguments.words) != 1:
        raise ConfigError(f"octavo view shows one file, not {len(arguments.words)}: octavo view FILE")
    check_range(arguments, "port", most=65535, least=0)
    recording = read_recording(Path(arguments.words[0]))
    server = make_server(recording, arguments.port)
    with server:
        if (failure := read_failure(recording)) is not None:
            print("\n".join(failure.lines()))
        url = f"http://{HOST}:{server.server_address[1]}/"
        print(f"showing {arguments.words[0]} on {url} (Ctrl-C ends it)", flush=True)
        if arguments.open:
            webbrowser.open(url)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


def make_server(recording: bytes, port: int = 0) -> ThreadingHTTPServer:
    """A server of the page over a recording, which listens on this machine only."""

    try:
        return ThreadingHTTPServer((HOST, port), type("Handler", (_Handler,), {"data": recording}))
    except OSError as e:
        raise ConfigError(f"cannot listen on {HOST}:{port}: {e.strerror}") from None


class _Handler(BaseHTTPRequestHandler):
    """Answers with the page, its files and the recording."""

    data = b""
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "octavo", ""

    def do_GET(self) -> None:
        from octavo.server.page import HEADERS, answer, find_file, for_recordings

        path = self.path.partition("?")[0]
        # Against DNS rebinding: a page of another site must not read the recording.
        is_ours = self.headers.get("host", "").partition(":")[0] in (HOST, "localhost")
        file = find_file(path, wants_html=True) if is_ours else None
        if path == "/engine/recording" and is_ours:
            self._send(200, {**HEADERS, "content-type": "application/jsonl"}, self.data)
        elif file is not None:
            asked = {
                name: self.headers.get(name.replace("_", "-"), "") for name in ("if_none_match", "accept_encoding")
            }
            self._send(*answer(for_recordings(file), **asked))
        else:
            self._send(404, {"content-type": "text/plain"}, b"not found\n")

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""
