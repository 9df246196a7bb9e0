"""A small Hub on this machine: enough of its HTTP API for the real huggingface_hub client, with faults on demand.

Not a test: the tests of downloads load it from its path. `Hub` serves repositories that are made of bytes; `Client` is
a process with an environment of its own, as huggingface_hub reads HF_ENDPOINT and HF_HUB_OFFLINE when it is imported,
and the tests' own process is offline.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

BLOCK = 16384
WEIGHTS = "diffusion_pytorch_model"
UNNEEDED = (
    "README.md",
    ".gitattributes",
    "assets/sample.png",
    "original/model.safetensors",
    "text_encoder/generation_config.json",
    "text_encoder/pytorch_model.bin",
    "text_encoder/model.fp16.safetensors",
    "tokenizer/tokenizer.model",
    f"transformer/{WEIGHTS}.bin",
    f"transformer/{WEIGHTS}.fp16.safetensors",
    f"transformer/{WEIGHTS}-00001-of-00002.safetensors",
    f"transformer/{WEIGHTS}.fp16.safetensors.index.json",
    f"vae/original/{WEIGHTS}.safetensors",
)

# Runs calls of the library, one a line, in a process that stays: its imports take longer than the calls. The hook
# records each use of a socket.
CLIENT = """
import contextlib, io, json, sys
from kandinsky5_nabla.pipeline import hub
from kandinsky5_nabla.scripts import download, generate

sockets, answers = [], sys.stdout
sys.addaudithook(lambda event, _: sockets.append(event) if event.startswith("socket.") else None)
for line in sys.stdin:
    name, args, kwargs = json.loads(line)
    sockets.clear()
    answer, said, errors = {}, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
        try:
            if name in ("download", "generate"):
                answer["code"] = globals()[name].main(args)
            else:
                snapshot = getattr(hub, name)(*args, **kwargs)
                answer |= {"folder": str(snapshot.folder), "commit": snapshot.commit, "files": snapshot.files}
        except Exception as error:
            answer |= {"raised": type(error).__name__, "text": str(error)}
    answer |= {"said": said.getvalue(), "errors": errors.getvalue(), "sockets": sorted(set(sockets))}
    print(json.dumps(answer), file=answers, flush=True)
"""


class Hub:
    """Repositories, what was asked of them, and what is to go wrong.

    Attributes:
        requests: (method, repository, file or API path) of every request, in order.
        refused: HTTP status and X-Error-Code of repositories that nobody may read; without a status nothing is
            answered.
        served: content of a (repository, file) that differs from the recorded one.
        absent: (repository, file) that is listed and not there.
        broken: number of bytes of a (repository, file) after which the connection breaks, once.
        hold_after: number of bytes of files, all together, after which nothing more is sent; `held` says that it is
            so far. What a client asks for twice counts once.
    """

    def __init__(self):
        self.commits, self.revisions = {}, {}
        self.requests, self.refused, self.served, self.absent, self.broken = [], {}, {}, set(), {}
        self.hold_after, self.sent, self.held = None, {}, threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def add(self, repo_id, files, revision="main"):
        """Commit files (content by name) to a branch; return the commit. Safetensors and .bin are LFS files."""
        listing = json.dumps({name: git_hash(content) for name, content in files.items()})
        commit = hashlib.sha1(f"{repo_id}{listing}".encode()).hexdigest()
        self.commits[repo_id, commit] = dict(files)
        self.revisions[repo_id, revision] = self.revisions[repo_id, commit] = commit
        return commit

    def bodies(self, repo_id):
        """The files of a repository whose content was asked for, in order."""
        return [name for method, repository, name in self.requests if method == "GET" and repository == repo_id]

    def hold(self, after):
        """Send so many bytes of files from now on, and then wait."""
        self.held.clear()
        self.hold_after, self.sent = after, {}

    def close(self):
        self.server.shutdown()
        self.server.server_close()


class Client:
    """A process that fetches from a Hub into a cache; `call` returns what came of it as a dict."""

    def __init__(self, endpoint, home):
        offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN")
        self.env = {name: value for name, value in os.environ.items() if name not in offline}
        self.env |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
        # On a busy machine a client that asks again after its ten seconds would spoil what the tests count.
        self.env |= {"HF_HUB_DOWNLOAD_TIMEOUT": "120", "HF_HUB_ETAG_TIMEOUT": "120"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT], env=self.env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def call(self, name, *args, **kwargs):
        """Call a function of pipeline.hub, or a command line ("download", "generate") with its arguments."""
        call = json.dumps([name, list(args), kwargs], default=str)
        self.process.stdin.write(call + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(self, repo_id, **kwargs):
        """Begin a fetch in a process of its own, to be killed."""
        code = f"from kandinsky5_nabla.pipeline.hub import fetch; fetch({repo_id!r}, **{kwargs!r})"
        return subprocess.Popen([sys.executable, "-c", code], env=self.env)

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@contextlib.contextmanager
def hub_and_client(home: Path):
    """Yield a Hub and a client of it."""
    hub = Hub()
    client = Client(hub.endpoint, home)
    try:
        yield hub, client
    finally:
        client.close()
        hub.close()


def git_hash(content):
    """The id of a file in git."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Say nothing on stderr."""

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        path = unquote(urlsplit(self.path).path).strip("/").split("/")
        api = path[:2] == ["api", "models"]
        owner_and_name, rest = (path[2:4], path[4:]) if api else (path[:2], path[2:])
        repo_id, kind = "/".join(owner_and_name), rest[0] if rest else ""
        name = "/".join(rest[2:])
        self.hub.requests.append((self.command, repo_id, f"api/{kind}" if api else name))
        commit = self.hub.revisions.get((repo_id, rest[1] if len(rest) > 1 else "main"))
        if repo_id in self.hub.refused:
            self.refuse(*self.hub.refused[repo_id])
        elif not any(known == repo_id for known, _ in self.hub.revisions):
            self.fail(404, "RepoNotFound")
        elif commit is None:
            self.fail(404, "RevisionNotFound")
        elif api:
            self.send_json(self.tree(repo_id, commit) if kind == "tree" else self.info(repo_id, commit))
        else:
            self.send_file(repo_id, commit, name)

    def refuse(self, status, code):
        if status is None:
            self.close_connection = True
        else:
            self.fail(status, code)

    def info(self, repo_id, commit):
        files = self.hub.commits[repo_id, commit].items()
        return {"id": repo_id, "sha": commit, "siblings": [_sibling(name, content) for name, content in files]}

    def tree(self, repo_id, commit):
        return [_entry(name, content) for name, content in self.hub.commits[repo_id, commit].items()]

    def fail(self, status, code):
        self.send_json({"error": code}, status, {"X-Error-Code": code} if code else {})

    def send_json(self, content, status=200, headers=None):
        body = json.dumps(content).encode()
        self.send_headers(status, {**(headers or {}), "Content-Type": "application/json", "Content-Length": len(body)})
        if self.command == "GET":
            self.wfile.write(body)

    def send_headers(self, status, headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()

    def send_file(self, repo_id, commit, name):
        recorded = self.hub.commits[repo_id, commit].get(name)
        if recorded is None or (repo_id, name) in self.hub.absent:
            self.fail(404, "EntryNotFound")
            return
        content = self.hub.served.get((repo_id, name), recorded)
        etag = hashlib.sha256(recorded).hexdigest() if _is_lfs(name) else git_hash(recorded)
        self.send_headers(200, {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Content-Length": len(content)})
        if self.command == "GET":
            end = self.hub.broken.pop((repo_id, name), len(content))
            self.close_connection = end < len(content)
            self.send_slowly(name, content[:end])

    def send_slowly(self, name, content):
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client was killed
            for start in range(0, len(content), BLOCK):
                end = min(start + BLOCK, len(content))
                if self.hub.hold_after is not None and self.sent_with(name, end) > self.hub.hold_after:
                    self.hub.held.set()
                    self.connection.recv(1)  # returns when the client is gone
                    self.close_connection = True
                    return
                self.wfile.write(content[start:end])
                self.hub.sent[name] = max(end, self.hub.sent.get(name, 0))

    def sent_with(self, name, end):
        sent = dict(self.hub.sent)
        return sum(sent.values()) - sent.get(name, 0) + max(end, sent.get(name, 0))


def _is_lfs(name):
    return name.endswith((".safetensors", ".bin"))


def _sibling(name, content):
    sibling = {"rfilename": name, "size": len(content), "blobId": git_hash(content)}
    if _is_lfs(name):
        sibling["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return sibling


def _entry(name, content):
    entry = {"type": "file", "path": name, "size": len(content), "oid": git_hash(content)}
    if _is_lfs(name):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry


def sharded_demo():
    """The files of the demo checkpoint: its transformer in three shards, and beside it all that nobody needs."""
    import safetensors.torch

    from kandinsky5_nabla.configs import load_preset

    folder = load_preset("demo").local_folder
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    tensors = safetensors.torch.load(files.pop(f"transformer/{WEIGHTS}.safetensors"))
    weight_map = {name: f"{WEIGHTS}-0000{number % 3 + 1}-of-00003.safetensors" for number, name in enumerate(tensors)}
    for shard in sorted(set(weight_map.values())):
        content = {name: tensor for name, tensor in tensors.items() if weight_map[name] == shard}
        files[f"transformer/{shard}"] = safetensors.torch.save(content)
    files[f"transformer/{WEIGHTS}.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    return {**files, **dict.fromkeys(UNNEEDED, b"nobody needs this")}
