"""Kiln replicas on Ray Serve: `serve run` with autoscaling, health checks, affinity of sessions, graceful redeploys, and another replica where one is lost.

    pip install "ray[serve]" aiohttp
    serve run deploy.ray.kiln_ray:app model=model.gguf replicas=2 flags="--parallel 16"

Requests with the same header `x-session-id` go to the same replica, which has the conversation in its cache.
"""
import asyncio
import ctypes
import json
import signal
import subprocess
import uuid

import aiohttp
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from starlette.responses import JSONResponse, Response, StreamingResponse

HOP_BY_HOP = {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "host", "content-length"}
STREAMS = ("text/event-stream", "application/x-ndjson")
LOST = {"error": {"message": "the replica was lost; send the request again", "type": "unavailable_error", "code": "replica_lost"}}
EVENT = {"text/event-stream": f"data: {json.dumps(LOST)}\n\n".encode(), "application/x-ndjson": f"{json.dumps(LOST)}\n".encode()}
# A replica that is lost is known to Ray after a second or two; meanwhile others are asked.
TRIES = 8


@serve.deployment(
    max_ongoing_requests=64, health_check_period_s=1, health_check_timeout_s=5, graceful_shutdown_wait_loop_s=0.5, graceful_shutdown_timeout_s=60,
    request_router_config=RequestRouterConfig(request_router_class="ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"),
)
class Kiln:
    """One server, which lives and ends with its actor."""

    def __init__(self, model, flags=(), kiln="kiln"):
        # The server ends with its actor, also where that is killed.
        ends_with_actor = lambda: ctypes.CDLL(None).prctl(1, signal.SIGTERM)
        command = [kiln, "serve", model, "--port", "0", "--json", "--late-headers", "30s", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=ends_with_actor)
        self.url = json.loads(self.process.stdout.readline())["url"]
        self.session = None

    def client(self):
        # A session belongs to the loop that it was made in.
        if self.session is None:
            self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, connect=5), auto_decompress=False)
        return self.session

    async def check_health(self):
        if self.process.poll() is not None:
            raise RuntimeError("kiln has ended")
        async with self.client().get(f"{self.url}/readyz") as reply:
            if reply.status != 200:
                raise RuntimeError("kiln is not ready")

    async def answer(self, method, path, headers, body):
        """Status, headers and a whole body; or none, and then the pieces of a stream. Raises where the server is lost before any of that."""
        try:
            reply = await self.client().request(method, self.url + path, headers=headers, data=body)
            back = {name: value for name, value in reply.headers.items() if name.lower() not in HOP_BY_HOP}
            kind = reply.headers.get("content-type", "").split(";")[0]
            whole = None if kind in STREAMS else await reply.read()
        except aiohttp.ClientError as why:
            raise ConnectionError(f"kiln was lost: {why}") from None
        try:
            yield reply.status, back, whole
            if whole is None:
                async for piece in reply.content.iter_any():
                    yield piece
        except (aiohttp.ClientError, asyncio.TimeoutError):
            yield EVENT[kind]  # Never `[DONE]`: half an answer is no answer.
        finally:
            reply.close()

    def __del__(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(50)
        except subprocess.TimeoutExpired:
            self.process.kill()


@serve.deployment(max_ongoing_requests=4096, graceful_shutdown_wait_loop_s=0.5, graceful_shutdown_timeout_s=60, ray_actor_options={"num_cpus": 0})
class Front:
    """Takes requests in and asks replicas: another one where the first is lost before it has answered."""

    def __init__(self, kiln):
        self.kiln = kiln

    async def __call__(self, request):
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        body, session = await request.body(), headers.get("x-session-id") or uuid.uuid4().hex
        for attempt in range(TRIES):
            # The hash of another name is another replica.
            name = session if attempt == 0 else f"{session} {attempt}"
            pieces = self.kiln.options(method_name="answer", stream=True, session_id=name).remote(request.method, path, headers, body)
            try:
                status, back, whole = await anext(pieces)
            except (RayError, ConnectionError, StopAsyncIteration):
                await asyncio.sleep(0.1 * 2**min(attempt, 4))
                continue
            # One that goes, or has lost its device, says so before it begins.
            if status == 503 and attempt + 1 < TRIES:
                pieces.cancel()
                await asyncio.sleep(0.1)
                continue
            if whole is not None:
                return Response(whole, status, back)
            return StreamingResponse(self.stream(pieces, back.get("content-type", "").split(";")[0]), status, back)
        return JSONResponse(LOST, 503, {"Retry-After": "1"})

    async def stream(self, pieces, kind):
        try:
            async for piece in pieces:
                yield piece
        except (RayError, ConnectionError):
            yield EVENT.get(kind, b"")
        finally:
            pieces.cancel()  # The client may have gone.


def app(arguments):
    """What `serve run` builds; `replicas=auto` scales between 1 and `most`."""
    replicas, flags = arguments.get("replicas", "1"), arguments.get("flags", "").split()
    if replicas == "auto":
        scaling = {"min_replicas": 1, "max_replicas": int(arguments.get("most", "4")), "target_ongoing_requests": 8, "upscale_delay_s": 5, "downscale_delay_s": 300}
        options = Kiln.options(autoscaling_config=scaling)
    else:
        options = Kiln.options(num_replicas=int(replicas))
    kiln = options.bind(arguments["model"], flags, arguments.get("kiln", "kiln"))
    return Front.options(num_replicas=int(arguments.get("fronts", "1"))).bind(kiln)
