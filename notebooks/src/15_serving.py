# %% [markdown]
# # 15 · Serving
#
# So far all requests were there when the engine began. A server's requests come one by one, over a network, at moments
# that nobody chooses. Each client waits for its own answer, and tokens a second mean nothing to it. It feels two times:
# how long until the first word ([TTFT](../docs/glossary.md#ttft)), and how long from one word to the next
# ([TPOT](../docs/glossary.md#tpot)).
#
# **You will be able to** measure both against a real server; say at which rate of requests waiting runs away, and why it
# begins to hurt long before; and see when somebody else's measurement hides it.
#
# About 35 minutes. Runs in about a minute on two CPU cores; a GPU is used when there is one.

# %%
import asyncio
import json
import random
import time
from dataclasses import dataclass
from itertools import cycle, islice, pairwise

from minipaged import LLM, load_model
from minipaged.attention import get_backend
from minipaged.cpu.accelerate import accelerate
from coursekit.figures import show
from coursekit.figures.serving import latency_against_rate
from coursekit.lesson import compare, pick_device, say, show_source, table
from coursekit.server import run, serving
from coursekit.workloads import load_mix

# %% [markdown]
# ## The question
#
# Two servers with the same model, SmolLM2, and the same 64 MiB for keys and values. One reserves a strip of 512 tokens
# for each request; the other hands out blocks of 16.

# %%
device, half = pick_device()
loaded = load_model("smollm2-135m", dtype=half, device=device)
loaded, _ = accelerate(loaded, get_backend("auto", device))


def make_llm(block_size):
    settings = {"kv_memory": "64MiB", "max_model_len": 512, "enable_prefix_caching": False}
    return LLM(loaded, device=device, block_size=block_size, **settings)


servers = {"strips": make_llm(512), "blocks": make_llm(16)}
table(
    ["", "strips or blocks", "tokens each"],
    [
        (name, llm.engine.pool.num_blocks, llm.engine.cache_config.block_size)
        for name, llm in servers.items()
    ],
)

# %% [markdown]
# Clients ask short questions, and their answers have 35 tokens on average. More and more of them come. **At which rate
# does each server leave its clients waiting?**
#
# Clients do not agree on a timetable. If they come independently of each other, the gaps between them are random:
# mostly short, now and then long. These are [**Poisson arrivals**](../docs/glossary.md#poisson-arrivals). Only their
# rate is given, and a gap is drawn with `expovariate`.

# %%
def arrivals(rate, number, seed=1):
    """Moments, in seconds, at which `number` clients come, `rate` a second on average."""
    source, now, moments = random.Random(seed), 0.0, []
    for _ in range(number):
        now += source.expovariate(rate)
        moments.append(now)
    return moments


marks = ["."] * 60
for moment in arrivals(1, 20):
    marks[min(int(2 * moment), 59)] = "|"
print("20 clients, one a second on average, a character for half a second:")
print("".join(marks))

# %% [markdown]
# ## Your prediction
#
# 1. Clients come one a second on average. What percentage of the gaps is shorter than half a second?
# 2. All clients come at once. The blocks run several times as many of them together as the strips do. How many times as
#    many tokens a second does that server give?

# %%
my_short_gaps = None  # your guess, in percent
my_times_as_fast = None  # your guess

# %%
moments = [0.0, *arrivals(1, 10_000)]
gaps = [later - earlier for earlier, later in pairwise(moments)]
short_gaps = round(100 * sum(gap < 0.5 for gap in gaps) / len(gaps))
wrong_gaps = {
    50: "that would be so if gaps were as often above their mean as below; but a few long ones "
    "make up for many short ones",
    0: "by a timetable; these clients have none",
}
compare(my_short_gaps, short_gaps, "percent of the gaps", wrong_gaps)
assert 0.95 < sum(gaps) / len(gaps) < 1.05 and 35 < short_gaps < 45

# %% [markdown]
# Random clients come in bunches. Keep that in mind: a server with time to spare on average has none while a bunch is
# there.
#
# ## Measure
#
# ### A client
#
# It sends a request in OpenAI's form, asks for a stream, and notes the moment of each event. No library is needed.


# %%
@dataclass
class Seen:
    """What one client saw, in seconds since the measurement began."""

    sent: float
    events: list[float]

    @property
    def ttft(self):
        return self.events[0] - self.sent

    @property
    def tpot(self):
        return (self.events[-1] - self.events[0]) / max(len(self.events) - 1, 1)


# %%
async def ask(port, request, begin=0.0):
    """Send one request, read its stream to the end."""
    body = {"prompt": request.prompt_token_ids, "max_tokens": request.max_tokens}
    body = json.dumps(body | {"temperature": 0, "ignore_eos": True, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    sent = time.perf_counter() - begin
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    lines = [(line, time.perf_counter() - begin) async for line in reader]
    writer.close()
    return Seen(sent, [moment for line, moment in lines if line.startswith(b"data: {")])


# %%
async def clients(port, requests, moments):
    """Each client comes at its moment, whether or not others have been answered."""
    begin = time.perf_counter()

    async def one(request, moment):
        await asyncio.sleep(begin + moment - time.perf_counter())
        return await ask(port, request, begin)

    return await asyncio.gather(*map(one, requests, moments))


# %% [markdown]
# ### All at once
#
# 64 clients at the same moment. That is what a server can do at most, its *capacity*.

# %%
mix = load_mix("instruct64")
num_tokens = sum(request.max_tokens for request in mix)
assert len(mix) == 64 and round(num_tokens / len(mix)) == 35  # as said above


def capacity_of(port):
    run(clients(port, mix[:8], [0.0] * 8))  # to warm up
    seen = run(clients(port, mix, [0.0] * len(mix)))
    return len(mix) / max(client.events[-1] for client in seen)


capacity, most = {}, {}
for name, llm in servers.items():
    with serving(llm) as port:
        capacity[name] = capacity_of(port)
    most[name] = max(record.running for record in llm.trace)
    llm.trace.clear()
print("most that ran at once:", most)
assert most["strips"] == 5 and most["blocks"] > 6 * most["strips"]

# %% tags=["nbval-ignore-output"]
table(
    ["", "requests a second", "tokens a second"],
    [(name, f"{c:.1f}", f"{c * num_tokens / len(mix):.0f}") for name, c in capacity.items()],
)
wrong_times = {
    round(most["blocks"] / most["strips"]): "as if a step cost the same for five requests as for "
    "all; on a CPU it soon costs more for each, on a GPU much later",
    1: "as if a step cost five times as much for five requests; they share the weights",
}
times = round(capacity["blocks"] / capacity["strips"], 1)
compare(my_times_as_fast, times, "times as many tokens a second", wrong_times)

# %% [markdown]
# ### At rising rates
#
# Now let them come at random, in parts and multiples of what the *strips* can do at most. 40 clients at each rate.

# %%
SHARES, NUM = (0.5, 0.9, 1.3, 2.0), 40
rates = [share * capacity["strips"] for share in SHARES]
found = {name: [] for name in servers}
for name, llm in servers.items():
    with serving(llm) as port:
        run(clients(port, mix[:8], [0.0] * 8))
        for rate in rates:
            requests = list(islice(cycle(mix), NUM))
            found[name].append(run(clients(port, requests, arrivals(rate, NUM))))


def mean(values):
    values = list(values)
    return sum(values) / len(values)


# %% tags=["nbval-ignore-output"]
rows = []
for index, rate in enumerate(rates):
    ttft = [mean(c.ttft for c in found[name][index]) for name in servers]
    tpot = [mean(c.tpot for c in found[name][index]) for name in servers]
    rows.append((f"{rate:.1f}", *(f"{1000 * seconds:.0f}" for seconds in (*ttft, *tpot))))
table(
    ["requests a second", "TTFT, strips, ms", "TTFT, blocks", "TPOT, strips", "TPOT, blocks"], rows
)

# %% [markdown]
# ## The picture

# %%
curves = {
    name: [(rate, mean(c.ttft for c in seen)) for rate, seen in zip(rates, runs, strict=True)]
    for name, runs in found.items()
}
show(
    latency_against_rate(curves, capacity, y_label="mean time to first token (s)"),
    "Mean time to first token against the rate of requests, with a triangle at each server's "
    "capacity. Strips: the line rises steeply around their capacity. Blocks: it stays near the "
    "axis, for their capacity is farther to the right.",
)

# %% [markdown]
# ## Why
#
# **Why does waiting begin before capacity is reached?** Because clients come in bunches. Five strips serve five clients;
# the sixth of a bunch waits for somebody's last word. Beyond capacity there is no "on average" any more: each second
# brings more than the server can do, the queue only grows, and the numbers above would be larger with more clients.
#
# **How many strips would be enough?** [Little's law](https://doi.org/10.1287/opre.9.3.383) (1961) holds for every system
# that loses nobody: *clients inside = rate × time inside*. It can be checked on what the clients saw. Count those who were
# inside at each moment; or multiply.

# %%
seen = found["blocks"][1]
span = max(client.events[-1] for client in seen)
by_law = len(seen) / span * mean(client.events[-1] - client.sent for client in seen)
ticks = [span * (i + 0.5) / 5000 for i in range(5000)]
counted = mean(sum(c.sent <= t < c.events[-1] for c in seen) for t in ticks)
print("rate times time and counting agree:", abs(by_law / counted - 1) < 0.02)
assert abs(by_law / counted - 1) < 0.02

# %% tags=["nbval-ignore-output"]
say(f"""
    At {rates[1]:.1f} requests a second {by_law:.1f} clients were inside the server with blocks, on
    average. Whoever has {most["strips"]} strips makes those beyond {most["strips"]} wait outside.
""")

# %% [markdown]
# So a limit on how many run at once is a limit on the rate: five strips, and each request inside for a second, are five
# requests a second. Blocks raise the first number, and that is all that they do. What it buys ends where the processor
# is full.
#
# **What do clients pay for it?** Look at TPOT: with more requests in a step, each step takes longer, and each client
# gets its words a little later. Servers are therefore judged by their [goodput](../docs/glossary.md#goodput): requests a second for which both
# times stay within a promise ([DistServe](https://arxiv.org/abs/2401.09670), section 2). `vllm bench serve` reports TTFT,
# TPOT and goodput
# ([its page](https://docs.vllm.ai/en/v0.13.0/api/vllm/benchmarks/serve/)).
#
# ## The code as it stands
#
# One thread steps the engine. Everybody else leaves functions for it, which it runs between two steps; so nobody needs
# a lock, and no client holds up a step.

# %%
from minipaged.serve.engine_thread import EngineThread

show_source(EngineThread.submit, EngineThread.close, EngineThread.run)

# %% [markdown]
# `submit` refuses what is beyond `max_requests`, with status 429. A queue without an end would not help: under overload
# everybody in it waits longer than anybody is willing to. Better a quick no for some than a late yes for all.
#
# ## What must hold
#
# | | if it does not |
# |:--|:--|
# | a client that leaves gives its blocks back | a server full of answers that nobody reads |
# | what is beyond the limit is refused at once | everybody waits longer than anybody is willing to |
# | no client, however slow, holds up a step | one bad connection stops all others |
# | a step that fails is told to those who wait | clients that wait for ever |
#
# The first can be seen. `close` is called when an answer is complete, and when its client is gone:

# %%
async def hang_up(port):
    """Ask for 400 tokens, leave after the first."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True})
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    await reader.readuntil(b"data: ")
    held = pool.num_blocks - pool.num_free
    writer.close()
    return held


llm = servers["blocks"]
pool = llm.engine.pool
with serving(llm) as port:
    held = run(hang_up(port))
    while llm.engine.requests:  # the server needs a moment to notice
        time.sleep(0.01)
    print("blocks held at the first word:", held)
    print("free after the client left:", pool.num_free, "of", pool.num_blocks)
assert held >= 1 and pool.num_free == pool.num_blocks and llm.engine.stats.num_aborted == 1

# %% [markdown]
# ## Find the bug
#
# A colleague measures the strips at ten times their capacity and reports that no request ever waited. The server is the
# same. Here is the measurement.


# %%
async def measure(port, requests, rate):
    source, seen = random.Random(1), []
    begin = time.perf_counter()
    for request in requests:
        await asyncio.sleep(source.expovariate(rate))
        seen.append(await ask(port, request, begin))
    return seen


with serving(servers["strips"]) as port:
    seen = run(measure(port, mix[:12], rate=10 * capacity["strips"]))
print("clients:", len(seen), " first words:", sum(bool(client.events) for client in seen))

# %% [markdown]
# **How many clients were inside at once, at most? Decide first.**

# %%
my_inside = None  # your guess

# %%
inside = max(sum(other.sent <= client.sent < other.events[-1] for other in seen) for client in seen)
wrong_inside = {
    5: "as many as there are strips; but who sends the sixth, or even the second?",
    12: "all of them, if they came by their own clocks",
}
compare(my_inside, inside, "client at once", wrong_inside)
assert inside == 1

# %% [markdown]
# <details><summary><b>The cause</b></summary>
#
# `await ask(…)` stands in the loop: the next client comes only when the last one has been answered. The faster the rate
# that is asked for, the less it matters; a slow server simply gets fewer requests. Gil Tene calls this *coordinated
# omission*: the measurement waits together with the server, and leaves out the very clients that would have suffered.
# `clients` above lets each come at its own moment.
# </details>
#
# ## Check yourself
#
# <details><summary>1. A server holds 12 requests on average, and 4 come each second. How long does one stay?</summary>
#
# Three seconds: 12 = 4 × 3. No other fact about the server is needed.
# </details>
#
# <details><summary>2. You double the memory for keys and values, and TTFT stays as it was. What was the limit?</summary>
#
# Not the number that run at once: either nobody waited for blocks, or the processor was full already. Then more requests
# in a step only make the step longer.
# </details>
#
# <details><summary>3. Mean TTFT is 0.2 s; the 99th percentile is 6 s. Is the server healthy?</summary>
#
# One client in a hundred waits six seconds. Look at what a mean hides: bunches, long prompts in front of short ones,
# preempted requests.
# </details>

# %% [markdown]
# ## Summary
#
# - Clients come at random and therefore in bunches. Waiting begins before a server is full, and runs away when it is.
# - Clients inside = rate × time inside. So memory, which limits how many are inside, limits the rate.
# - Blocks move the point where waiting runs away to where the processor is full. They pay with a somewhat longer step.
# - Refuse early, free what nobody waits for, and measure with clients that do not wait for each other.
#
# **Write it yourself:** [exercise 15](../exercises/15_admission/15_admission.ipynb), how long a newcomer will wait for
# its first token, from measured steps.
#
# **That was the last lesson.** The engine is yours to change; [CONTRIBUTING](../CONTRIBUTING.md) says how.
# `make serve` starts the server with its live page. To the lesson before: [14 · vLLM today](14_vllm_today.ipynb).
#
# ### Sources
#
# - J. D. C. Little, *A Proof for the Queuing Formula: L = λW*, Operations Research 9 (3), 1961,
#   [doi:10.1287/opre.9.3.383](https://doi.org/10.1287/opre.9.3.383).
# - Y. Zhong et al., *DistServe: Disaggregating Prefill and Decoding for Goodput-optimized Large Language Model Serving*,
#   OSDI 2024, [arXiv:2401.09670](https://arxiv.org/abs/2401.09670).
# - vLLM, [`vllm.benchmarks.serve`](https://docs.vllm.ai/en/v0.13.0/api/vllm/benchmarks/serve/): what its client reports.
# - G. Tene, *How NOT to Measure Latency*, Strange Loop 2015: coordinated omission.
