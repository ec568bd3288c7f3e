#!/usr/bin/env python3
"""Predicts throughput, latency and cache hits of 1 to 1,000 Kiln replicas behind a router, so that a fleet can be sized before it is bought.

A discrete-event simulation. A replica is its measured curve: the time of a step by the number of sequences in it, the speed of prefill, what a
token of context costs, room for the cache. Between two events (a prompt is processed, a sequence ends, a request comes) the sequences of a replica
do not change, so all their steps are passed over at once: a run costs some events for each request and not one for each step. Needs python3 alone.

    kiln bench model.gguf --curve mine.json        # on the machine that will serve, with the flags that it will have
    deploy/simulate.py --curve mine.json           # hits, time to the first token and inter-token latency, by router and number of replicas
    deploy/simulate.py --work agent --replicas 1,8,64 --policy rr,prefix --load 0.8
    deploy/simulate.py --capacity                  # the highest load with p95 of the time to the first token under --slo
    deploy/simulate.py --fail 0.05                 # this share of replicas is killed in the middle and comes back empty
    deploy/simulate.py --plot fleet.svg            # the same as a picture
    deploy/simulate.py --check                     # the simulation against what can be computed by hand

What it leaves out: the router's own time, the network, loading, preemption, clients that leave.
"""
import argparse, heapq, json, math, random, sys, time
from collections import OrderedDict, deque
from statistics import NormalDist

# Measured: llama-8b Q4_K_M on an H200 (docs/performance.md): 1 to 96 sequences, pp2048, tg behind 32,000 tokens.
CURVES = {
    "h200-8b": dict(step_ms={1: 2.06, 2: 3.40, 4: 3.12, 8: 3.17, 16: 3.28, 32: 4.19, 64: 6.47, 96: 9.41},
                    prefill=16615, context_ns=37, chunk=512, slots=64, cache_tokens=900_000),
    # Not measured: the same divided by the memory bandwidths (4.8 / 0.96 TB/s), 16 GB for the cache at 131 kB a token.
    "24gb-8b": dict(step_ms={1: 10.3, 2: 17.0, 4: 15.6, 8: 15.9, 16: 16.4, 32: 21.0, 64: 32.4}, prefill=3300, context_ns=185, chunk=256, slots=32, cache_tokens=120_000),
}
# What is published of real traces, and a generator with the same means: system prompts of `system` tokens, of which `groups` exist with
# popularity 1/rank; `turns` requests a session on average; each adds `user` tokens (log-normal, `spread`) and an answer of `out`; `think` seconds between;
# `breaks`: the share of requests whose history is new to any cache (compacted, edited, expired), so that no router can find more than the trace did.
WORKS = {
    # Azure 2023 conversation (Splitwise): median prompt 1,020, median output 129; means 1,155 and 211. Sessions are not in the trace: turns are a guess.
    "chat": dict(system=256, groups=64, turns=3, user=160, spread=1.2, out=211, think=10, cv=1.6, breaks=0.0, seconds=300, slo=0.5),
    # Mooncake FAST'25 conversation: 12,035 in, 343 out, an unbounded cache finds 37.4 % of the tokens, arrivals with cv 3.0.
    "long": dict(system=512, groups=1, turns=1.5, user=7530, spread=1.1, out=343, think=40, cv=3.0, breaks=0.0, seconds=1800, slo=10),
    # GitHub Copilot agents, June 2026: 30.9 calls a session, 67,800 in, 527 out, 85.7 % of the tokens came from a cache.
    "agent": dict(system=16000, groups=8, turns=31, user=1170, spread=1.0, out=527, think=6, cv=1.6, breaks=0.17, seconds=3600, slo=10),
}
PAGE = 64  # beginnings are shared in whole pages
NORMAL = NormalDist()


def between(x, xs, ys):
    """The value at x on straight lines through the points, level outside of them."""
    if x <= xs[0]:
        return float(ys[0])
    for (a, b), (low, high) in zip(zip(xs, xs[1:]), zip(ys, ys[1:])):
        if x <= b:
            return low + (high - low) * (x - a) / (b - a)
    return float(ys[-1])


def percentiles(values, shares):
    """Those of a list, on straight lines between its sorted values."""
    values = sorted(values)
    return [at(values, share / 100 * (len(values) - 1)) for share in shares]


def at(values, place):
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


class Curve:
    def __init__(self, d):
        self.n = sorted(int(k) for k in d["step_ms"])
        self.t = [d["step_ms"][k] if k in d["step_ms"] else d["step_ms"][str(k)] for k in self.n]
        self.table = [0.0] + [between(i, self.n, self.t) / 1e3 for i in range(1, 4 * self.n[-1])]
        self.prefill, self.ctx = float(d["prefill"]), d["context_ns"] * 1e-9
        self.chunk, self.slots, self.room = int(d["chunk"]), int(d["slots"]), int(d["cache_tokens"])

    def step(self, n, context):
        return self.table[n] + context * self.ctx if n else 0.0


class Session:
    __slots__ = ("id", "group", "left", "length", "home", "draws")


class Request:
    __slots__ = ("s", "came", "prompt", "out", "hit", "first", "left", "ends", "tries", "new", "takes")


class Replica:
    __slots__ = ("c", "now", "steps", "decoding", "context", "queue", "reading", "cache", "cached", "held", "version", "up")

    def __init__(self, curve):
        self.c, self.now, self.version, self.up = curve, 0.0, 0, True
        self.empty()

    def empty(self):
        self.steps, self.decoding, self.context, self.reading = 0.0, [], 0, None
        self.queue = deque()
        self.cache, self.cached, self.held = OrderedDict(), 0, 0

    def load(self):
        return len(self.decoding) + len(self.queue) + (self.reading is not None)

    def rate(self):
        """Seconds of a step now, and tokens of the prompt that is processed in it."""
        t = self.c.step(len(self.decoding), self.context)
        if self.reading is None:
            return t, 0
        return t + self.c.chunk / self.c.prefill + self.c.ctx * self.reading.prompt / 4, self.c.chunk

    def advance(self, now):
        dt, self.now = now - self.now, now
        if dt <= 0 or (not self.decoding and self.reading is None):
            return
        t, piece = self.rate()
        k = dt / t
        if self.decoding:
            self.steps += k
        if self.reading is not None:
            self.reading.left -= k * piece

    def next(self):
        if not self.decoding and self.reading is None:
            return math.inf
        t, piece = self.rate()
        k = math.inf
        if self.decoding:
            k = self.decoding[0][0] - self.steps
        if self.reading is not None:
            k = min(k, self.reading.left / piece)
        return self.now + max(k, 0.0) * t

    def remember(self, key, tokens):
        self.cached += tokens - self.cache.pop(key, 0)
        self.cache[key] = tokens
        self.squeeze()

    def squeeze(self):
        while self.cached + self.held > self.c.room and len(self.cache) > 1:
            self.cached -= self.cache.popitem(last=False)[1]

    def found(self, r, system):
        hit = 0
        if r.new:
            self.cached -= self.cache.pop(r.s.id, 0)
        if ("g", r.s.group) in self.cache:
            self.cache.move_to_end(("g", r.s.group))
            hit = system
            if r.s.id in self.cache:
                self.cache.move_to_end(r.s.id)
                hit += self.cache[r.s.id]
        return min(hit, r.prompt - 1) // PAGE * PAGE


def jump(key, n):
    """Jump consistent hash: 1/n of the keys move when a replica is added."""
    b, j = -1, 0
    while j < n:
        b = j
        key = (key * 2862933555777941757 + 1) & 0xFFFFFFFFFFFFFFFF
        j = int((b + 1) * ((1 << 31) / ((key >> 33) + 1)))
    return b


class Simulation:
    def __init__(self, curve, work, n, policy, load, seconds, seed=1, fail=0.0, most=400_000):
        self.c, self.w, self.policy, self.seed = curve, work, policy, seed
        self.rnd, self.coming = random.Random(seed), random.Random(seed + 1)  # of the router and the failures; of the arrivals
        self.rs = [Replica(curve) for _ in range(n)]
        self.system = work["system"]
        weights = [1 / (i + 1) for i in range(work["groups"])]
        total = sum(weights)
        self.groups, acc = [], 0.0
        for x in weights:
            acc += x / total
            self.groups.append(acc)
        self.turn, self.homes = 0, {}
        self.heap, self.count, self.done, self.asked = [], 0, [], []
        self.outstanding, self.retried, self.trace = 0, 0, []
        # A load of 1: what a replica could serve at most if nothing were ever found in a cache.
        mean_prompt = self.mean_prompt()
        full = max(1, min(curve.slots, curve.room // int(mean_prompt + work["out"])))
        one = mean_prompt / curve.prefill + work["out"] * curve.step(full, full * mean_prompt) / full
        self.rate = load * n / one / work["turns"]  # sessions a second
        self.seconds = min(seconds, most / (self.rate * work["turns"])) if most else seconds
        self.fail = fail

    def mean_prompt(self):
        w, mean_user = self.w, self.w["user"]
        # turns are geometric: a turn's index has mean turns - 1
        return self.system + mean_user + (w["turns"] - 1) * (mean_user + w["out"])

    def uniform(self, s):
        """The next number of a session: it depends on seed, session and how many came before, so that all policies meet the same requests."""
        s.draws += 1
        x = (self.seed * 0x9E3779B97F4A7C15 + s.id * 0xBF58476D1CE4E5B9 + s.draws * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        return (((x ^ (x >> 31)) >> 11) + 0.5) / (1 << 53)

    def exponential(self, s, mean):
        return -mean * math.log(self.uniform(s))

    def lognormal(self, s, mean):
        spread = self.w["spread"]
        return max(1, int(mean * math.exp(NORMAL.inv_cdf(self.uniform(s)) * spread - spread * spread / 2)))

    def push(self, t, kind, x):
        self.count += 1
        heapq.heappush(self.heap, (t, self.count, kind, x))

    def session(self, t):
        s = Session()
        self.turn += 1
        s.id, s.length, s.home, s.draws = self.turn, 0, None, 0
        u = self.uniform(s)
        s.group = next(i for i, x in enumerate(self.groups) if u <= x or i == len(self.groups) - 1)
        p = 1 / self.w["turns"]
        s.left = 1 if p >= 1 else max(1, math.ceil(math.log(self.uniform(s)) / math.log(1 - p)))
        self.push(t, "ask", s)

    def choose(self, r):
        rs, n, k = self.rs, len(self.rs), self.policy
        if k == "rr":
            for _ in range(n):
                self.turn_rr = (getattr(self, "turn_rr", -1) + 1) % n
                if rs[self.turn_rr].up:
                    return self.turn_rr
        two = lambda: min((self.rnd.randrange(n) for _ in range(2)), key=lambda i: rs[i].load() if rs[i].up else 1 << 30)
        if k == "two":
            i = two()
            return i if rs[i].up else next(j for j in range(n) if rs[j].up)
        bound = max(4.0, 1.25 * (self.outstanding + 1) / n)
        if k == "hash":  # by session, no more than 1.25 of the mean load
            for salt in range(8):
                i = jump((r.s.id * 0x9E3779B97F4A7C15 + salt * 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF, n)
                if rs[i].up and rs[i].load() <= bound:
                    return i
            return next(j for j in [two(), two(), *range(n)] if rs[j].up)
        if k == "prefix":  # where the longest beginning lies, unless that one is overloaded: what smg's cache_aware and the endpoint picker do
            i = r.s.home
            if i is not None and rs[i].up and rs[i].load() <= bound * 2:
                return i
            homes = self.homes.setdefault(r.s.group, [])
            for i in (self.rnd.choice(homes) for _ in range(min(2, len(homes)))):
                if rs[i].up and rs[i].load() <= bound:
                    return i
            i = two()
            if not rs[i].up:
                i = next(j for j in range(n) if rs[j].up)
            if i not in homes[-256:]:
                homes.append(i)
            return i
        raise SystemExit(f"no such policy: {k}")

    def place(self, now, r):
        i = self.choose(r)
        self.trace.append((r, i))
        rep = self.rs[i]
        rep.advance(now)
        r.s.home = i
        self.outstanding += 1
        rep.queue.append(r)
        self.go_on(rep)

    def go_on(self, rep):
        while rep.reading is None and rep.queue and len(rep.decoding) < rep.c.slots:
            r = rep.queue[0]
            if rep.decoding and rep.held + r.prompt + r.out > rep.c.room:
                break  # waits until pages are free
            rep.queue.popleft()
            r.hit = rep.found(r, self.system)
            r.left = r.prompt - r.hit
            r.takes = r.left + r.out
            rep.held += r.takes
            rep.squeeze()
            rep.reading = r
        rep.version += 1
        t = rep.next()
        if t < math.inf:
            self.push(t, "event", (rep, rep.version))

    def event(self, now, rep):
        rep.advance(now)
        if rep.reading is not None and rep.reading.left <= 1e-6:
            r, rep.reading = rep.reading, None
            r.first = now
            heapq.heappush(rep.decoding, (rep.steps + r.out, r.s.id, r))
            rep.context += r.prompt + r.out // 2
            rep.remember(("g", r.s.group), self.system)
        while rep.decoding and rep.decoding[0][0] <= rep.steps + 1e-6:
            _, _, r = heapq.heappop(rep.decoding)
            rep.context -= r.prompt + r.out // 2
            rep.held -= r.takes
            self.outstanding -= 1
            r.ends = now
            self.done.append(r)
            r.s.length = r.prompt - self.system + r.out
            rep.remember(r.s.id, r.s.length)
            r.s.left -= 1
            if r.s.left > 0:
                self.push(now + self.exponential(r.s, self.w["think"]), "ask", r.s)
        self.go_on(rep)

    def run(self):
        shape = 1 / self.w["cv"] ** 2
        t = 0.0
        while t < self.seconds:
            t += self.coming.gammavariate(shape, 1 / (self.rate * shape))
            self.push(t, "session", None)
        if self.fail:
            self.push(self.seconds / 2, "kill", None)
        while self.heap:
            now, _, kind, x = heapq.heappop(self.heap)
            if now > self.seconds:
                break
            if kind == "event":
                if x[1] == x[0].version and x[0].up:
                    self.event(now, x[0])
            elif kind == "session":
                self.session(now)
            elif kind == "ask":
                r = Request()
                r.s, r.came, r.first, r.ends, r.tries = x, now, None, None, 0
                r.new = self.uniform(x) < self.w["breaks"]
                r.prompt = self.system + x.length + self.lognormal(x, self.w["user"])
                r.out = max(1, int(self.exponential(x, self.w["out"])))
                self.asked.append(r)
                self.place(now, r)
            elif kind == "kill":
                dead = self.rnd.sample(self.rs, max(1, int(self.fail * len(self.rs)))) if len(self.rs) > 1 else []
                again = []
                for rep in dead:
                    again += [x[2] for x in rep.decoding] + list(rep.queue) + ([rep.reading] if rep.reading else [])
                    rep.up = False
                    rep.version += 1
                    rep.empty()
                    self.push(now + 30, "back", rep)
                self.outstanding -= len(again)
                self.retried += len(again)
                for r in again:  # whoever had begun to write is asked for again, which a client sees as an error or a long pause
                    r.tries += 1
                    self.place(now, r)
            elif kind == "back":
                x.up, x.now = True, now
        return self.report()

    def report(self):
        warm = self.seconds / 3
        d = [r for r in self.done if r.came > warm]
        if not d:
            return None
        span = self.seconds - warm
        # Those who still wait count with the time that they have waited: an overloaded fleet must not look good by what it has not answered.
        ttft = [(r.first or self.seconds) - r.came for r in self.asked if r.came > warm]
        tpot = [(r.ends - r.first) / r.out * 1e3 for r in d]
        p = sum(r.prompt for r in d)
        ends = sum(1 for r in self.done if r.ends > warm)
        half = [r for r in d if self.fail and self.seconds / 2 <= r.came <= self.seconds / 2 + 30]
        return dict(requests=len(d), per_s=ends / span, out_s=sum(r.out for r in self.done if r.ends > warm) / span,
                    prompt=p / len(d), out=sum(r.out for r in d) / len(d), hit=100 * sum(r.hit for r in d) / p,
                    ttft=percentiles(ttft, (50, 95, 99)), tpot=percentiles(tpot, (50, 99)),
                    waiting=self.outstanding / len(self.rs),
                    retried=self.retried, dip=(100 * sum(r.hit for r in half) / max(1, sum(r.prompt for r in half))) if half else None, seconds=self.seconds)


def line(n, policy, load, r, wall):
    if r is None:
        return f"| {n} | {policy} | {load:.2f} | (nothing ended) |"
    q = r["ttft"]
    more = f" | {r['retried']} | {r['dip']:.1f}" if r["dip"] is not None else ""
    return (f"| {n:,} | {policy} | {load:.2f} | {r['per_s']:,.1f} | {r['out_s']:,.0f} | {r['hit']:.1f} | {q[0]:.2f} / {q[1]:.2f} / {q[2]:.2f} | "
            f"{r['tpot'][0]:.1f} / {r['tpot'][1]:.1f} | {r['waiting']:.1f}{more} |")


HEAD = ("| replicas | policy | load | requests/s | tokens/s written | cache hits % | first token s p50 / p95 / p99 | ms a token p50 / p99 | in a replica at the end |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |")


def capacity(curve, work, n, policy, slo, seconds, seed):
    low, high = 0.0, 0.5
    def good(x):
        r = Simulation(curve, work, n, policy, x, seconds, seed, most=150_000).run()
        return r is not None and r["ttft"][1] <= slo
    while good(high) and high < 8:
        low, high = high, high * 2
    for _ in range(5):
        mid = (low + high) / 2
        low, high = (mid, high) if good(mid) else (low, mid)
    return low


def check():
    """A lone replica with known answers."""
    c = Curve(dict(step_ms={1: 10, 2: 10}, prefill=1000, context_ns=0, chunk=100, slots=2, cache_tokens=10**9))
    s = Simulation(c, dict(system=64, groups=1, turns=1, user=936, spread=0, out=1, think=1, cv=1, breaks=0.0), 1, "rr", 0.01, 4000, most=0)
    s.exponential = lambda *_: 50.0
    r = s.run()
    assert r["ttft"][0] == min(r["ttft"]) or r["ttft"][0] >= 0.93, r
    # 1,000 tokens at 1,000 a second, less the page of 64 that was found: 0.936 s; 50 tokens of 10 ms.
    assert abs(r["ttft"][0] - 0.936) < 0.01, r["ttft"]
    assert abs(r["tpot"][0] - 10) < 0.2, r["tpot"]
    assert abs(r["hit"] - 6.4) < 0.1, r["hit"]
    # One session that goes on: all but what is new is found, and only by who holds it.
    c = Curve(CURVES["h200-8b"])
    w = dict(WORKS["agent"], cv=1.0)
    one = Simulation(c, w, 32, "prefix", 0.8, 3600, most=20_000).run()
    rr = Simulation(c, w, 32, "rr", 0.8, 3600, most=20_000).run()
    # By hand: 98.3 % of an agent's tokens are old, but for 17 % of the requests only the system prompt is (23.6 %): 85.6 %.
    assert 83.5 < one["hit"] < 87.5 and rr["hit"] < one["hit"] - 20, (one["hit"], rr["hit"])
    assert abs(one["prompt"] / 67800 - 1) < 0.15 and abs(one["out"] / 527 - 1) < 0.05, (one["prompt"], one["out"])
    keys = [jump(i * 2654435761, 10) for i in range(10000)]
    moved = sum(a != jump(i * 2654435761, 11) for i, a in enumerate(keys))
    assert 700 < moved < 1150 and max(keys) == 9, moved
    print("checked: times of a lone replica, hits by policy, keys that move:", moved / 10000)


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--curve", default="h200-8b")
    a.add_argument("--work", default="chat,long,agent")
    a.add_argument("--replicas", default="1,8,64,1000")
    a.add_argument("--policy", default="rr,two,hash,prefix")
    a.add_argument("--load", default="0.8")
    a.add_argument("--seconds", type=float, help="simulated seconds; the first third is not counted")
    a.add_argument("--most", type=int, default=300_000, help="requests of a run at most; its seconds are cut for it")
    a.add_argument("--seed", type=int, default=1)
    a.add_argument("--fail", type=float, default=0.0)
    a.add_argument("--slo", type=float, help="seconds to the first token that 95 %% must keep to; unless given, 0.5 for chat and 10 for the others")
    a.add_argument("--capacity", action="store_true")
    a.add_argument("--check", action="store_true")
    a.add_argument("--plot", metavar="FILE.svg", help="draw hits and p95 of the first token by the number of replicas")
    a.add_argument("--verbose", action="store_true")
    o = a.parse_args()
    if o.check:
        return check()
    curve, rows = Curve(CURVES[o.curve] if o.curve in CURVES else json.load(open(o.curve))), []
    for name in o.work.split(","):
        w = WORKS[name]
        if o.capacity:
            print(f"\n{name}, {o.curve}: the highest load with p95 of the first token under {o.slo or w['slo']} s\n\n| replicas | " + " | ".join(o.policy.split(",")) + " |")
            for n in map(int, o.replicas.split(",")):
                print(f"| {n} | " + " | ".join(f"{capacity(curve, w, n, p, o.slo or w['slo'], o.seconds or w['seconds'], o.seed):.2f}" for p in o.policy.split(",")) + " |", flush=True)
            continue
        print(f"\n{name}, {o.curve}\n\n{HEAD}", flush=True)
        for n in map(int, o.replicas.split(",")):
            for load in map(float, o.load.split(",")):
                for p in o.policy.split(","):
                    t = time.time()
                    s = Simulation(curve, w, n, p, load, o.seconds or w["seconds"], o.seed, o.fail, o.most)
                    r = s.run()
                    print(line(n, p, load, r, time.time() - t), flush=True)
                    rows.append((name, n, p, r))
                    if r and o.verbose:
                        print(f"  {name} {n} {p}: prompt {r['prompt']:.0f} out {r['out']:.0f} requests {r['requests']} simulated {r['seconds']:.0f} s in {time.time() - t:.0f} s", file=sys.stderr)
    if o.plot:
        with open(o.plot, "w", encoding="utf-8") as file:
            file.write(picture([row for row in rows if row[3]]))


COLOURS = {"rr": "#b04a3a", "two": "#c99a2e", "hash": "#3a7ab0", "prefix": "#3a8f5a"}


def picture(rows):
    """Hits and p95 of the first token by the number of replicas, a line for each router, a row of panels for each kind of work."""
    works = list(dict.fromkeys(row[0] for row in rows))
    wide, high, pad = 330, 190, 52
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * wide + 40} {high * len(works) + 40}" font-family="sans-serif" font-size="11">']
    for at, (policy, colour) in enumerate(COLOURS.items()):
        out.append(f'<text x="{pad + at * 80}" y="16" fill="{colour}">{policy}</text>')
    for down, work in enumerate(works):
        for right, (title, value) in enumerate((("cache hits, %", lambda r: r["hit"]), ("first token p95, s", lambda r: r["ttft"][1]))):
            mine = [(n, policy, value(r)) for w, n, policy, r in rows if w == work]
            most = 100.0 if right == 0 else max(v for *_, v in mine) * 1.05 or 1.0
            span = max(math.log(max(n for n, *_ in mine)), 1e-9)
            left, top, width, height = pad + right * wide, 44 + down * high, wide - pad - 20, high - 62
            out.append(f'<text x="{left}" y="{top - 8}">{work}: {title}</text>')
            out.append(f'<path d="M{left} {top}V{top + height}H{left + width}" fill="none" stroke="#888"/>')
            out += [f'<text x="{left - 6}" y="{y}" text-anchor="end">{label}</text>' for y, label in ((top + 8, f"{most:.3g}"), (top + height, "0"))]
            for n in sorted({n for n, *_ in mine}):
                out.append(f'<text x="{left + math.log(n) / span * width:.1f}" y="{top + height + 14}" text-anchor="middle">{n:,}</text>')
            for policy in dict.fromkeys(p for _, p, _ in mine):
                points = " ".join(f"{left + math.log(n) / span * width:.1f},{top + height - v / most * height:.1f}" for n, p, v in sorted(mine) if p == policy)
                out.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[policy]}" stroke-width="2"/>')
    return "\n".join([*out, "</svg>", ""])


if __name__ == "__main__":
    main()
