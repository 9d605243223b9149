"""What the assistant says is trained, with the token that ends it, and nothing else."""

import dataclasses
import json
from typing import Any

import pytest
from chats import (
    MARKS,
    NO_TOOLS,
    load_error,
    real_chat,
    real_tokenizer,
    refusal,
    trained_runs,
    trained_texts,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizer import SPECIAL, small_tokenizer
from tokenizers import decoders, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from finetune.data.chat.render import Chat, Row, load_chat
from finetune.data.formats import Completion, Conversation, Text, read_row
from finetune.errors import FinetuneError


def trained_pieces(chat: Chat, row: Row) -> list[list[str]]:
    """The trained tokens, decoded one by one."""
    return [[chat.tokenizer.decode([token]) for token in run] for run in trained_runs(row)]


def talk(*contents: str, system: str | None = None) -> Conversation:
    """Messages of user and assistant in turn."""
    roles = ("user", "assistant")
    said = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    first = [{"role": "system", "content": system}] if system is not None else []
    return Conversation((*first, *said))


def chat_of(template: str, **tokenizer: Any) -> Chat:
    return Chat(small_tokenizer(**tokenizer), template)


TWO_TURNS = talk("Hi", "Hello there", "What is two and two", "The answer is four")
LAST = ["The", " answer", " is", " four", "<|im_end|>"]
CHATML = load_chat(small_tokenizer(), "chatml")

CHATML_UNMARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNMARKED = Chat(small_tokenizer(), CHATML_UNMARKED)


@pytest.mark.parametrize("chat", [CHATML, UNMARKED])
def test_every_assistant_turn_is_trained_with_its_end_token(chat):
    row = chat.render(TWO_TURNS, "assistant")
    assert chat.tokenizer.decode(row.ids) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello there<|im_end|>\n"
        "<|im_start|>user\nWhat is two and two<|im_end|>\n"
        "<|im_start|>assistant\nThe answer is four<|im_end|>\n"
    )
    assert trained_pieces(chat, row) == [["Hello", " there", "<|im_end|>"], LAST]


def test_only_the_last_turn_or_everything_is_trained_on_request():
    assert trained_pieces(CHATML, CHATML.render(TWO_TURNS, "completion")) == [LAST]
    row = CHATML.render(TWO_TURNS, "all")
    assert all(row.trained)
    assert row.ids == CHATML.render(TWO_TURNS, "assistant").ids


def test_the_plain_template_needs_nothing_but_an_end_token():
    chat = load_chat(small_tokenizer(special=()), "plain")
    row = chat.render(talk("Hi", "Hello there", "Bye", "Bye", system="fast"), "assistant")
    assert chat.tokenizer.decode(row.ids) == (
        "### System:\nfast\n\n### User:\nHi\n\n### Assistant:\nHello there</s>\n"
        "### User:\nBye\n\n### Assistant:\nBye</s>\n"
    )
    assert trained_pieces(chat, row) == [["Hello", " there", "</s>"], ["Bye", "</s>"]]


@pytest.mark.parametrize("name", ["chatml", "plain"])
def test_built_in_templates_write_tools_and_train_the_calls(name):
    function = {"name": "weather", "arguments": {"city": "Oslo"}}
    called = {"id": "call00000", "type": "function", "function": function}
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    asked = talk("Weather in Oslo", "Hello", system="Be fast").messages
    result = {"role": "tool", "content": "rain", "tool_call_id": "call00000"}
    answers = {"role": "assistant", "content": "cold rain"}
    calling = {**asked[-1], "tool_calls": [called] * 2}
    sample = Conversation((*asked[:-1], calling, result, answers), (tool,))
    chat = load_chat(small_tokenizer(), name)
    row = chat.render(sample, "assistant")
    text = chat.tokenizer.decode(row.ids)
    assert '{"type": "function", "function": {"name": "weather", "parameters": {}}}' in text
    assert text.count("Be fast") == 1
    space, end = ("\n", "<|im_end|>") if name == "chatml" else ("", "</s>")
    call = (
        f'<tool_call>{space}{{"name": "weather", "arguments": {{"city": "Oslo"}}}}{space}'
        "</tool_call>"
    )
    assert trained_texts(chat, row) == [f"Hello\n{call}\n{call}{end}", f"cold rain{end}"]


@pytest.mark.parametrize("name", ["chatml", "plain"])
def test_generation_marks_agree_with_the_mask_of_transformers(name):
    chat = load_chat(small_tokenizer(), name)
    theirs = chat.tokenizer.apply_chat_template(
        list(TWO_TURNS.messages), chat_template=chat.template, return_dict=True,
        return_assistant_tokens_mask=True,
    )  # fmt: skip
    row = chat.render(TWO_TURNS, "assistant")
    assert row.ids == theirs["input_ids"]
    assert row.trained == [mark == 1 for mark in theirs["assistant_masks"]]


def test_messages_that_are_given_or_context_only_are_not_trained():
    for context in ({"given": 3}, {"untrained": frozenset({1})}):
        row = CHATML.render(dataclasses.replace(TWO_TURNS, **context), "assistant")
        assert row.ids == CHATML.render(TWO_TURNS, "assistant").ids
        assert trained_pieces(CHATML, row) == [LAST]
    last = dataclasses.replace(TWO_TURNS, untrained=frozenset({3}))
    assert not any(CHATML.render(last, "completion").trained)
    with pytest.raises(FinetuneError, match="message 3 is context only by its weight or train"):
        CHATML.render(last, "all")


@pytest.mark.parametrize("answer", ["\n\nHello", "\n"])
def test_an_answer_that_begins_as_its_header_ends_is_trained_completely(answer):
    chat = Chat(small_tokenizer(more=["\n\n"]), CHATML_UNMARKED)
    assert len(chat.tokenizer("\n\n")["input_ids"]) == 1
    row = chat.render(talk("Hi", answer, "Hi", answer), "assistant")
    assert trained_texts(chat, row) == [f"{answer}<|im_end|>"] * 2
    prompt = chat.prompt(talk("Hi"))
    assert row.ids[: len(prompt)] == prompt
    assert row.trained.index(True) == len(prompt)


SAID = st.characters(codec="utf-8")
"""What can be said: no half characters."""


@settings(deadline=None, max_examples=25)
@given(st.lists(st.text(SAID), min_size=2, max_size=6), st.booleans())
def test_exactly_the_answers_are_trained(contents, marked):
    chat = CHATML if marked else UNMARKED
    row = chat.render(talk(*contents), "assistant")
    assert trained_texts(chat, row) == [f"{said}<|im_end|>" for said in contents[1::2]]


def test_the_tokens_that_stop_an_answer_are_the_ends_of_text_and_turn():
    tokenizer = small_tokenizer()
    ends = tokenizer.convert_tokens_to_ids(["</s>", "<|im_end|>"])
    assert load_chat(tokenizer, "chatml").stop_ids == sorted(ends)
    assert load_chat(tokenizer, "plain").stop_ids == ends[:1]
    assert load_chat(tokenizer, None).stop_ids == ends[:1]


NO_HEADER = (
    "{% for m in messages %}{% if m.role == 'user' %}Hi {{ m.content }} Bye"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)
OPENS_A_THOUGHT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n</think>\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
TWICE_OVER_SLICES = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages[::-1] %}{% if m.role == 'user' %}{% set x = m %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{% for word in m.content.split() %}{{ word }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DATED = "{{ strftime_now('%d %b %Y') }}\n" + CHATML_UNMARKED
READS_WHAT_IT_WROTE = (
    "{% set all %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}"
    "{{ all | length }}" + CHATML_UNMARKED
)
SHAPES = {
    "a turn that repeats the header or the question": (CHATML_UNMARKED,
        talk("Hi", "Hi", "Hi", "assistant\nHi"), ["Hi<|im_end|>", "assistant\nHi<|im_end|>"]),
    "content that ends in white space": (CHATML_UNMARKED,
        talk("Hi", "Hello \n\n"), ["Hello \n\n<|im_end|>"]),
    "no header: all that the turn writes": (NO_HEADER, TWO_TURNS,
        [" Hello there </s>", " The answer is four </s>"]),
    "a header that opens a thought where the turn has none": (OPENS_A_THOUGHT,
        talk("Hi", "<tiny> Hello", "Bye", "Bye"),
        ["<tiny> Hello<|im_end|>", "</think>\nBye<|im_end|>"]),
    "two loops over slices": (TWICE_OVER_SLICES,
        talk("Hi", "Hello there", system="Bye"), ["Hellothere<|im_end|>"]),
    "a date, which is fixed": (DATED, talk("Hi", "Hello"), ["Hello<|im_end|>"],
        "26 Jul 2024\n<|im_start|>"),
    "what it wrote is read": (READS_WHAT_IT_WROTE, talk("Hi", "Hello"), ["Hello<|im_end|>"],
        "7<|im_start|>user"),
}  # fmt: skip
"""Templates, what they train, and how some rows begin."""


@pytest.mark.parametrize("name", SHAPES)
def test_exactly_what_the_assistant_says_is_trained_whatever_the_template(name):
    template, sample, trained, *begins = SHAPES[name]
    chat = chat_of(template)
    row = chat.render(sample, "assistant")
    assert trained_texts(chat, row) == trained
    assert chat.tokenizer.decode(row.ids).startswith("".join(begins))


def test_a_token_across_the_end_of_the_header_is_cut_there():
    """Serving ends the prompt at the header, so a model can never say such a token."""
    tokenizer = small_tokenizer()
    tokenizer.add_tokens(["assistant\nHello"])
    chat = Chat(tokenizer, CHATML_UNMARKED)
    row = chat.render(talk("Hi", "Hello there"), "assistant")
    assert trained_pieces(chat, row) == [["Hello", " there", "<|im_end|>"]]
    assert row.ids[: row.trained.index(True)] == chat.prompt(talk("Hi"))


def test_a_header_that_cannot_be_cut_off_is_refused_with_both_texts():
    tokenizer = small_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.backend_tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.add_tokens(["assistant\nHello"])
    chat = Chat(tokenizer, CHATML_UNMARKED)
    with pytest.raises(FinetuneError, match="ends inside a token; tokenized as one text the chat"):
        chat.render(talk("Hi", "Hello there"), "assistant")


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("name", ["chatml", "plain"])
def test_a_built_in_template_begins_with_bos_exactly_where_the_tokenizer_does(name, adds_bos):
    chat = load_chat(small_tokenizer(adds_bos=adds_bos), name)
    ids = chat.render(TWO_TURNS, "assistant").ids
    bos = chat.tokenizer.convert_tokens_to_ids("<s>")
    assert (ids[0] == bos, ids.count(bos)) == ((True, 1) if adds_bos else (False, 0))


@pytest.mark.parametrize(
    ("adds_bos", "text"),
    [(False, "Hello there"), (True, "Hello there"), (True, "<s>Hello there</s>")],
)
def test_text_is_trained_completely_with_its_end_and_no_second_bos(adds_bos, text):
    chat = Chat(small_tokenizer(adds_bos=adds_bos), None)
    bos = ["<s>"] if adds_bos else []
    for train_on in ("assistant", "all"):
        row = chat.render(Text(text), train_on)
        assert trained_pieces(chat, row) == [[*bos, "Hello", " there", "</s>"]]


def test_what_a_tokenizer_adds_before_texts_is_added_without_a_bos():
    """As in GLM-4, whose texts begin with `[gMASK]<sop>`."""
    tokenizer = small_tokenizer(special=["[gMASK]", "<sop>", *SPECIAL])
    prefix = [(each, tokenizer.convert_tokens_to_ids(each)) for each in ("[gMASK]", "<sop>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="[gMASK] <sop> $A", special_tokens=prefix
    )
    tokenizer.bos_token = None
    chat = load_chat(tokenizer, "chatml")
    expected = tokenizer("Hello there")["input_ids"]
    row = chat.render(Text("Hello there"), "assistant")
    assert row.ids == [*expected, tokenizer.eos_token_id]
    assert chat.render(Text("[gMASK]<sop>Hello there"), "assistant").ids == row.ids
    assert chat.render(Completion("Hello", " there"), "completion").ids == row.ids
    assert chat.prompt(Completion("Hello there", "")) == expected
    assert "no_bos" in chat.render(TWO_TURNS, "assistant").notes
    assert not chat.render(Completion("", "there"), "completion").notes


def test_only_the_completion_is_trained_and_one_without_a_prompt_noted():
    chat = Chat(small_tokenizer(adds_bos=True), None)
    sample = Completion("What is two and two", " four")
    row = chat.render(sample, "completion")
    assert chat.tokenizer.decode(row.ids) == "<s>What is two and two four</s>"
    assert trained_pieces(chat, row) == [[" four", "</s>"]]
    assert row == chat.render(sample, "assistant")
    assert all(chat.render(sample, "all").trained)
    assert chat.prompt(sample) == row.ids[:-2]
    assert not row.notes
    alone = Chat(small_tokenizer(), None).render(Completion("", "Hello"), "completion")
    assert alone.notes == {"unasked"}


def test_a_prompt_that_ends_in_a_space_is_tokenised_as_it_is_served():
    chat = Chat(small_tokenizer(), None)
    row = chat.render(Completion("The answer ", "four"), "completion")
    pieces = [chat.tokenizer.decode([token]) for token in row.ids]
    assert pieces == ["The", " answer", " ", "four", "</s>"]
    assert trained_pieces(chat, row) == [["four", "</s>"]]


MARKED = "{% generation %}{{ m.content }}{% endgeneration %}"
BOT = CHATML_UNMARKED.replace("<|im_start|>assistant\n{% endif", "### Bot:{% endif")
UNMARKABLE = {
    "a header without a generation prompt": (
        CHATML_UNMARKED.partition("{% if add_generation_prompt")[0],
        "it begins an assistant turn with '<|im_start|>assistant' and writes no generation "
        "prompt, so the turn cannot be marked: got '<|im_start|>assistant\\nHello<|im_end|>\\n'; "
        "add {% if add_generation_prompt %} with that header"),
    "a generation prompt that turns do not begin with": (BOT,
        "its generation prompt is '### Bot:', but the assistant turn is "
        "'<|im_start|>assistant\\nHello<|im_end|>\\n', so the turn cannot be marked"),
    "a turn that does not end in an end token": (CHATML_UNMARKED.replace("<|im_end|>", "##"),
        "the assistant turn '<|im_start|>assistant\\nHello##\\n' closes with '#', which is not "
        "an end token of this tokenizer, so a model could not learn to stop; end it with {{ "
        "eos_token }} (as the built-in 'plain' does) or add the token to the tokenizer"),
    "marks that skip the assistant": (CHATML_UNMARKED.replace("{{ m.content }}<|im_end|>",
        f"{{% if m.role == 'user' %}}{MARKED}<|im_end|>"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}"),
        "it has {% generation %} marks, but none in the assistant turn "
        "'<|im_start|>assistant\\nHello<|im_end|>'"),
    "a refusal of the template": ("{{ raise_exception('roles must alternate') }}",
        "it refuses this conversation (user, assistant): roles must alternate"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNMARKABLE)
def test_what_cannot_be_marked_is_refused_with_the_texts(name):
    template, told = UNMARKABLE[name]
    assert refusal(chat_of(template), talk("Hi", "Hello")) == f"chat template: {told}"


def test_marks_without_the_end_token_and_what_is_not_jinja_are_refused():
    marked = CHATML_UNMARKED.replace("{{ m.content }}", MARKED)
    told = refusal(chat_of(marked), talk("Hi", "Hello"))
    assert "closes with 'Hello', which is not an end token" in told
    told = refusal(chat_of("{% for m in %}"), talk("Hi", "Hello"))
    assert told.startswith("chat template: it is not valid Jinja: ")


def test_a_template_whose_tokens_are_not_there_is_refused(tmp_path):
    with pytest.raises(FinetuneError, match="it has no end-of-sequence token"):
        Chat(small_tokenizer(eos=None), None).render(Text("Hi"), "all")
    assert "'plain' needs an end-of-sequence token" in load_error(
        small_tokenizer(eos=None), "plain"
    )
    assert load_error(small_tokenizer(special=SPECIAL[:1]), "chatml") == (
        "model.chat_template: 'chatml' needs <|im_end|>, which the tokenizer does not have as "
        "tokens; use 'plain'"
    )
    (tmp_path / "latin.jinja").write_bytes(b"{# caf\xe9 #}")
    told = load_error(small_tokenizer(), str(tmp_path / "latin.jinja"))
    assert "latin.jinja cannot be read: 'utf-8' codec can't decode byte 0xe9" in told


def test_a_template_is_a_built_in_one_or_comes_from_a_file_or_from_the_tokenizer(tmp_path):
    assert load_error(small_tokenizer(), "chatlm") == (
        "model.chat_template: 'chatlm' is neither a file nor a built-in template; did you mean "
        "'chatml'? (built in: chatml, plain)"
    )
    path = tmp_path / "own.jinja"
    path.write_text(CHATML_UNMARKED, encoding="utf-8-sig")  # the mark is not part of it
    tokenizer = small_tokenizer()
    assert load_chat(tokenizer, str(path)).template == CHATML_UNMARKED
    assert load_chat(tokenizer, None).template is None
    tokenizer.chat_template = CHATML_UNMARKED
    assert load_chat(tokenizer, None).template == CHATML_UNMARKED


ENDS = {
    "google-gemma-2-2b-it": "<end_of_turn>",
    "meta-llama-Llama-3.1-8B-Instruct": "<|eot_id|>",
    "meta-llama-Llama-3.2-3B-Instruct": "<|eot_id|>",
    "microsoft-Phi-3.5-mini-instruct": "<|end|>",
    "mistralai-Mistral-Nemo-Instruct-2407": "</s>",
}
THOUGHT = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("name", MARKS)
def test_real_templates_train_what_was_said_token_by_token(assets, name):
    chat = real_chat(assets, name)
    row = chat.render(talk("Hi", "Hello there", "2+2?", "It is 4."), "assistant")
    end = ENDS.get(name, "<|im_end|>")
    thought = ["<think>", "\n\n", "</think>", "\n\n"] if name == "qwen3" else []
    first, last = ["Hello", " there"], ["It", " is", " ", "4", "."]
    if name.startswith("mistral"):
        first, last = ([each.strip() for each in pieces] for pieces in (first, last))
    assert trained_pieces(chat, row) == [[*first, end], [*thought, *last, end]]
    completion = chat.render(talk("Hi", "Hello there", "2+2?", "It is 4."), "completion")
    assert completion.ids == row.ids
    assert trained_pieces(chat, completion) == [[*thought, *last, end]]
    bos = chat.tokenizer.bos_token_id
    assert row.ids.count(bos) == (1 if chat.tokenizer.bos_token and "Phi" not in name else 0)


@pytest.mark.parametrize("name", MARKS)
def test_real_templates_are_trained_from_where_serving_asks(assets, name):
    """The prompt of each turn, rendered and tokenised by itself, ends where training begins."""
    chat = real_chat(assets, name)
    sample = talk("Hi", "Hello there", "2+2?", "It is 4.", "Why?", "Because.")
    row = chat.render(sample, "assistant")
    starts = [i for i in range(1, len(row.ids)) if row.trained[i] and not row.trained[i - 1]]
    for start, turn in zip(starts, (1, 3, 5), strict=True):
        served = chat.tokenizer.apply_chat_template(
            list(sample.messages[:turn]), chat_template=chat.template, return_dict=False,
            add_generation_prompt=True,
        )  # fmt: skip
        if "3.2" in name:  # it writes the date of the day
            served = chat.prompt(Conversation(sample.messages[:turn]))
        assert row.ids[:start] == served


@pytest.mark.parametrize("name", MARKS)
def test_real_tool_calls_are_trained_and_their_results_are_not(assets, name):
    path = assets / "data/llamafactory_demo/glaive_toolcall_en_demo.json"
    sample = read_row("sharegpt", json.loads(path.read_text())[0])
    assert isinstance(sample, Conversation)
    chat = real_chat(assets, name)
    if name in NO_TOOLS:
        with pytest.raises(FinetuneError, match=r"it (leaves out the tool|refuses this)"):
            chat.render(sample, "assistant")
        return
    said = [m["content"] for m in sample.messages if m["role"] == "assistant" and m["content"]]
    end = ENDS.get(name, "<|im_end|>")
    arguments = '{"ingredients": ["chicken", "bell peppers", "rice"]}'
    call = f'{{"name": "search_recipes", "arguments": {arguments}}}'
    tagged = f"<tool_call>\n{call}\n</tool_call>"
    call = {
        "meta-llama-Llama-3.1-8B-Instruct": call.replace("arguments", "parameters"),
        "meta-llama-Llama-3.2-3B-Instruct": call.replace("arguments", "parameters"),
        "mistralai-Mistral-Nemo-Instruct-2407": f'[TOOL_CALLS] [{call[:-1]}, "id": "call00000"}}]',
        "plain": f"<tool_call>{call}</tool_call>",
    }.get(name, tagged)
    last = (THOUGHT if name == "qwen3" else "") + said[2]
    row = chat.render(sample, "assistant")
    assert trained_texts(chat, row) == [f"{text}{end}" for text in (said[0], call, said[1], last)]


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "completion", "pieces"),
    [
        ("gpt2", "Q: 2+2?\nA:", " 4", [" 4", "<|endoftext|>"]),
        ("gpt2", "Q: 2+2?\nA: ", "4", ["4", "<|endoftext|>"]),
        ("qwen3", "A:\n", "\nHello", ["\n", "Hello", "<|im_end|>"]),
        ("mistral-v3", "Q: 2+2?\nA:", " four", ["four", "</s>"]),
        ("mistral-v3", "def f", "our", ["our", "</s>"]),
        ("mistral-v3", "x = [", "1]", ["1", "]", "</s>"]),
        ("stories260K", "Once", " upon", ["upon", "</s>"]),
    ],
)
def test_completions_of_real_tokenizers_are_trained_completely(
    assets, tokenizer, prompt, completion, pieces
):
    real = real_tokenizer(assets, tokenizer)
    chat = load_chat(real, None)
    row = chat.render(Completion(prompt, completion), "completion")
    assert trained_pieces(chat, row) == [pieces]
    assert real.decode(row.ids, skip_special_tokens=True) == prompt + completion
    assert row.ids[: row.trained.index(True)] == real(prompt)["input_ids"]


GLM = (
    "{% for m in messages %}{{ '<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>' }}\n"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}\n"
    "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_turn_that_ends_with_the_next_role_s_mark_is_trained_with_it(tmp_path):
    """If the model's own settings stop there, as in GLM; the last turn gets the mark."""
    marks = ("<|user|>", "<|assistant|>", "<|observation|>", "</tool_call>")
    tokenizer = small_tokenizer(special=(*SPECIAL, *marks))
    tokenizer.save_pretrained(tmp_path)
    chat = Chat(AutoTokenizer.from_pretrained(tmp_path), GLM)
    assert "closes with ' there', which is not an end token" in refusal(chat, TWO_TURNS)
    ends = tokenizer.convert_tokens_to_ids(["</s>", "<|user|>", "<|observation|>"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    chat = Chat(AutoTokenizer.from_pretrained(tmp_path), GLM)
    row = chat.render(TWO_TURNS, "assistant")
    assert trained_texts(chat, row) == ["\nHello there<|user|>", "\nThe answer is four<|user|>"]
    assert chat.tokenizer.decode(row.ids).count("<|user|>") == 3
    assert not chat.tokenizer.decode(chat.render(TWO_TURNS, "all").ids).endswith("<|user|>")
    assert chat.stop_ids == sorted(ends[:2])
    call = {
        "id": "call00000",
        "type": "function",
        "function": {"name": "add", "arguments": {"to": "two"}},
    }
    asks = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": "four", "tool_call_id": "call00000"}
    row = chat.render(Conversation((*TWO_TURNS.messages[:1], asks, result, {**asks})), "assistant")
    called = "<tool_call>add\n<arg_key>to</arg_key>\n<arg_value>two</arg_value>\n</tool_call>"
    assert trained_texts(chat, row) == [f"\n{called}<|observation|>"] * 2
