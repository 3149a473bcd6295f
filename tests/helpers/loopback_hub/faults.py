"""What goes wrong on purpose."""

import threading
from dataclasses import dataclass, field


@dataclass
class Fault:
    """What goes wrong with the next `times` requests whose method and path match.

    Args:
        method (`str`): HTTP method.
        pattern (`str`): Regular expression searched in the path.
        status (`int`, *optional*): Answer this instead of serving the request.
        headers (`dict`): Headers of that answer.
        message (`str`): Text of that answer.
        drop_after (`int`, *optional*): Read so many bytes of the body, then close the connection.
        delay (`float`): Seconds to wait before the request is served.
        mute (`bool`): Serve the request, then close the connection instead of answering.
        hold (`bool`): Set `reached`, wait for `release`, then close the connection; the request is never served.
        times (`int`): How many requests it hits.
    """

    method: str
    pattern: str
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    message: str = "injected"
    drop_after: int | None = None
    delay: float = 0.0
    mute: bool = False
    hold: bool = False
    times: int = 1
    reached: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)
