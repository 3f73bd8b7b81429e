"""The clients that people have: the `openai` Python package, the Node package, curl."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.ask import Server, assert_parity, visible
from tests.api.deployment import Deployment

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]

HI: list[Any] = [{"role": "user", "content": "Count from one to five."}]
CHAT = "/v1/chat/completions"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def client(demo: Deployment) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{demo.server.base_url}/v1", api_key="none", max_retries=0)


def test_models_are_listed_once(client: openai.OpenAI, demo: Deployment) -> None:
    assert [model.id for model in client.models.list().data] == [demo.server.model]


def test_chat_and_its_stream_say_the_same(client: openai.OpenAI, demo: Deployment) -> None:
    options: Any = {"model": demo.server.model, "messages": HI, "max_tokens": 16, "temperature": 0}
    whole = client.chat.completions.create(**options)
    assert whole.usage is not None and whole.usage.completion_tokens <= 16
    text = ""
    for chunk in client.chat.completions.create(**options, stream=True):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    assert text == whole.choices[0].message.content != ""


def test_logprobs_and_n(client: openai.OpenAI, demo: Deployment, reference: Server) -> None:
    answer = client.chat.completions.create(
        model=demo.server.model, messages=HI, max_tokens=8, n=3, logprobs=True, top_logprobs=5, seed=1
    )
    assert len(answer.choices) == 3
    assert all(len(choice.logprobs.content) == 8 for choice in answer.choices if choice.logprobs)
    body = {"messages": HI, "max_tokens": 8, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    ours, theirs = demo.server.whole(CHAT, body), reference.whole(CHAT, body)
    ours_lp, theirs_lp = (answer["choices"][0]["logprobs"]["content"] for answer in (ours, theirs))
    assert [entry["token"] for entry in ours_lp] == [entry["token"] for entry in theirs_lp]
    for mine, other in zip(ours_lp, theirs_lp, strict=True):
        assert mine["logprob"] == pytest.approx(other["logprob"], abs=1e-3)
        assert [top["token"] for top in mine["top_logprobs"]] == [top["token"] for top in other["top_logprobs"]]


def test_n_hands_over_once(demo: Deployment) -> None:
    """`n` siblings share one prompt: its KV moves once, the others follow by prefix hit."""
    before = demo.counters()
    prompt = [5000 + number * 7 for number in range(100)]
    answer = demo.server.whole(
        "/v1/completions", {"prompt": prompt, "max_tokens": 4, "n": 4, "temperature": 1.0, "seed": 3}
    )
    after = demo.counters()
    assert len(answer["choices"]) == 4
    assert after["moved"] - before["moved"] == 1
    assert after["fallbacks"] == before["fallbacks"]
    demo.assert_quiet()


def test_json_schema(client: openai.OpenAI, demo: Deployment) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=demo.server.model,
        messages=HI,
        max_tokens=60,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    )
    assert isinstance(json.loads(answer.choices[0].message.content or "")["n"], int)


def test_named_tool(client: openai.OpenAI, demo: Deployment) -> None:
    answer = client.chat.completions.create(
        model=demo.server.model,
        messages=[{"role": "user", "content": "What is the weather in Prague?"}],
        max_tokens=80,
        temperature=0,
        tools=[WEATHER],  # type: ignore[list-item]
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
    )
    calls: Any = answer.choices[0].message.tool_calls
    assert calls[0].function.name == "get_weather"
    assert isinstance(json.loads(calls[0].function.arguments)["city"], str)


def test_automatic_tool_choice_shapes_the_prompt_once(demo: Deployment, reference: Server) -> None:
    """Case B50 in its simplest form: the tools are in the prompt of both legs, so the answer is the reference's."""
    body = {"messages": HI, "tools": [WEATHER], "tool_choice": "auto", "max_tokens": 24, "temperature": 0}
    ours, theirs = demo.server.whole(CHAT, body), reference.whole(CHAT, body)
    for answer in (ours, theirs):
        for choice in answer["choices"]:
            for call in choice["message"].get("tool_calls") or ():
                call.pop("id")
    assert visible(ours) == visible(theirs)
    demo.assert_moved(1)


def test_stop_and_tokenize(demo: Deployment, reference: Server) -> None:
    assert_parity(
        demo.server, reference, CHAT, {"messages": HI, "max_tokens": 64, "temperature": 0, "stop": ["2", "two"]}
    )
    ours = demo.server.post("/tokenize", {"messages": HI}).json()
    assert ours["tokens"] == reference.post("/tokenize", {"messages": HI}).json()["tokens"]
    text = demo.server.post("/detokenize", {"tokens": ours["tokens"]}).json()["prompt"]
    assert "Count from one to five." in text


def test_responses(client: openai.OpenAI, demo: Deployment) -> None:
    answer = client.responses.create(model=demo.server.model, input="Say hi", max_output_tokens=16, temperature=0)
    assert answer.output_text
    events = [
        event.type
        for event in client.responses.create(
            model=demo.server.model, input="Say hi", max_output_tokens=8, temperature=0, stream=True
        )
    ]
    assert events[0] == "response.created"
    assert events[-1] in ("response.completed", "response.incomplete")


def test_prompt_logprobs_and_echo_are_planned_on_decode(demo: Deployment, reference: Server) -> None:
    """On purpose, counted as a plan, never as a fallback."""
    before = demo.counters()
    prompt = [6000 + number * 3 for number in range(80)]
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "echo": True, "logprobs": 1}
    ours, theirs = demo.server.whole("/v1/completions", body), reference.whole("/v1/completions", body)
    assert ours["choices"][0]["text"] == theirs["choices"][0]["text"]
    pairs = zip(*(answer["choices"][0]["logprobs"]["token_logprobs"] for answer in (ours, theirs)), strict=True)
    for mine, other in pairs:
        assert mine == other or mine == pytest.approx(other, abs=1e-3)
    assert demo.counters() == before
    record = demo.records(1)[0]
    assert record["attempts"][-1]["prefill_replica"] is None
    assert record["attempts"][-1]["reason"] == "prompt_logprobs"


def test_errors_arrive_as_the_clients_own_exceptions(client: openai.OpenAI, demo: Deployment) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=demo.server.model, messages=HI, temperature=-1)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nope", messages=HI)


def test_curl(demo: Deployment) -> None:
    body = json.dumps({"model": demo.server.model, "messages": HI, "max_tokens": 4})
    curl = shutil.which("curl")
    assert curl, "curl is not installed"
    answer = subprocess.run(
        [curl, "-sS", f"{demo.server.base_url}{CHAT}", "-H", "Content-Type: application/json", "-d", body],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert json.loads(answer.stdout)["choices"][0]["message"]["content"]


NODE_PROGRAM = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0 });
const options = { model: process.argv[3], messages: [{ role: "user", content: "Count from one to five." }],
                  max_tokens: 16, temperature: 0 };
const whole = await client.chat.completions.create(options);
let text = "";
for await (const chunk of await client.chat.completions.create({ ...options, stream: true }))
  text += chunk.choices[0]?.delta?.content ?? "";
let refused = "";
try { await client.chat.completions.create({ ...options, temperature: -1 }); }
catch (error) { refused = error.constructor.name; }
const models = (await client.models.list()).data.map((model) => model.id);
console.log(JSON.stringify({ whole: whole.choices[0].message.content, text, refused, models }));
"""


@pytest.fixture(scope="module")
def node_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    npm, node = shutil.which("npm"), shutil.which("node")
    assert npm and node, "Node and npm are not installed: `make setup` installs them where it may"
    directory = tmp_path_factory.mktemp("node")
    (directory / "package.json").write_text('{"type": "module", "private": true}')
    subprocess.run(
        [npm, "install", "--silent", "--no-audit", "--no-fund", "openai@6"], cwd=directory, check=True, timeout=300
    )
    (directory / "ask.js").write_text(NODE_PROGRAM)
    return directory


def test_the_node_client(node_project: Path, demo: Deployment) -> None:
    program = ["node", "ask.js", demo.server.base_url, demo.server.model]
    done = subprocess.run(program, check=False, cwd=node_project, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["whole"] == said["text"] != ""
    assert said["refused"] == "BadRequestError"
    assert said["models"] == [demo.server.model]
