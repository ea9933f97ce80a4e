"""A small HTTP server that serves texts of metrics."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


@contextmanager
def metrics_server(
    body: Callable[[], bytes], path: str = "/metrics", port: int = 0, status: int = 200
) -> Iterator[str]:
    """Yields the server's address without the path; other paths are not found."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = body() if self.path == path else b""
            self.send_response(status if self.path == path else 404)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            pass  # the client has closed the connection

    server = Server(("127.0.0.1", port), Handler)
    thread = Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
