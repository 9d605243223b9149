"""A loaded run answers as it was trained, however its questions are batched."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import problems_of
from tiny_run import (
    CHATML,
    ROUNDING,
    byte_tokenizer,
    logits,
    lora_run,
    nf4_config,
    relative,
    save_base,
    save_checkpoint,
    start_run,
    tiny_experts,
    tiny_gpt2,
    tiny_llama,
    tiny_tied_qwen,
    trained_adapter,
)
from tokenizers import decoders
from transformers import AutoModelForCausalLM, AutoTokenizer

import finetune as ft
from finetune.data.formats import Completion, Conversation
from finetune.evaluation.exact_match import samples
from finetune.inference.chat import chat, stream
from finetune.inference.generate import load_folder, turn
from finetune.models.load_checks import within_memory
from finetune.runs.run import write_json


def answers(loaded: ft.Loaded, questions: Any, most: int = 256) -> list[str]:
    return [each.answer for each in ft.exact_match(loaded, questions, None, most).examples]


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def qa(question: str, answer: str) -> list[dict[str, str]]:
    return [*user(question), {"role": "assistant", "content": answer}]


def asked(question: str, answer: str) -> Conversation:
    return Conversation(tuple(qa(question, answer)))


def tiny(tmp: Path, template: str | None = CHATML) -> ft.Loaded:
    return load_folder(save_base(tiny_llama(), tmp / "tiny", template))


QUESTIONS = [user(text) for text in ("hi", "what is the sea?", "", "a" * 40, "tell me more", "x")]


def test_the_greedy_text_of_a_real_model_is_its_reference_wherever_the_prompt_ends(assets):
    folder = assets / "models" / "stories260K"
    reference = (folder / "greedy_reference.txt").read_text().rstrip("\n")
    loaded = load_folder(folder)
    assert loaded.stops == (1, 2)  # bos ends a document too
    assert ft.generate(loaded, [""], max_new_tokens=256) == [reference]
    (text,) = ft.generate(loaded, ["Once upon a time"], max_new_tokens=40)
    assert text.startswith(", there was a little girl named Lily.")
    assert reference.startswith(f"Once upon a time{text}")
    (text,) = ft.generate(loaded, ["Once upon a time, there was a"], max_new_tokens=4)
    assert text.startswith(" little")  # with the space that its tokens alone would lose


@pytest.mark.parametrize("build", [tiny_llama, tiny_tied_qwen])
def test_a_padded_batch_answers_as_each_question_alone_whatever_pads_it(tmp_path, build):
    loaded = load_folder(save_base(build(), tmp_path / "tiny"))
    alone = [ft.generate(loaded, [question], 24)[0] for question in QUESTIONS]
    assert len(set(alone)) > 1
    assert ft.generate(loaded, QUESTIONS, 24, batch_rows=4) == alone
    assert ft.generate(loaded, QUESTIONS, 24, batch_rows=1) == alone
    for pad in ("<|end|>", None):  # eos too
        loaded.tokenizer.pad_token = pad
        assert ft.generate(loaded, QUESTIONS, 24) == alone


def say(model: torch.nn.Module, script: dict[int, int]) -> None:
    """Make the model say script[t] after token t, whatever came before: a bigram table."""
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    table = torch.zeros_like(model.model.embed_tokens.weight)
    head = torch.zeros_like(model.lm_head.weight)
    for column, (token, following) in enumerate(script.items()):
        table[token, column] = 1.0
        head[following, column] = 1.0
    model.model.embed_tokens.weight.data = table
    model.lm_head.weight.data = head


NEWLINE, END, TURN_END = byte_tokenizer()("\n<|end|><|im_end|>")["input_ids"]
YES = byte_tokenizer()("yes")["input_ids"]


def saying(tmp: Path, last: int) -> ft.Loaded:
    """A model that answers `yes`, ends with a token, and would go on with newlines."""
    model = tiny_llama()
    script = dict(zip([NEWLINE, *YES], [*YES, last], strict=True))
    say(model, {**script, last: NEWLINE})
    return load_folder(save_base(model, tmp / "saying"))


def test_an_answer_ends_at_eos_and_at_the_end_of_a_turn(tmp_path):
    for last in (END, TURN_END):
        loaded = saying(tmp_path / str(last), last)
        assert loaded.stops == (END, TURN_END)
        assert ft.generate(loaded, QUESTIONS, 20) == ["yes"] * len(QUESTIONS)


def test_an_answer_stops_where_the_context_is_full_and_no_prompt_may_fill_it(tmp_path):
    loaded = tiny(tmp_path)
    assert loaded.context == 128
    prompts = ["a" * 120, "b" * 125, "c"]
    alone = [ft.generate(loaded, [prompt], 20)[0] for prompt in prompts]
    assert ft.generate(loaded, prompts, 20) == alone
    assert problems_of(ft.generate, loaded, ["a", "a" * 128, "", "a" * 130], 20) == (
        "prompt 2: it is empty",
        "prompt 1: 128 tokens leave no room in a context of 128",
        "prompt 3: 130 tokens leave no room in a context of 128",
    )


def test_greedy_ignores_the_penalties_that_a_model_ships_and_sampling_follows_the_seed(tmp_path):
    folder = save_base(tiny_llama(), tmp_path / "tiny")
    loaded = load_folder(folder)
    path = folder / "generation_config.json"
    fields = json.loads(path.read_text())
    shipped = {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "temperature": 0.1}
    path.write_text(json.dumps({**fields, **shipped, "do_sample": True}))
    assert ft.generate(load_folder(folder), QUESTIONS, 24) == ft.generate(loaded, QUESTIONS, 24)
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(ft.generate(loaded, QUESTIONS, 12, temperature=1.0))
    assert drawn[0] == drawn[1] != drawn[2]


def test_messages_need_a_template_and_prompts_do_not(tmp_path):
    loaded = tiny(tmp_path, template=None)
    assert (loaded.stops, len(ft.generate(loaded, ["once"], 5))) == ((END,), 1)
    with pytest.raises(ft.FinetuneError, match="has no chat template"):
        ft.generate(loaded, [user("once")], 5)


ENDS = {
    "Qwen-Qwen2.5-7B-Instruct": "<|im_end|>",
    "meta-llama-Llama-3.1-8B-Instruct": "<|eot_id|>",
    "meta-llama-Llama-3.2-3B-Instruct": "<|eot_id|>",
    "google-gemma-2-2b-it": "<end_of_turn>",
    "microsoft-Phi-3.5-mini-instruct": "<|end|>",
}


def test_the_end_of_a_turn_and_an_empty_thought_are_found_in_real_templates(assets):
    for name, end in ENDS.items():
        tokenizer = byte_tokenizer()
        tokenizer.add_special_tokens({"bos_token": "<s>", "additional_special_tokens": [end]})
        template = assets / "configs" / "chat_templates" / f"{name}.jinja"
        tokenizer.chat_template = template.read_text()
        assert turn(tokenizer).end == tokenizer.convert_tokens_to_ids(end)
        assert turn(tokenizer).scaffold == ""
    tokenizer = AutoTokenizer.from_pretrained(assets / "tokenizers" / "qwen3")
    assert turn(tokenizer).scaffold == "<think>\n\n</think>\n\n"  # not part of an answer
    assert tokenizer.convert_ids_to_tokens(turn(tokenizer).end) == "<|im_end|>"


def test_a_run_is_loaded_at_a_step_the_last_or_the_best(tmp_path):
    trained = lora_run(tmp_path)
    now = {}
    for step in (20, 30):
        model = trained_adapter(tiny_llama(), r=step // 10)
        save_checkpoint(trained.run, step, model)
        now[step] = logits(model)
    assert relative(logits(ft.load(trained.run).model), now[30]) < ROUNDING
    write_json(trained.run.best, {"step": 20, "loss": 1.0})
    assert relative(logits(ft.load(trained.run, "last").model), now[30]) < ROUNDING
    assert relative(logits(ft.load(str(trained.run.root)).model), now[20]) < ROUNDING
    assert relative(logits(ft.load(trained.run, "best").model), now[20]) < ROUNDING
    assert relative(logits(ft.load(trained.run, 10).model), trained.logits) < ROUNDING
    with pytest.raises(ft.FinetuneError, match="no complete checkpoint of step 15; 10, 20, 30"):
        ft.load(trained.run, 15)


def test_a_run_without_a_checkpoint_is_refused(tmp_path):
    run = start_run(tmp_path / "run", save_base(tiny_llama(), tmp_path / "base"))
    with pytest.raises(ft.FinetuneError, match="no complete checkpoint; train the run first"):
        ft.load(run)
    save_checkpoint(run, 10, tiny_llama())
    with pytest.raises(ft.FinetuneError, match="no best checkpoint was kept"):
        ft.load(run, "best")
    with pytest.raises(ft.FinetuneError, match="not a run directory"):
        ft.load(tmp_path)
    with pytest.raises(ft.FinetuneError, match="neither a model"):
        load_folder(tmp_path)


def test_a_quantised_run_is_loaded_on_the_quantised_base(tmp_path):
    folder = save_base(tiny_llama(), tmp_path / "base")
    run = start_run(tmp_path / "run", folder, ft.LoRA(r=4), quantization="nf4")
    write_json(run.realised, {"mixed_precision": "bf16"})
    nf4 = {"quantization_config": nf4_config(torch.bfloat16), "device_map": {"": "cpu"}}
    quantised = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **nf4)
    model = trained_adapter(quantised)
    save_checkpoint(run, 10, model)
    loaded = ft.load(run)
    model.train()  # no dropout: only where bitsandbytes computes otherwise is this another mode
    assert torch.equal(logits(loaded.model), logits(model))
    unquantised = trained_adapter(tiny_llama(torch.bfloat16))
    assert relative(logits(loaded.model), logits(unquantised)) > 0.1  # what NF4 changes


def test_bitsandbytes_still_loses_gradients_after_an_evaluation_on_some_cpus():
    """When this fails, `finetune.inference.load.keep_unpacked` is no longer needed."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    torch.manual_seed(0)
    layer = Linear4bit(64, 64, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
    if not layer.support_avx512bf16_for_cpu:
        pytest.skip("this CPU has no AVX512-BF16")
    layer.weight = Params4bit(torch.randn(64, 64), requires_grad=False, quant_type="nf4")
    layer = layer.to("cpu")
    given = torch.randn(3, 64, dtype=torch.bfloat16, requires_grad=True)

    def gradient() -> torch.Tensor:
        return torch.autograd.grad(layer.train()(given).float().sum(), given)[0]

    before = gradient()
    with torch.no_grad():
        layer.eval()(given.detach())
    with pytest.raises((RuntimeError, AssertionError)):
        torch.testing.assert_close(gradient(), before)


def test_the_base_is_what_training_started_from_or_has_the_weights_of_its_seed(tmp_path):
    trained = lora_run(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(trained.base)
    assert torch.equal(
        logits(ft.load_base(ft.catalog.load(trained.run.recipe)).model), logits(plain)
    )
    recipe = ft.SFT(model=ft.Model(config=tiny_llama().config.to_dict()), seed=5)
    first, second, other = (
        logits(ft.load_base(dataclasses.replace(recipe, seed=seed), byte_tokenizer()).model)
        for seed in (5, 5, 6)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_a_base_that_is_gone_is_named(tmp_path):
    trained = lora_run(tmp_path)
    trained.base.rename(tmp_path / "moved")
    for use in (
        lambda: ft.load(trained.run),
        lambda: ft.export(trained.run, tmp_path / "out"),
        lambda: ft.export(trained.run, tmp_path / "out", True),
    ):
        with pytest.raises(ft.FinetuneError, match=f"name: '{trained.base}' could not be loaded"):
            use()


def test_a_config_of_other_values_is_read(tmp_path):
    folder = save_base(tiny_llama(), tmp_path / "tiny")
    fields = json.loads((folder / "config.json").read_text())
    for changed in ({"architectures": [1.5, None]}, {"architectures": 7}):
        (folder / "config.json").write_text(json.dumps(fields | changed))
        load_folder(folder)


def test_running_out_of_memory_is_reported_in_one_line():
    told = r"^m: not enough memory to load it \(.*allocate"
    with pytest.raises(ft.FinetuneError, match=told), within_memory("m"):
        torch.empty(2**50, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="another"), within_memory("m"):
        raise RuntimeError("another")


@pytest.mark.parametrize(
    ("build", "targets", "init"),
    [(tiny_gpt2, ["c_attn", "c_fc"], "pissa"), (tiny_experts, ["q_proj", "o_proj"], True)],
    ids=["transposed weights", "experts"],
)
def test_other_architectures_are_loaded_and_exported_as_trained(tmp_path, build, targets, init):
    trained = lora_run(tmp_path, build(), target_modules=targets, init_lora_weights=init)
    assert relative(logits(ft.load(trained.run).model), trained.logits) < ROUNDING
    for merge in (False, True):
        folder = ft.export(trained.run, tmp_path / str(merge), merge)
        assert relative(logits(load_folder(folder).model), trained.logits) < ROUNDING


def test_exact_match_counts_answers_that_are_the_reference_and_samples_hold_both(tmp_path):
    loaded = saying(tmp_path, TURN_END)
    rows = [asked("a", "yes"), asked("b", "no"), asked("c", " yes\n"), asked("d", "Yes")]
    score = ft.exact_match(loaded, rows, max_new_tokens=20)
    assert (score.rows, score.matched, score.share) == (4, 2, 0.5)
    assert [example.matched for example in score.examples] == [True, False, True, False]
    assert (score.examples[1].prompt, score.examples[1].answer) == ("b", "yes")
    assert ft.exact_match(loaded, rows, limit=1).share == 1.0
    assert samples(rows[:2], ["?", "!"], answers(loaded, rows[:2], 20)) == [
        {"prompt": "a", "before": "?", "after": "yes", "expected": "yes"},
        {"prompt": "b", "before": "!", "after": "yes", "expected": "no"},
    ]


def test_a_completion_is_asked_with_its_bare_prompt_and_needs_no_template(tmp_path):
    loaded = tiny(tmp_path, template=None)
    (answer,) = ft.generate(loaded, ["once"], 8)
    rows = [Completion("once", answer), Completion("once", "never said")]
    score = ft.exact_match(loaded, rows, max_new_tokens=8)
    assert [example.answer for example in score.examples] == [answer.strip()] * 2
    assert score.matched == 1
    with pytest.raises(ft.FinetuneError, match="the tokenizer has no chat template; train with"):
        answers(loaded, [asked("a", "b")])


def test_a_question_with_tools_is_asked_with_their_schemas(tmp_path):
    template = CHATML.replace("{% for", "{{ tools | tojson if tools else '' }}{% for", 1)
    loaded = tiny(tmp_path, template=template)
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    plain = asked("a", "b")
    with_tools = dataclasses.replace(plain, tools=(tool,))
    prompts = [loaded.tokenizer.apply_chat_template(
        [*plain.messages[:-1]], tools=tools, tokenize=False, add_generation_prompt=True
    ) for tools in (None, [tool])]  # fmt: skip
    assert prompts[0] != prompts[1]
    expected = [text.strip() for text in ft.generate(loaded, prompts, 8)]
    assert answers(loaded, [plain, with_tools], 8) == expected


def test_every_row_that_cannot_be_scored_is_named(tmp_path):
    loaded = tiny(tmp_path)
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    rows = [Conversation(tuple(row)) for row in (user("a"), [], [*user("a"), call])]
    told = problems_of(ft.exact_match, loaded, [asked("a", "b"), *rows])
    assert [problem.split(":")[0] for problem in told] == ["question 1", "question 2", "question 3"]
    with pytest.raises(ft.FinetuneError, match="nothing to evaluate"):
        ft.exact_match(loaded, [])


class Script:
    """Lines that a person types; then Ctrl-D, or what is raised instead."""

    def __init__(self, *lines: str, then: type[BaseException] = EOFError) -> None:
        self.lines, self.then = list(lines), then

    def __call__(self, _prompt: str) -> str:
        if not self.lines:
            raise self.then
        return self.lines.pop(0)


def test_a_streamed_answer_arrives_in_pieces_and_is_that_of_generate(tmp_path):
    loaded = tiny(tmp_path)
    for question in QUESTIONS:
        pieces: list[str] = []
        text = stream(loaded, question, pieces.append, 24)
        assert text == "".join(pieces) == ft.generate(loaded, [question], 24)[0]
    assert stream(saying(tmp_path, TURN_END), user("a"), pieces.append, 24) == "yes"


def test_text_that_the_next_token_changes_is_not_written_before_it(tmp_path):
    """Half a character, or a decoder that joins tokens."""
    model = tiny_llama()
    sea = byte_tokenizer()("é☂.")["input_ids"]
    say(model, dict(zip([NEWLINE, *sea], [*sea, TURN_END], strict=True)))
    loaded = load_folder(save_base(model, tmp_path / "sea"))
    pieces: list[str] = []
    assert stream(loaded, user("a"), pieces.append, 24) == "é☂."
    assert [piece for piece in pieces if piece] == ["é", "☂", "."]
    loaded = saying(tmp_path, TURN_END)
    joined = [decoders.ByteLevel(), decoders.Replace("ye", "Y")]
    loaded.tokenizer.backend_tokenizer.decoder = decoders.Sequence(joined)
    pieces.clear()
    assert stream(loaded, user("a"), pieces.append, 24) == "Ys"
    assert "".join(pieces) == "Ys"


INTRO = "/reset clears the conversation, /exit ends it\n"


def written(loaded: ft.Loaded, script: Script, **fields: Any) -> str:
    """What a chat writes."""
    text: list[str] = []
    chat(loaded, script, text.append, 8, **fields)
    return "".join(text)


@pytest.mark.parametrize("then", [EOFError, KeyboardInterrupt])
def test_a_chat_remembers_until_reset_and_ends_quietly(tmp_path, then):
    loaded = tiny(tmp_path)
    (first,) = ft.generate(loaded, [user("hi")], 8)
    (second,) = ft.generate(loaded, [[*qa("hi", first), *user("and?")]], 8)
    script = Script("hi", "and?", "", "/reset", "hi", then=then)
    assert written(loaded, script) == f"{INTRO}{first}\n{second}\n{first}\n\n"
    assert written(loaded, Script("/exit", "never read")) == INTRO


def test_a_chat_from_a_pipe_writes_the_answers_alone_and_one_beyond_the_context_goes_on(tmp_path):
    loaded = tiny(tmp_path)
    (answer,) = ft.generate(loaded, [user("hi")], 8)
    assert written(loaded, Script("hi", "/reset", "hi"), typed=False) == f"{answer}\n{answer}\n"
    text = written(loaded, Script("a" * 130, "hi"))
    assert "leave no room in a context of 128; /reset starts over\n" in text
    assert text.endswith(f"{answer}\n\n")


def test_a_model_without_a_template_continues_each_line(tmp_path):
    loaded = tiny(tmp_path, template=None)
    (text,) = ft.generate(loaded, ["once"], 8)
    assert written(loaded, Script("once", "once")).endswith(f"it\n{text}\n{text}\n\n")
