"use strict";
// The feed of a server, and what the page asks of it.
let apiKey = sessionStorage.getItem("key") || "", paused = false, talking = null;
const messages = [];

async function call(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  if (apiKey) headers.Authorization = `Bearer ${apiKey}`;
  const answer = await fetch(path, { method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body) });
  if (answer.ok) return answer;
  const text = (await answer.json().catch(() => ({})))?.error?.message || answer.statusText;
  if (answer.status === 401) {
    apiKey = prompt(word().key) || "";
    sessionStorage.setItem("key", apiKey);
  }
  throw new Error(text);
}

async function* linesOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "";;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    yield* lines;
  }
}

async function watch() {
  for (;;) {
    try {
      for await (const line of linesOf(await call("page/frames"))) {
        const known = lanes.size, value = line && JSON.parse(line);
        if (!value) continue;
        read(value);
        if (lanes.size !== known || (value.format && !$("about").textContent)) speak();
        if ("paused" in value) showState(value);
        dirty = true;
      }
    } catch (error) { $("status").textContent = error.message; }
    await new Promise((done) => setTimeout(done, 1000));
    $("status").textContent = word().lost;
  }
}

let saidAt = 0;
function showState(frame) {
  paused = frame.paused;
  $("pause").textContent = paused ? word().goOn : word().pause;
  $("pause").setAttribute("aria-pressed", paused);
  $("one").disabled = !paused;
  if (Date.now() - saidAt > 3000 || paused || !frame.running) {  // often enough for a screen reader
    saidAt = frame.running && !paused ? Date.now() : 0;  // and at once when the first request runs
    const lane = lanes.get("blocks");
    $("status").textContent = (paused ? word().paused + " " : "") + word().summary(lane.frame, lane.header.num_blocks);
  }
}

const control = (body) => call("page/control", body).catch((error) => { $("status").textContent = error.message; });
$("pause").onclick = () => { showState({ paused: !paused, running: 1 }); control({ paused }); };
$("one").onclick = () => control({ step: 1 });
$("delay").onchange = () => control({ delay: +$("delay").value });
$("send").onclick = () => {
  for (const lane of lanes.values()) { lane.most = 0; lane.frame.preemptions = 0; }
  call("page/users", { count: 30, rate: +$("rate").value, mix: $("mix").value }).catch((error) => { $("status").textContent = error.message; });
};
$("strips").onchange = async () => {
  await control({ strips: $("strips").checked });
  if (!$("strips").checked) { lanes.delete("strips"); speak(); }
};

function say(text, kind) {
  const line = Object.assign(document.createElement("p"), { textContent: text, className: kind });
  $("said").append(line);
  $("said").scrollTop = $("said").scrollHeight;
  return line;
}

$("chat").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = $("message").value.trim(), n = +$("n").value;
  if (!text || talking) return;
  $("message").value = "";
  say(text, "me");
  talking = new AbortController();
  $("stop").disabled = false;
  const body = { messages: [...messages, { role: "user", content: text }], n, stream: true, max_tokens: 200,
                 temperature: n > 1 ? 0.8 : 0, stream_options: { include_usage: true } };
  const answers = Array.from({ length: n }, () => say("", "answer"));
  try {
    for await (const line of linesOf(await call("v1/chat/completions", body, talking.signal))) {
      if (!line.startsWith("data: {")) continue;
      const part = JSON.parse(line.slice(6));
      if (part.error) throw new Error(part.error.message);
      if (picked === null && part.id) pick(part.id + "/0");
      for (const choice of part.choices) answers[choice.index].textContent += choice.delta.content || "";
      if (part.usage) say(word().cost(part.usage, n), "note");
    }
  } catch (error) { say(error.name === "AbortError" ? word().stopped : error.message, "note"); }
  messages.push({ role: "user", content: text }, { role: "assistant", content: answers[0].textContent });
  if (picked && picked.startsWith("chatcmpl")) picked = null;
  $("stop").disabled = true;
  talking = null;
});
$("stop").onclick = () => talking?.abort();

if (!recorded) {
  $("live").hidden = false;
  onSpeak = () => { $("send").textContent = word().send; showState({ paused, running: 0 }); };
  $("send").textContent = word().send;
  $("pause").textContent = word().pause;
  speak();
  watch();
}
