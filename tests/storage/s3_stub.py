"""A server that answers like AWS S3 when it refuses: a reason in the body, and none to HEAD."""

from __future__ import annotations

import contextlib
import http.server
import threading


class Refusing:
    """What the server answers to everything, and what it was asked."""

    def __init__(self) -> None:
        self.status, self.code, self.fields, self.headers = 403, "AccessDenied", {}, {}
        self.asked: list[tuple[str, str]] = []
        self.endpoint = ""
        self.ok_from = None  # answer 404 from this request on

    def say(self, status, code, *, fields=None, headers=None) -> None:
        self.status, self.code = status, code
        self.fields, self.headers = fields or {}, headers or {}
        self.asked.clear()


@contextlib.contextmanager
def refusing_s3():
    stub = Refusing()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Transfer-Encoding") == "chunked":
                while size := int(self.rfile.readline(), 16):
                    self.rfile.read(size + 2)
                self.rfile.readline()
            stub.asked.append((self.command, self.path))
            status, code = stub.status, stub.code
            if stub.ok_from is not None and len(stub.asked) > stub.ok_from:
                status, code = 404, "NoSuchKey"
            fields = "".join(f"<{name}>{value}</{name}>" for name, value in stub.fields.items())
            body = (
                '<?xml version="1.0" encoding="UTF-8"?>\n'
                f"<Error><Code>{code}</Code><Message>as {code} says</Message>{fields}</Error>"
            ).encode()
            self.send_response(status)
            for name, value in stub.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Type", "application/xml")
            if self.command == "HEAD":
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

        def log_message(self, *_) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    stub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
