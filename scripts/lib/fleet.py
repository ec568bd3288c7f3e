"""What trials of several servers behind one address share: a network of their own, and clients that say what became of each request. Needs python3 alone."""

import collections
import ctypes
import fcntl
import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

KEY = "loopback-key"


def checked(*command):
    done = subprocess.run([str(word) for word in command], text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"{sys.argv[0]}: error: {command[0]} failed\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def alone():
    """Starts this script again where the network is a loopback interface and nothing else; `False` where the system does not allow that."""
    if os.environ.get("KILN_GATEWAYS_ALONE"):
        with socket.socket() as any_socket:  # `lo` is down at first
            request = struct.pack("16sh", b"lo", 1)
            fcntl.ioctl(any_socket, 0x8914, request)
        return True
    if subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode:
        return False
    os.environ["KILN_GATEWAYS_ALONE"] = "1"
    os.execvp("unshare", ["unshare", "-rn", sys.executable, *sys.argv])


def process(command, log, **more):
    """A process that ends with this one."""
    end = lambda: ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    return subprocess.Popen([str(word) for word in command], stdout=log, stderr=log, preexec_fn=end, **more)


def until(what, done, seconds=120):
    start = time.monotonic()
    while not done():
        if time.monotonic() - start > seconds:
            raise TimeoutError(f"{what} did not happen within {seconds} s")
        time.sleep(0.02)


def ask(port, method, path, body=None, headers=None, timeout=300):
    """Status, headers and body of one answer; status 0 where the connection broke."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        data = json.dumps(body) if body is not None else None
        connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
        reply = connection.getresponse()
        return reply.status, reply.headers, reply.read()
    except (OSError, http.client.HTTPException) as why:
        return 0, {}, repr(why).encode()
    finally:
        connection.close()


def busy(port):
    """Sequences of a server that run."""
    status, _, body = ask(port, "GET", "/loads", headers={"x-api-key": KEY})
    return json.loads(body)["num_running_reqs"] if status == 200 else 0


def chat(prompt, tokens, **more):
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    return {"model": "m", "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


class Client(threading.Thread):
    """One request. `outcome`: whole; error (told of), broken (a body that breaks off), refused (a status); or what must never be: short (it looks
    whole and is not), error-done (`[DONE]` behind an error)."""

    def __init__(self, port, body, headers=None):
        super().__init__(daemon=True)
        self.port, self.body, self.headers = port, body, headers or {}
        self.outcome = self.status = self.replica = None
        self.pieces, self.reply = 0, {}
        self.start()

    def run(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(self.body), {"Content-Type": "application/json", **self.headers})
            reply = connection.getresponse()
            self.status, self.replica = reply.status, reply.headers.get("x-kiln-replica")
            if reply.status != 200:
                self.outcome = "refused"
                self.reply = reply.read()
            elif self.body.get("stream"):
                self.outcome = self.stream(reply)
            else:
                self.reply = json.loads(reply.read())
                whole = self.reply["usage"]["completion_tokens"] == self.body["max_tokens"]
                self.outcome = "whole" if whole else "short"
        except (OSError, http.client.HTTPException, ValueError):
            self.outcome = "broken"
        finally:
            connection.close()

    def stream(self, reply):
        error = done = finished = False
        for line in lines(reply):
            if line.startswith(b"data: [DONE]"):
                done = True
            elif line.startswith((b"data: ", b"{")):
                event = json.loads(line.removeprefix(b"data: "))
                error |= "error" in event
                for choice in event.get("choices", []):
                    self.pieces += bool(choice["delta"].get("content"))
                    finished |= bool(choice.get("finish_reason"))
        if error:
            return "error-done" if done else "error"
        return "whole" if done and finished else "short"


def lines(reply):
    """Lines as they come. Reading lines from the reply itself takes a body that breaks off for one that has ended."""
    rest = b""
    while piece := reply.read1(65536):
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole
    if rest:
        yield rest


def outcomes(clients):
    for client in clients:
        client.join(600)
    return collections.Counter(client.outcome or "hangs" for client in clients)


def leave(port, body, after):
    """Asks and closes the connection as soon as `after()` holds."""
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    until("the request", after)
    connection.close()
