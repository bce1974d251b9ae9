"""Grammars of clients: how they reach the engine, what is refused, and matchers that go on."""

from __future__ import annotations

import threading
from array import array
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xgrammar
from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend
from sglang.srt.constrained.grammar_manager import GrammarManager

from moerl.agents.agent_loop import no_grammar
from moerl.config.task_programs import AgentConfig
from moerl.core.errors import RecordError
from moerl.core.types import GenerateRequest, Grammar, SamplingParams
from moerl.engine.host.generation import _grammar
from moerl.engine.plugin import grammars
from tests.helpers.chat_tokenizer import END, SIZE
from tests.helpers.served_gateway import ADD, CALL, HELLO, TOKENIZER, ids, run, serve

CUT = SamplingParams(50, top_p=0.9, top_k=40, stop_token_ids=(END,))
FORMATS: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, Grammar("json_schema", '{"type":"object"}')),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
        Grammar("json_schema", "{}"),
    ),
    ({"json_schema": {"type": "object"}}, Grammar("json_schema", '{"type":"object"}')),
    ({"json_schema": "{}"}, Grammar("json_schema", "{}")),
    ({"regex": "a+"}, Grammar("regex", "a+")),
    ({"ebnf": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"')),
    (
        {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
        Grammar("structural_tag", '{"type":"structural_tag","format":{"type":"any_text"}}'),
    ),
]  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": HELLO},
    "/completions": {"prompt": "x"},
    "/generate": {"prompt_token_ids": [5]},
}


@pytest.mark.parametrize("path", FORMS)
def test_a_grammar_reaches_the_engine_and_is_in_no_record(path: str) -> None:
    async def work() -> None:
        async with serve(*([*ids("a"), END] for _ in FORMATS), sampling=CUT) as served:
            for fields, wanted in FORMATS:
                status, reply, _ = await served.post(path, json=FORMS[path] | fields)
                assert status == 200, reply
                assert served.engine.requests[-1].sampling.grammar == wanted
            done = await served.end()
        assert {turn.rollout.sampling.grammar for turn in done.turns} == {None}

    run(work)


BAD: list[dict[str, Any]] = [
    {"response_format": {"type": "yaml"}},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
    {"regex": "a", "ebnf": "b"},
    {"regex": "a" * 70_000},
    {"regex": "a", "tools": [ADD], "tool_choice": "required"},
    {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
]


@pytest.mark.parametrize("fields", BAD, ids=str)
def test_a_bad_grammar_is_one_sentence(fields: dict[str, Any]) -> None:
    async def work() -> None:
        async with serve(sampling=CUT) as served:
            status, reply, headers = await served.post(json={"messages": HELLO} | fields)
            assert (status, reply["error"]["code"]) == (400, "invalid_grammar")
            assert any(name in reply["error"]["message"] for name in fields.keys() - {"tools"})
            assert headers["x-should-retry"] == "false"
            assert not served.engine.requests

    run(work)


def test_a_grammar_that_the_engine_refuses_is_the_clients_error() -> None:
    async def work() -> None:
        async with serve([5, END], sampling=CUT) as served:
            served.engine.fails = RecordError("request", "e.t0: no rule foo")
            status, reply, _ = await served.post(json={"messages": HELLO, "ebnf": "root ::= foo"})
            assert (status, reply["error"]["code"]) == (400, "invalid_grammar")
            assert "no rule foo" in reply["error"]["message"]
            status, reply, _ = await served.post(json={"messages": HELLO})  # it had no grammar
            assert (status, reply["error"]["code"]) == (502, "record_refused")

    run(work)


ASKED: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}}, {"regex": "a*"},
    {"tool_choice": "required", "tools": [ADD]},
    {"tool_choice": {"type": "function", "function": {"name": "add"}}, "tools": [ADD]},
]  # fmt: skip


@pytest.mark.parametrize("fields", ASKED, ids=lambda fields: next(iter(fields)))
@pytest.mark.parametrize("why", ["task.agent.grammars", "replay.sampling_mask"])
def test_a_run_without_masks_or_with_the_setting_off_refuses(
    fields: dict[str, Any], why: str
) -> None:
    settings: dict[str, Any] = {"sampling": CUT} if "grammars" in why else {}
    if settings:
        settings["no_grammar"] = no_grammar(AgentConfig(grammars=False), masks=True)

    async def work() -> None:
        async with serve(**settings) as served:
            status, reply, _ = await served.post(json={"messages": HELLO} | fields)
            assert (status, reply["error"]["code"]) == (400, "unsupported_parameter")
            assert why in reply["error"]["message"]
            assert not served.engine.requests

    run(work)
    assert no_grammar(AgentConfig(), masks=True) == ""
    assert "replay.sampling_mask" in no_grammar(AgentConfig(), masks=False)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "add"}}], ids=["any", "named"]
)
def test_a_forced_call_has_the_grammar_of_the_calls(choice: Any) -> None:
    other = {"type": "function", "function": {"name": "sub"}}

    async def work() -> None:
        async with serve([CALL, END], sampling=CUT) as served:
            asked = {"messages": HELLO, "tools": [ADD, other], "tool_choice": choice}
            _, reply, _ = await served.post(json=asked)
            assert reply["choices"][0]["finish_reason"] == "tool_calls"
            (request,) = served.engine.requests
            names = ["add", "sub"] if choice == "required" else ["add"]
            assert request.sampling.grammar == Grammar("structural_tag", " ".join(names))

    run(work)


def test_an_interrupted_turn_is_asked_for_with_the_tokens_that_the_grammar_allowed() -> None:
    async def work() -> None:
        async with serve([*ids("abcd"), END], sampling=CUT) as served:
            served.engine.interrupt_at.extend([3])
            await served.post(json={"messages": HELLO, "regex": "abcd"})
            first, second = served.engine.requests
        assert _grammar(first) == {"regex": "abcd", "custom_params": {grammars.SAMPLED: 0}}
        assert _grammar(second) == {"regex": "abcd", "custom_params": {grammars.SAMPLED: 3}}
        assert second.token_ids[-3:].tolist() == ids("abc")

    run(work)


def test_a_request_without_a_grammar_says_nothing_of_one() -> None:
    assert _grammar(GenerateRequest("a", 0, np.zeros(1, np.int32), 0, CUT)) == {}


# --- matchers in the scheduler --------------------------------------------------------------------
class Matcher:
    """xgrammar's, as SGLang's XGrammarGrammar wraps it."""

    def __init__(self, compiled: Any) -> None:
        self.compiled, self.matcher = compiled, xgrammar.GrammarMatcher(compiled)

    def accept_token(self, token: int) -> None:
        if not self.matcher.accept_token(token):
            raise ValueError(f"token {token} is not allowed")

    def copy(self) -> Matcher:
        return Matcher(self.compiled)

    def maybe_init_reasoning(self, reasoning: bool) -> None: ...

    def allowed(self) -> set[int]:
        bits = xgrammar.allocate_token_bitmask(1, SIZE)
        self.matcher.fill_next_token_bitmask(bits)
        return set(np.flatnonzero(np.unpackbits(bits.numpy().view(np.uint8), bitorder="little")))


class Manager:
    """The parts of SGLang's GrammarManager and backend that a request passes."""

    grammar_sync_size = 1

    def __init__(self) -> None:
        info = xgrammar.TokenizerInfo.from_huggingface(
            TOKENIZER, vocab_size=SIZE, stop_token_ids=[END]
        )
        self._compiler = xgrammar.GrammarCompiler(info)
        self.grammar_backend, self.grammar_queue = self, list[Any]()
        self.cache: dict[str, Any] = {}

    def set_cache(self, key: str, value: Any) -> None:
        self.cache[key] = value

    def process(self, req: Any) -> bool:
        req.grammar_key = req.sampling_params.regex
        if req.grammar_key in self.cache:
            req.grammar = Matcher(self.cache[req.grammar_key])
            return False
        req.grammar = Future[Any]()
        req.grammar.set_result(self._compiler.compile_regex(req.grammar_key))
        self.grammar_queue.append(req)
        return True


def admitted(manager: Manager, regex: str, ids_: list[int], sampled: int) -> Any:
    params = SimpleNamespace(
        regex=regex, json_schema=None, ebnf=None, structural_tag=None,
        custom_params={grammars.SAMPLED: sampled},
    )  # fmt: skip
    req = SimpleNamespace(
        sampling_params=params,
        origin_input_ids=array("q", ids_),
        routed_experts_start_len=7,
        require_reasoning=False,
    )
    req.failed = ""

    def abort(message: str) -> None:
        req.failed, req.grammar = message, None
        req.to_finish = SimpleNamespace(message=message)

    req.set_finish_with_abort = abort
    assert grammars.admit(type(manager).process, manager, req) is False, "nothing waits in a queue"
    assert not manager.grammar_queue
    return req


def test_a_resumed_matcher_allows_what_the_first_one_would_have() -> None:
    manager, whole = Manager(), ids("abc-yes")
    first = admitted(manager, "[a-c]{3}-(yes|no)", ids("prompt"), 0).grammar
    for done, token in enumerate(whole):
        resumed = admitted(manager, "[a-c]{3}-(yes|no)", ids("prompt") + whole[:done], done)
        assert resumed.grammar.allowed() == first.allowed()
        assert token in first.allowed()
        first.accept_token(token)
    assert first.allowed() == {END}
    again = admitted(manager, "[a-c]{3}-(yes|no)", ids("prompt") + whole[:4], 0).grammar
    assert again.allowed() != resumed.grammar.allowed(), "control: a matcher that begins again"


def test_tokens_that_the_grammar_does_not_allow_end_the_request() -> None:
    req = admitted(Manager(), "[a-c]{3}", ids("prompt") + ids("ax"), 2)
    assert "not allowed" in req.failed
    assert req.routed_experts_start_len == 0, "the prompt of a refused request is one token"


def test_a_pattern_that_does_not_compile_ends_the_request_not_the_engine() -> None:
    assert "parenthesis" in admitted(Manager(), "(a", ids("p"), 0).failed


class SlowManager(Manager):
    """SGLang's own manager, and its backend: a thread compiles, and patterns with `z` take long."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = threading.Event()
        backend = BaseGrammarBackend()
        backend._init_value_dispatch = self._compiled  # type: ignore[method-assign]
        self.sglang = GrammarManager.__new__(GrammarManager)
        self.sglang.grammar_backend, self.sglang.grammar_queue = backend, self.grammar_queue
        self.sglang.grammar_sync_size, self.grammar_backend = 1, backend  # type: ignore[assignment]

    def _compiled(self, key: tuple[str, str], require_reasoning: bool) -> Any:
        if "z" in key[1]:
            self.may_end.wait()
        return Matcher(self._compiler.compile_regex(key[1]))

    def process(self, req: Any) -> bool:
        return bool(self.sglang.process_req_with_grammar(req))


def allowed(regex: str) -> set[int]:
    found: set[int] = admitted(Manager(), regex, ids("p"), 0).grammar.allowed()
    return found


def test_a_grammar_that_compiles_for_too_long_is_refused_and_the_next_request_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammars, "_COMPILE_S", 0.05)
    manager = SlowManager()
    try:
        for _ in range(2):  # the second time it is known, and nothing is compiled
            req = admitted(manager, "[x-z]{3}", ids("p"), 0)
            assert req.failed.startswith("the grammar cannot be used: ")
            assert "it was not compiled in 0.05 s" in req.failed
            assert req.routed_experts_start_len == 0
        monkeypatch.setattr(grammars, "_COMPILE_S", 60.0)
        served = admitted(manager, "[a-c]{3}", ids("p"), 0)  # while the first one still compiles
        assert served.grammar.allowed() == allowed("[a-c]{3}")
    finally:
        manager.may_end.set()
    manager.sglang.clear()  # as an update of the weights does
    again = admitted(manager, "[x-z]{3}", ids("p"), 0)
    assert again.grammar.allowed() == allowed("[x-z]{3}"), "control: with time it is taken"


def test_a_request_without_a_grammar_takes_sglangs_path() -> None:
    params = SimpleNamespace(regex=None, json_schema=None, ebnf=None, structural_tag=None)
    req = SimpleNamespace(sampling_params=params)
    assert grammars.admit(lambda manager, asked: asked is req, None, req) is True
