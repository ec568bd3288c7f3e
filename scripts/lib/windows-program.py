#!/usr/bin/env python3
"""Tries a `kiln.exe` under Wine: a model on the CPU, the store, the server.

    scripts/lib/windows-program.py TEST-SYSTEMS KILN.EXE

TEST-SYSTEMS is the script that starts Wine (`scripts/test-systems wine PROGRAM...`).
"""
import functools
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

script, program = (os.path.abspath(path) for path in sys.argv[1:])
folder = tempfile.mkdtemp(prefix="kiln-windows-")
environment = {
    **os.environ,
    **{f"KILN_{name}": windows for name, windows in (("DEVICE", "cpu"), ("MODELS", "store"), ("CACHE_DIR", "cache"), ("CONFIG", "none"))},
}


def start(*words, **options):
    return subprocess.Popen([script, "wine", program, *words], cwd=folder, env=environment, start_new_session=True, **options)


def kiln(*words, code=0):
    """What a command prints, with its errors."""
    child = start(*words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        out, err = (text.decode(errors="replace").replace("\r\n", "\n") for text in child.communicate(timeout=240))
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        raise SystemExit(f"kiln {' '.join(words)} does not end")
    if child.returncode != code:
        raise SystemExit(f"kiln {' '.join(words)} ended with {child.returncode}:\n{out}{err}")
    return out, err


def check(what, holds, said=""):
    print(f"{'ok' if holds else 'FAILED'}  {what}", flush=True)
    if not holds:
        raise SystemExit(said)


def files():
    """A server for the files of the folder, as one that models are fetched from."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    handler.log_message = lambda *_: None
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_address[1]


def ask(port, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        return reply.read().decode()


def a_model():
    out, _ = kiln("--version")
    check("the program starts", re.fullmatch(r"kiln \d+\.\d+\.\d+\n", out), out)
    kiln("synth", "tiny-llama", "Q8_0", "model.gguf")
    greedy = ("run", "model.gguf", "The quick brown fox", "--raw", "--temp", "0", "-n", "16", "--json")
    told = json.loads(kiln(*greedy)[0])
    check("a model writes on the CPU", len(told["tokens"]) == 16, told)
    own = os.path.join(os.path.dirname(os.path.abspath(script)), "../target/debug/kiln")
    if os.path.exists(own):
        here = json.loads(subprocess.run([own, *greedy], cwd=folder, env=environment, capture_output=True, check=True).stdout)
        ids = [[token["id"] for token in each["tokens"]] for each in (told, here)]
        check("and the same as on this machine", ids[0] == ids[1], ids)
    _, err = kiln("run", "no-such.gguf", "Hi", code=1)
    check("a missing file is told in a line", "no-such.gguf" in err, err)
    _, err = kiln("synth", "tiny-llama", "Q8_0", "model.gguf", code=1)
    check("a file is not overwritten", "is there already" in err, err)
    kiln("synth", "tiny-llama", "Q8_0", "model.gguf", "--force")
    out, err = kiln("doctor", code=1)
    check("memory and cores are known", "GiB" in out + err or "MiB" in out + err, out + err)


def a_store():
    url = f"http://127.0.0.1:{files()}/model.gguf"
    kiln("pull", url)
    listed = json.loads(kiln("list", "--json")[0])
    check("a model is fetched into the store", "model" in json.dumps(listed), listed)
    kiln("verify", "model")
    out, _ = kiln("run", "model", "Once", "--raw", "-n", "4", "--temp", "0")
    check("and runs by its name", out.strip(), out)
    kiln("rm", "model")
    check("and is removed", "model.gguf" not in json.dumps(json.loads(kiln("list", "--json")[0])))


def a_server():
    child = start("serve", "model.gguf", "--port", "0", "--ctx-size", "512", "--parallel", "4", stderr=subprocess.PIPE, text=True)
    try:
        port, said = None, []
        for line in child.stderr:
            said.append(line)
            found = re.match(r"listening on http://[^:]*:(\d+)", line)
            if found:
                port = int(found[1])
                break
        check("the server starts", port, "".join(said))
        threading.Thread(target=child.stderr.read, daemon=True).start()
        for _ in range(300):
            try:
                ask(port, "/health")
                break
            except OSError:
                time.sleep(0.2)
        answers = [None] * 4

        def one(i):
            answers[i] = json.loads(ask(port, "/v1/completions", {"prompt": f"Line {i}", "max_tokens": 8, "temperature": 0}))

        threads = [threading.Thread(target=one, args=(i,)) for i in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        check("it answers four at once", all(a and a["usage"]["completion_tokens"] == 8 for a in answers), answers)
        streamed = ask(port, "/v1/completions", {"prompt": "Line 0", "max_tokens": 8, "temperature": 0, "stream": True})
        texts = [json.loads(line[6:])["choices"][0]["text"] for line in streamed.splitlines() if line.startswith("data: {")]
        check("and in pieces", "".join(texts) == answers[0]["choices"][0]["text"], streamed)
        metrics = ask(port, "/metrics")
        taken = re.search(r"^process_resident_memory_bytes (\d+)", metrics, re.M)
        check("it tells what it takes", taken and int(taken[1]) > 1 << 20, metrics[:2000])
    finally:
        os.killpg(child.pid, signal.SIGTERM)
        child.wait(30)


def leftovers():
    left = [name for _, _, names in os.walk(folder) for name in names if name.startswith(".kiln-")]
    check("no incomplete file is left", not left, left)


try:
    a_model()
    a_store()
    a_server()
    leftovers()
finally:
    subprocess.run(["rm", "-rf", folder], check=False)
