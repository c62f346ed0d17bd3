"""Structured logs: one line per event, for people ("event key=value ...") or as JSON for machines."""

import json
import logging
import sys
import time
from typing import Any

LOGGER = logging.getLogger("pagefold.server")


class _Lines(logging.Formatter):
    """`time level event key=value ...`"""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        pairs = "".join(f" {key}={_plain(value)}" for key, value in fields.items())
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        line = f"{stamp}.{int(record.msecs):03d} {record.levelname.lower()} {record.getMessage()}{pairs}"
        return line + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


class _Json(logging.Formatter):
    """One JSON object per line: time (Unix seconds), level, event, and the event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {"time": round(record.created, 3), "level": record.levelname.lower(), "event": record.getMessage()}
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)


def _plain(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return json.dumps(text, ensure_ascii=False) if any(c in text for c in ' "=\n') else text


def setup_logs(level: str = "info", as_json: bool = False) -> None:
    """Send the server's and uvicorn's logs to stderr, each event once."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if as_json else _Lines())
    for name in ("pagefold", "uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], name == "uvicorn.error"
        logger.setLevel(level.upper())
    for name in ("pagefold", "uvicorn"):
        logging.getLogger(name).addHandler(handler)


def log_event(event: str, *, level: str = "info", exc_info: BaseException | None = None, **fields: Any) -> None:
    """`fields` must not hold prompts, answers or keys."""
    LOGGER.log(logging.getLevelName(level.upper()), event, exc_info=exc_info, extra={"fields": fields})
