"""Kiln replicas on Ray Serve: `serve run` with autoscaling, health checks, affinity of sessions and graceful redeploys.

    pip install "ray[serve]" aiohttp
    serve run deploy.ray.kiln_ray:app model=model.gguf replicas=2 flags="--parallel 16"

Requests with the same header `x-session-id` go to the same replica, which has the conversation in its cache.
"""
import asyncio
import ctypes
import json
import signal
import subprocess

import aiohttp
from ray import serve
from ray.serve.config import RequestRouterConfig
from starlette.responses import JSONResponse, Response, StreamingResponse

HOP_BY_HOP = {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "host", "content-length"}
STREAMS = ("text/event-stream", "application/x-ndjson")
LOST = json.dumps({"error": {"message": "the replica was lost; send the request again", "type": "unavailable_error", "code": "replica_lost"}})


@serve.deployment(
    max_ongoing_requests=64, health_check_period_s=1, health_check_timeout_s=5, graceful_shutdown_wait_loop_s=0.5, graceful_shutdown_timeout_s=60,
    request_router_config=RequestRouterConfig(request_router_class="ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"),
)
class Kiln:
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

    async def __call__(self, request):
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        target = f"{self.url}{request.url.path}" + (f"?{request.url.query}" if request.url.query else "")
        try:
            reply = await self.client().request(request.method, target, headers=headers, data=await request.body())
            back = {name: value for name, value in reply.headers.items() if name.lower() not in HOP_BY_HOP}
            if reply.headers.get("content-type", "").startswith(STREAMS):
                return StreamingResponse(self.pieces(reply), reply.status, back)
            return Response(await reply.read(), reply.status, back)
        except aiohttp.ClientError:
            return JSONResponse(json.loads(LOST), 503, {"Retry-After": "1"})

    async def pieces(self, reply):
        try:
            async for piece in reply.content.iter_any():
                yield piece
        except (aiohttp.ClientError, asyncio.TimeoutError):
            # Never `[DONE]`: half an answer is no answer.
            yield f"data: {LOST}\n\n".encode()
        finally:
            reply.close()

    def __del__(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(50)
        except subprocess.TimeoutExpired:
            self.process.kill()


def app(arguments):
    """What `serve run` builds; `replicas=auto` scales between 1 and `most`."""
    replicas, flags = arguments.get("replicas", "1"), arguments.get("flags", "").split()
    if replicas == "auto":
        scaling = {"min_replicas": 1, "max_replicas": int(arguments.get("most", "4")), "target_ongoing_requests": 8, "upscale_delay_s": 5, "downscale_delay_s": 300}
        options = Kiln.options(autoscaling_config=scaling)
    else:
        options = Kiln.options(num_replicas=int(replicas))
    return options.bind(arguments["model"], flags, arguments.get("kiln", "kiln"))
