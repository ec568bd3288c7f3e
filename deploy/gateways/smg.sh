#!/bin/sh
# smg (Shepherd Model Gateway) before several Kiln servers: a router that knows which server holds which beginning of a conversation.
#
#   pip install smg       # alone: sglang-router in the same environment overwrites the command `smg`
#   kiln serve model.gguf --port 18101 --late-headers 30s       # and the same with 18102
#   deploy/gateways/smg.sh http://127.0.0.1:18101 http://127.0.0.1:18102
#
# Both addresses are named, since smg listens everywhere unless it is told otherwise, and without any key. Servers with keys: let clients send
# theirs, and do not register a key for a worker, which would let in whoever has none.
#
# A server that is lost is known after a second; until then its retries go to the same one, so they must last longer than that.
set -eu
exec "${SMG:-smg}" launch --worker-urls "$@" --policy cache_aware --host 127.0.0.1 --port "${PORT:-30000}" \
  --prometheus-host 127.0.0.1 --prometheus-port "${METRICS_PORT:-29000}" \
  --health-check-endpoint /readyz --health-check-interval-secs 1 --health-failure-threshold 1 --health-success-threshold 1 \
  --retry-max-retries 8 --retry-initial-backoff-ms 200 --balance-abs-threshold 8
