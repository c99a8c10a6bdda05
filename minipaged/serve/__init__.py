"""The HTTP server: OpenAI's API over one engine, and a live page that shows the engine's memory.

Reading order: engine_thread (the engine's side), calls (the HTTP side of it), protocol (what is asked and
answered), app (the routes and the guards before them), pages (the live page), server (starting and
stopping). Only `snapshot` looks into requests and block tables. docs/serving.md says what is supported.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServeSettings:
    """Limits and addresses of one server.

    Attributes:
        host, port: where to listen; port 0 takes a free one.
        api_key: what clients must send as `Authorization: Bearer …`; None asks for nothing.
        model_name: the name clients use; None takes the model's own.
        allowed_hosts: names, beside this machine's own, under which browsers may reach the server.
        max_body: bytes of a request's body.
        max_samples: answers that one body may ask for: prompts times n.
        max_requests: requests under way, running and waiting; more are refused with 429.
        max_connections: open connections; more are refused with 503.
        request_seconds, body_seconds: the most a whole request may take, and until its body is there.
        drain_seconds: after SIGTERM, what is under way gets so long to finish.
        frame_rate: pictures a second that a page gets.
        strip_length: tokens of a strip, when the page shows contiguous memory beside the blocks.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    model_name: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    max_body: int = 2**20
    max_samples: int = 64
    max_requests: int = 1024
    max_connections: int = 2048
    request_seconds: float = 600.0
    body_seconds: float = 10.0
    drain_seconds: float = 30.0
    frame_rate: float = 10.0
    strip_length: int = 512
