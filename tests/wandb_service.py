"""A stand-in for the W&B service on the loopback interface: what the real client (0.31) asks of it for runs that begin
and are resumed. It keeps the lines of each run's history and system metrics, by the offsets that the client names, and
its files. Nothing of the network is
proven by it; what the client sends, and in which order, is."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import quote, unquote

HISTORY, SUMMARY, EVENTS = "wandb-history.jsonl", "wandb-summary.json", "wandb-events.jsonl"


class WandBService:
    """`with WandBService() as service`: serves at `service.url`. `service.history(id)` are the rows of a run."""

    def __init__(self) -> None:
        self.lines: dict[str, list[str]] = {}
        self.buckets: dict[str, dict[str, Any]] = {}
        self.summaries: dict[str, dict[str, Any]] = {}
        self.events: dict[str, list[str]] = {}
        self.uploads: dict[str, dict[str, bytes]] = {}
        """Content of every file that was sent, by run and name."""
        service = self

        class Handler(_Handler):
            pass

        Handler.service = service
        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(300)

    def history(self, run_id: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines.get(run_id, [])]

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """The data of a GraphQL reply."""
        name = variables.get("name")
        if operation == "Viewer":
            return {"viewer": {"id": "v", "username": "me", "entity": "me", "flags": "{}", "teams": {"edges": []}}}
        if operation == "RunResumeStatus":
            return {"model": {"id": "p", "name": "p", "entity": ME, "bucket": self._resume(str(name))}}
        if operation == "UpsertBucket":
            known = self.buckets.setdefault(str(name), {"inserted": variables})
            known["newest"] = variables
            project = {"id": "p", "name": variables["project"], "entity": ME}
            bucket = {
                "id": "x",
                "name": name,
                "displayName": variables.get("displayName") or name,
                "description": "",
                "config": variables.get("config") or "{}",
                "sweepName": None,
                "project": project,
                "historyLineCount": len(self.lines.get(str(name), [])),
            }
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if operation == "CreateRunFiles":
            run = variables["run"]
            files = [
                {"name": file, "uploadUrl": f"{self.url}/upload/{run}/{quote(file)}"} for file in variables["files"]
            ]
            return {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": files}}
        return {}

    def _resume(self, name: str) -> dict[str, Any] | None:
        if name not in self.buckets:
            return None
        lines = self.lines.get(name, [])
        return {
            "id": "x",
            "name": name,
            "displayName": name,
            "config": "{}",
            "tags": [],
            "notes": None,
            "summaryMetrics": lines[-1] if lines else "{}",
            "historyLineCount": len(lines),
            "logLineCount": 0,
            "eventsLineCount": len(self.events.get(name, [])),
            "historyTail": json.dumps(lines[-1:]),
            "eventsTail": "[]",
            "wandbConfig": '{"t": 1}',
        }

    def stream(self, run_id: str, files: dict[str, Any]) -> None:
        """Lines of a run's files, each at its offset."""
        if HISTORY in files:
            kept = self.lines.setdefault(run_id, [])
            kept[files[HISTORY]["offset"] :] = files[HISTORY]["content"]
        if EVENTS in files:
            kept = self.events.setdefault(run_id, [])
            kept[files[EVENTS]["offset"] :] = files[EVENTS]["content"]
        if SUMMARY in files:
            self.summaries[run_id] = json.loads(files[SUMMARY]["content"][-1])


ME = {"id": "e", "name": "me"}


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """A client that was killed needs no stack."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    service: WandBService

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.endswith("/graphql"):
            asked = json.loads(body)
            match = re.search(r"(?:query|mutation)\s+(\w+)", asked["query"])
            self._reply({"data": self.service.answer(match[1] if match else "", asked.get("variables") or {})})
        else:
            if match := re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", self.path):
                self.service.stream(match[1], json.loads(body).get("files") or {})
            self._reply({"exitcode": None, "limits": {}})

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        _, _, run, name = self.path.split("/", 3)
        self.service.uploads.setdefault(run, {})[unquote(name)] = content
        self._reply({})

    def _reply(self, value: dict[str, Any], code: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass
