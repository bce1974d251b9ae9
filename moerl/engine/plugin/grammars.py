"""Grammars of requests, in the scheduler's processes: three things that SGLang 0.5.23 does not do.

1. Our engines have no tokenizer (`skip_tokenizer_init`), and so no grammar backend.  It is made at
   the first request with a grammar: reading a large vocabulary takes a second.
2. A request that continues an interrupted request has the tokens sampled so far in its prompt.
   Its matcher must accept them first, or the grammar would begin a second time in mid-answer.
3. SGLang compiles in threads and queues the request meanwhile.  An update in that time would fail:
   a queued request does not count as running, so the prefix cache would not be emptied, and an
   abort would be answered as an error of the client.  `admit` waits for the thread: milliseconds,
   _COMPILE_S at most.

A request keeps its matcher when it is retracted, and when it runs through an update in place.
SGLang compiles all grammars once more after an update, because emptying its cache drops them.

Read at 0.5.23: srt/constrained/grammar_manager.py, base_grammar_backend.py, xgrammar_backend.py;
srt/managers/scheduler.py.  These never call the backend's jump-forward: every token is sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moerl.distributed.object_collectives import all_gather_values
from moerl.engine.protocol import SAMPLED

_COMPILE_S = 10.0  # for which an engine waits; SGLang's own schemas take milliseconds


def admit(original: Callable[..., bool], manager: Any, req: Any) -> bool:
    """AROUND GrammarManager.process_req_with_grammar: whether the request waits for its grammar."""
    params = req.sampling_params
    if not (params.json_schema or params.regex or params.ebnf or params.structural_tag):
        return original(manager, req)
    cause = ""
    try:
        _make_backend(manager)
        if original(manager, req):
            manager.grammar_queue.pop()
            _compile(manager.grammar_backend, req)
            original(manager, req)  # finds it in the cache
        if req.grammar is not None:
            _accept(req.grammar, req.origin_input_ids, (params.custom_params or {}).get(SAMPLED, 0))
        else:
            cause = str(req.to_finish.message)
    except Exception as error:  # else this client's grammar would end the engine
        cause = f"{error}" or type(error).__name__
    causes = [cause]
    if manager.grammar_sync_size > 1:  # a thread of one rank may have been slower
        causes = all_gather_values(cause, str, manager.grammar_sync_group)
    if any(causes):
        req.set_finish_with_abort(f"the grammar cannot be used: {max(causes)}")
    if req.grammar is None:  # refused: the prompt is now one token
        req.routed_experts_start_len = 0
    return False


def _compile(backend: Any, req: Any) -> None:
    """Put the grammar, or the cause of its failure, into the cache of the backend."""
    from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject

    try:
        compiled = req.grammar.result(_COMPILE_S)
    except TimeoutError:
        compiled = InvalidGrammarObject(f"it was not compiled in {_COMPILE_S:g} s")
    backend.set_cache(req.grammar_key, compiled)


def _accept(matcher: Any, ids: Any, sampled: int) -> None:
    """Raises ValueError when the grammar does not allow these tokens."""
    for token in ids[len(ids) - sampled :]:
        matcher.accept_token(int(token))


def _make_backend(manager: Any) -> None:
    """Make the grammar backend once.  Raises ValueError for a model that can have none."""
    from sglang.srt.constrained.base_grammar_backend import create_grammar_backend
    from sglang.srt.runtime_context import get_model, get_serving
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    if manager.grammar_backend is not None:
        return
    if not hasattr(manager, "moerl_no_backend"):  # a failed attempt is not repeated
        manager.moerl_no_backend = "this model has a tokenizer that no grammar backend can read"
        model, serving = manager.scheduler.model_config, get_serving()
        tokenizer = get_tokenizer(
            serving.tokenizer_path,
            tokenizer_mode=serving.tokenizer_mode,
            trust_remote_code=get_model().trust_remote_code,
            revision=get_model().revision,
            tokenizer_backend=serving.tokenizer_backend,
        )
        manager.grammar_backend = create_grammar_backend(
            manager.server_args, tokenizer, model.vocab_size, model.hf_eos_token_id
        )
    if manager.grammar_backend is None:
        raise ValueError(manager.moerl_no_backend)
