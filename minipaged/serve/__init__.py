"""The HTTP server: OpenAI's API over one engine.

Reading order: protocol (what is asked and answered), engine_thread (the engine, and who waits for it), app
(the routes), guards (what a connection and a request must pass), metrics. docs/serving.md says what is
supported. The page that shows the memory while it serves is `minipaged.live`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServeSettings:
    """Addresses and limits of one server.

    Attributes:
        host: where to listen; the default is reached from this machine only.
        port: where to listen; 0 takes a free one.
        api_key: what clients must send as `Authorization: Bearer KEY`; without it nothing is asked for.
        served_model_name: the name that clients use; without it the model's own.
        allowed_hosts: a name, beside this machine's own, under which browsers may reach the server.
        max_requests: requests under way, running and waiting; more are refused with status 429.
        max_connections: connections open at once; more are refused with status 503.
        max_samples: answers that one request may ask for, its prompts times n.
        max_body: bytes of a request's body.
        body_seconds: seconds until a request is there, first its headers, then its body.
        request_seconds: seconds that an answer may take, and that its reader may take nothing of it.
        drain_seconds: seconds to finish in for what is under way at SIGTERM or Ctrl-C.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    served_model_name: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    max_requests: int = 1024
    max_connections: int = 2048
    max_samples: int = 64
    max_body: int = 2**20
    body_seconds: float = 10.0
    request_seconds: float = 600.0
    drain_seconds: float = 30.0
