"""llama.cpp as a judge, for the scripts that compare with it: its tools, its server, and the files that `llama-results` and
`kiln logits` write. Needs the packages `gguf` and `numpy`."""

import contextlib
import json
import pathlib
import shlex
import socket
import subprocess
import time
import urllib.error
import urllib.request

import gguf
import numpy as np


def tensors(path):
    return {t.name: t.data for t in gguf.GGUFReader(path).tensors}


def logits(path):
    """Tokens of a text and a row of logits for each, which stay in the file."""
    found = tensors(path)
    tokens = np.array(found["tokens"]).view(np.int32).ravel()
    return tokens, found["logits"].view(np.float32).reshape(len(tokens), -1)


def nmse(got, want):
    """The squared error over the squared values, row by row: logits of long texts are larger than memory."""
    pairs = [(((g.astype(np.float64) - w) ** 2).sum(), (w.astype(np.float64) ** 2).sum()) for g, w in zip(got, want, strict=True)]
    error, norm = np.sum(pairs, axis=0)
    return float(error / norm)


class Peer:
    """`command`: how a tool is started, `{tool}` stands for its name; `prefix`: where it sees this machine's files."""

    def __init__(self, command, prefix):
        self.command, self.prefix = command, prefix

    def seen(self, path):
        return f"{self.prefix}{pathlib.Path(path).resolve()}"

    def start(self, tool, *arguments):
        return [*shlex.split(self.command.format(tool=tool)), *map(str, arguments)]

    def run(self, tool, *arguments, timeout=3600):
        return subprocess.run(self.start(tool, *arguments), capture_output=True, text=True, timeout=timeout)

    @contextlib.contextmanager
    def server(self, model, *arguments):
        """A function that asks a llama-server with this model: path and body in, JSON out."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = self.start("llama-server", "--device", "none", "-m", self.seen(model), "--port", port, "--no-warmup", *arguments)
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def ask(path, body):
            request = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=600) as answer:
                return json.load(answer)

        try:
            for _ in range(1200):
                with contextlib.suppress(urllib.error.URLError, ConnectionError):
                    ask("tokenize", {"content": "a"})
                    break
                time.sleep(0.2)
            else:
                raise RuntimeError("llama-server does not answer")
            yield ask
        finally:
            server.terminate()
            server.wait()
