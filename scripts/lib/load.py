"""Servers and clients for the scripts that load them. Needs python3 alone."""

import http.client
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time

WORDS = "clay fire glaze kiln potter wheel ash stone river wood oven heat bowl jar cup tile brick sand salt iron".split()


def say(text):
    print(text, file=sys.stderr, flush=True)


def words(count, seed):
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(count))


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    """A server under test; ends with the `with` block. `command` is how it is started, without its port."""

    def __init__(self, name, command):
        self.name, self.port = name, free_port()
        self.log = open(f"/tmp/load-{name}-{os.getpid()}.log", "w+b")
        self.process = subprocess.Popen([*command, "--port", str(self.port)], stdout=self.log, stderr=self.log, start_new_session=True)

    def __enter__(self):
        for _ in range(1500):
            try:
                if self.get("/health")[0] == 200:
                    return self
            except OSError:
                pass
            if self.process.poll() is not None:
                break
            time.sleep(0.2)
        said = self.said()
        self.__exit__()
        sys.exit(f"{sys.argv[0]}: error: {self.name} does not start:\n{said}")

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()
        os.unlink(self.log.name)

    def said(self):
        """The end of what it has written."""
        self.log.seek(0)
        return self.log.read().decode(errors="replace")[-2000:]

    def get(self, path):
        return self.ask("GET", path)

    def post(self, path, body):
        return self.ask("POST", path, body if isinstance(body, (str, bytes)) else json.dumps(body))

    def ask(self, method, path, body=None):
        """Status and body of one answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} if body is not None else {})
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    def json(self, path):
        return json.loads(self.get(path)[1])

    def chat(self, prompt, tokens, **more):
        """One streamed chat: times of the first token and the end, the text, what the server counted, and the stream's id."""
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
                "stream": True, "stream_options": {"include_usage": True}, **more}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        start = time.perf_counter()
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            if reply.status != 200:
                raise RuntimeError(f"{self.name}: {reply.status} {reply.read()[:300]}")
            return self.read(reply, start)
        finally:
            connection.close()

    def read(self, reply, start):
        first, text, usage, ids, whole = None, "", {}, set(), False
        for line in reply:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                whole = True
                continue
            chunk = json.loads(line[6:])
            if chunk.get("error"):
                raise RuntimeError(f"{self.name}: {chunk['error']}")
            usage = chunk.get("usage") or usage
            ids.add(chunk["id"])
            for choice in chunk["choices"]:
                piece = choice["delta"].get("content") or ""
                if piece and first is None:
                    first = time.perf_counter() - start
                text += piece
        if not whole or len(ids) != 1:
            raise RuntimeError(f"{self.name}: a stream with the ids {ids} that {'ended' if whole else 'broke off'} after {text!r}")
        return {"first": first, "whole": time.perf_counter() - start, "text": text, "usage": usage, "id": ids.pop()}


def reader(port, bodies, told):
    """A process of its own with a stream for each of these requests: when each of their chunks came, and how many tokens there were by then."""
    seen = [[] for _ in bodies]

    def one(i):
        body = bodies[i]
        with socket.create_connection(("127.0.0.1", port), 600) as s:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            s.sendall(head.encode() + body)
            with s.makefile("rb") as file:
                status = file.readline()
                if b" 200 " not in status:
                    raise RuntimeError(f"{status} {file.read(400)}")
                for line in file:
                    # Chunks are not read as JSON: the clients would be what is measured.
                    if found := COUNT.search(line):
                        seen[i].append((time.monotonic(), int(found[1])))
                    elif line.startswith(b"data: [DONE]"):
                        return
                    elif line.startswith(b'data: {"error'):
                        raise RuntimeError(line)

    try:
        at_once(len(bodies), one)
        told.put(seen)
    except Exception as error:
        told.put(error)


# A stream begins with a chunk that has no token yet.
COUNT = re.compile(rb'"completion_tokens":\s*([1-9]\d*)')


def rate_of(server, prompts, tokens, processes=8):
    """Tokens per second that a stream for each prompt gets through HTTP, while all of them are being written; and from the first request to the last answer."""
    def body(prompt):
        return json.dumps({"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
                           "stream_options": {"include_usage": True, "continuous_usage_stats": True}}).encode()

    streams, bodies = len(prompts), [body(prompt) for prompt in prompts]
    told, began = multiprocessing.Queue(), time.monotonic()
    readers = [multiprocessing.Process(target=reader, args=(server.port, bodies[i::processes], told)) for i in range(min(streams, processes))]
    for process in readers:
        process.start()
    seen = []
    for _ in readers:
        one = told.get(timeout=600)
        if isinstance(one, Exception):
            raise one
        seen += one
    for process in readers:
        process.join()
    ended = max(times[-1][0] for times in seen)
    first, last = max(times[0][0] for times in seen), min(times[-1][0] for times in seen)
    if last <= first:
        say(f"note: the last of {streams} streams began {first - last:.1f} s after another had ended: ask for more tokens")

    def by(times, moment):
        return max((count for at, count in times if at <= moment), default=0)

    together = max(0, sum(by(times, last) - by(times, first) for times in seen))
    whole = sum(times[-1][1] for times in seen)
    return {"streams": streams, "tokens_per_second": round(together / max(last - first, 0.001), 1), "seconds_together": round(last - first, 2),
            "whole_tokens_per_second": round(whole / (ended - began), 1), "all_writing_after": round(first - began, 2), "tokens": whole}


def at_once(count, work):
    """Results of `work(i)` on so many threads."""
    results = [None] * count

    def one(i):
        try:
            results[i] = work(i)
        except Exception as error:  # raised below; told now, as others may go on for minutes
            results[i] = error
            say(f"client {i} failed: {error}")

    threads = [threading.Thread(target=one, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results
