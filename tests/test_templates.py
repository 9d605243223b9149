"""Chat templates in the manner of public ones: each says what the row says, or is refused."""

import dataclasses
from typing import Any

import pytest
from chats import load_error, refusal, trained_texts
from prepared import ready, recipe_of, write_rows
from small_tokenizer import small_tokenizer
from transformers import AutoTokenizer

from finetune.data.audit import describe
from finetune.data.chat.chat_templates import template_variables, with_defaults
from finetune.data.chat.render import Chat, load_chat
from finetune.data.formats import Conversation, Text, read_row
from finetune.data.rows.encode import Chunk, Encoder
from finetune.errors import FinetuneError
from finetune.methods.sft import SFT

HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
ARGUMENTS = "{{ c.function.arguments | tojson }}"


def loop(turn: str) -> str:
    return "{% for m in messages %}" + turn + "{% endfor %}" + HEADER


CHATML = loop(TURN)
CALL = "<call>{{ c.function.name }} " + ARGUMENTS + "</call>"
CALLS = CHATML.replace(
    "<|im_end|>", "{% for c in m.tool_calls or [] %}" + CALL + "{% endfor %}<|im_end|>"
)
LISTED = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {
    "name": "get_weather", "description": "Weather of a city.", "parameters": PARAMETERS,
}  # fmt: skip
TOOL = {"type": "function", "function": FUNCTION}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def says(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(arguments: Any, identity: str = "abcdef123") -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": identity, "type": "function", "function": function}


def result(content: str, identity: str = "abcdef123") -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": identity}


def sample_of(*messages: dict[str, Any], tools: list[Any] | None = None) -> Conversation:
    sample = read_row("messages", {"messages": list(messages), "tools": tools})
    assert isinstance(sample, Conversation)
    return sample


TALK = sample_of(user("Hi"), says("Hello there"), user("Name a colour"), says("red"))
WEATHER = sample_of(
    user("Weather in Oslo"), says("", tool_calls=[call('{"city":"Oslo"}')]), result("rain"),
    says("cold rain"),
)  # fmt: skip
OPEN = sample_of(user("Hi"), says("Hello", reasoning_content="A fast one."))
INLINE = sample_of(user("Hi"), says("<think>\nA fast one.\n</think>\n\nHello"))
HISTORY = sample_of(
    user("Hi"), says("<think>\nfast\n</think>\n\nHello"),
    user("Bye"), says("<think>\nslow\n</think>\n\nBye"),
)  # fmt: skip


def chat_of(template: str, *more: str, **variables: Any) -> Chat:
    tokenizer = small_tokenizer()
    tokenizer.add_tokens(list(more), special_tokens=True)
    return load_template(tokenizer, template, variables)


def load_template(tokenizer: Any, template: Any, variables: dict[str, Any]) -> Chat:
    tokenizer.chat_template = template
    return load_chat(tokenizer, None, variables)


def said(chat: Chat, sample: Conversation) -> list[str]:
    """The trained texts, of a row whose text is the one of transformers."""
    row = chat.render(sample, "assistant")
    template = chat.tool_template if sample.tools and chat.tool_template else chat.template
    theirs = chat.tokenizer.apply_chat_template(
        list(sample.messages), tools=list(sample.tools) or None, chat_template=template,
        tokenize=False, **{**chat.variables, **sample.template_kwargs},
    )  # fmt: skip
    if "strftime_now" not in str(template):
        assert chat.tokenizer.decode(row.ids) == theirs
    return trained_texts(chat, row)


NUMBERS = loop(TURN).replace("m in messages", "i in range(messages|length)")
NUMBERS = NUMBERS.replace("<|im_start|>{{ m", "{% set m = messages[i] %}<|im_start|>{{ m", 1)
SLICED = (
    "{% set rest = messages[1:] %}{{ messages[0].content }}\n"
    "{% for i in range(rest|length) %}<|im_start|>{{ rest[i]['role'] }}\n{{ rest[i].content }}"
    "<|im_end|>\n{% endfor %}" + HEADER
)
MEASURED = (
    "{% macro clean(text) %}{% for part in text.split('<cut>') %}{{ part }}{% endfor %}"
    "{% endmacro %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set x %}{{ clean(m.content) }}{% endset %}"
    "{{ x }}{{ '' if x | trim else 'nothing' }}<|im_end|>\n{% endfor %}" + HEADER
)
IN_A_MACRO = (
    "{% macro talk(all) %}{% for m in all %}" + TURN + "{% endfor %}{% endmacro %}"
    "{{ talk(messages) }}" + HEADER
)
RECURSIVE = CHATML.replace("in messages", "in messages recursive")
REBUILT = (
    "{% set ns = namespace(all=[]) %}{% for m in messages %}{% set ns.all = ns.all + "
    "[{'role': m.role, 'content': m.content}] %}{% endfor %}"
    "{% for m in ns.all %}" + TURN + "{% endfor %}" + HEADER
)
LATE_EOS = IN_A_MACRO.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
PROMPT_IN_THE_LOOP = (
    "{% for m in messages %}" + TURN + "{% if loop.last and add_generation_prompt %}"
    "<|im_start|>assistant\n{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    "template",
    [
        CHATML, NUMBERS, SLICED, MEASURED, IN_A_MACRO, RECURSIVE, REBUILT, LATE_EOS,
        PROMPT_IN_THE_LOOP,
    ],
)  # fmt: skip
def test_turns_are_found_however_a_template_walks_over_them(template):
    assert said(chat_of(template), TALK) == ["Hello there<|im_end|>", "red<|im_end|>"]


def test_a_template_without_turns_is_blamed_instead_of_the_data():
    template = "{% filter trim %}" + CHATML.partition(HEADER)[0] + "{% endfilter %}\n" + HEADER
    message = refusal(chat_of(template), sample_of(user("Hi"), says("Hello")))
    assert message.startswith("chat template: its assistant turns cannot be located in ")
    assert "take it out of the data" not in message


def test_a_header_that_depends_on_the_messages_is_the_one_that_serving_puts_there():
    template = (
        "{% set mode = namespace(short=false) %}{% for m in messages %}"
        "{% if m.role == 'system' %}{% set mode.short = '/short' in m.content %}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ '<think></think>' if m.role == 'assistant' and mode.short }}"
        "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
        "<|im_start|>assistant\n{{ '<think></think>' if mode.short }}{% endif %}"
    )
    chat = chat_of(template)
    quick = sample_of({"role": "system", "content": "/short"}, user("Hi"), says("Hello"))
    assert said(chat, quick) == ["Hello<|im_end|>"]
    assert said(chat, TALK)[0] == "Hello there<|im_end|>"


DEEPSEEK = (
    "{% set ns = namespace(tool=false) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.tool = false %}<|User|>{{ m.content }}"
    "{% elif m.role == 'tool' %}{% set ns.tool = true %}<|out|>{{ m.content }}"
    "{% elif m.tool_calls %}<|Assistant|>{{ m.content }}{% for c in m.tool_calls %}"
    "{{ '<|call|>' + c.function.name + '\n' + c.function.arguments }}{% endfor %}<|end|>"
    "{% else %}{{ '<|outs|>' if ns.tool else '<|Assistant|>' }}{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if ns.tool %}<|outs|>{% elif add_generation_prompt %}<|Assistant|>{% endif %}"
)
DEEPSEEK_TOKENS = ("<|User|>", "<|Assistant|>", "<|out|>", "<|outs|>", "<|call|>", "<|end|>")


def test_an_answer_to_a_tool_begins_behind_the_prompt_of_that_place():
    assert said(chat_of(DEEPSEEK, *DEEPSEEK_TOKENS), TALK) == ["Hello there<|end|>", "red<|end|>"]
    chat = chat_of(DEEPSEEK, *DEEPSEEK_TOKENS)
    call = '<|call|>get_weather\n{"city":"Oslo"}<|end|>'
    assert trained_texts(chat, chat.render(WEATHER, "assistant")) == [call, "cold rain<|end|>"]


@pytest.mark.parametrize("name", ["chatml", "plain"])
def test_thoughts_that_a_template_does_not_write_are_refused(name):
    assert refusal(load_chat(small_tokenizer(), name), OPEN) == (
        "chat template: it leaves out the thoughts of message 1 (reasoning_content) (assistant: "
        "'Hello'); take it out of the data, or set model.chat_template to a template that writes it"
    )


CUTTING = CHATML.replace("m.content", "m.content.split('</think>')[-1].lstrip()")
CUTTING_HISTORY = CUTTING.replace(
    "{{ m.content.split('</think>')[-1].lstrip() }}",
    "{{ m.content if loop.last else m.content.split('</think>')[-1].lstrip() }}",
)


def test_thoughts_that_a_template_cuts_are_refused_or_of_earlier_turns_only_noted():
    for sample in (INLINE, HISTORY):
        assert "it leaves out the thoughts of message 1" in refusal(chat_of(CUTTING), sample)
    chat = chat_of(CUTTING_HISTORY)
    row = chat.render(HISTORY, "assistant")
    last = "<think>\nslow\n</think>\n\nBye<|im_end|>"
    assert trained_texts(chat, row) == ["Hello<|im_end|>", last]
    assert row.notes == {"history_thoughts"}
    assert chat.render(INLINE, "assistant").notes == set()


def test_a_mark_of_thoughts_inside_a_sentence_is_not_the_end_of_a_thought():
    prose = says("The mark </think> ends it")
    moving = CHATML.replace(
        "{{ m.content }}",
        "{% if '</think>' in m.content %}<think>{{ m.content.split('</think>')[0] }}</think>\n"
        "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}",
    )
    asks = user("Which mark?")
    for template in (moving, CUTTING, CUTTING_HISTORY):
        for after in ([], [user("Bye"), says("Bye")]):
            if template == CUTTING_HISTORY and not after:
                continue
            message = refusal(chat_of(template), sample_of(asks, prose, *after))
            assert "it leaves out message 1 (assistant: 'The mark </think> ends it')" in message
    assert said(chat_of(CHATML), sample_of(asks, prose)) == ["The mark </think> ends it<|im_end|>"]
    twice = says("<think>\nfast\n</think>\n\nThe mark </think> ends it")
    sample = sample_of(asks, twice, user("Bye"), says("Bye"))
    assert "it leaves out message 1" in refusal(chat_of(CUTTING_HISTORY), sample)
    for thought, answer in (
        ("fast\n", "\n\nHello"), ("It is 4.", "It is 4"), ("Two. ", " Two"), ("so 4", "Four"),
    ):  # fmt: skip
        opened = sample_of(asks, says(f"{thought}</think>{answer}"))
        told = f"<think>{thought}</think>\n{answer}<|im_end|>"
        assert said(chat_of(moving), opened) == [told]


def test_thoughts_in_other_tags_and_with_other_white_space_are_found():
    moved = CHATML.replace(
        "{{ m.content }}",
        "{% if '</think>' in m.content %}[THINK]{{ m.content.split('</think>')[0].split('<think>')"
        "[-1].strip() }}[/THINK]{{ m.content.split('</think>')[-1].strip() }}{% else %}"
        "{{ m.content }}{% endif %}",
    )
    assert said(chat_of(moved), INLINE) == ["[THINK]A fast one.[/THINK]Hello<|im_end|>"]


@pytest.mark.parametrize(
    ("change", "sample", "left_out"),
    [
        ("m.content if not m.tool_calls",
            sample_of(user("Weather"), says("4", tool_calls=[call({"city": 4})])),
            "the text of message 1 next to its tool calls (assistant: '4')"),
        ("m.content if m.role != 'tool'", WEATHER, "message 2 (tool: 'rain')"),
        ("m.content[:8]", sample_of(user("Name a colour, fast or slow"), says("red")),
            "message 0 (user: 'Name a colour, fast or slow')"),
        ("m.content | upper", TALK, "message 0 (user: 'Hi')"),
        ("'Hi' if m.role == 'assistant' else m.content", sample_of(user("Hi"), says("a")),
            "message 1 (assistant: 'a')"),
    ],
)  # fmt: skip
def test_what_a_template_leaves_out_or_changes_is_refused(change, sample, left_out):
    template = CALLS.replace("{{ m.content }}", "{{ " + change + " }}")
    assert f"it leaves out {left_out}" in refusal(chat_of(template), sample)


def test_a_short_message_that_is_lost_is_not_mistaken_for_the_same_letters_elsewhere():
    template = CHATML.replace("in messages", "in messages if m.role != 'system'")
    sample = sample_of({"role": "system", "content": "a"}, user("a cat"), says("a"))
    assert "it leaves out message 0 (system: 'a')" in refusal(chat_of(template), sample)


@pytest.mark.parametrize(
    "detail",
    [
        {"description": "The name of a town"}, {"enum": ["Oslo", "Bergen"]},
        {"default": 'Oslo "by"'}, {"type": "array", "items": {"enum": ["Bergen"]}},
        {"type": "object", "properties": {"postcode": {"type": "integer"}}},
    ],
)  # fmt: skip
def test_details_of_tools_that_a_template_leaves_out_are_counted(detail):
    parameters = {"type": "object", "properties": {"city": detail}}
    tool = {"type": "function", "function": FUNCTION | {"parameters": parameters}}
    sample = dataclasses.replace(WEATHER, tools=(tool,))
    names = (
        "{% for t in tools or [] %}{{ t.function.name }} {{ t.function.description }}"
        "{% for p in t.function.parameters.properties %} {{ p }}{% endfor %}\n{% endfor %}" + CALLS
    )
    assert chat_of(names).render(sample, "assistant").notes == {"tool_details"}
    assert chat_of(LISTED + CALLS).render(sample, "assistant").notes == set()


def test_arguments_and_tools_are_looked_for_by_their_parts():
    told = refusal(chat_of(CALLS.replace(ARGUMENTS, "")), WEATHER)
    assert "it leaves out arguments of the tool calls of message 1" in told
    pair = "{% for k, v in c.function.arguments | items %}<{{ k }}>{{ v }}</{{ k }}>{% endfor %}"
    pairs = chat_of(CALLS.replace(ARGUMENTS, pair))
    assert said(pairs, WEATHER)[0] == "<call>get_weather <city>Oslo</city></call><|im_end|>"
    tools = dataclasses.replace(WEATHER, tools=(TOOL,))
    assert "it leaves out the tools (get_weather);" in refusal(chat_of(CALLS), tools)
    bare = chat_of("{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}" + CALLS)
    told = "the description of get_weather, the parameter city of get_weather"
    assert told in refusal(bare, tools)
    for key in ("input_schema", "inputSchema"):  # of Anthropic and MCP
        other = {**FUNCTION, key: PARAMETERS}
        del other["parameters"]
        given = dataclasses.replace(WEATHER, tools=({"type": "function", "function": other},))
        assert "the parameter city of get_weather" in refusal(bare, given)
    whole = LISTED.replace("tojson", "tojson(indent=4)") + CALLS
    assert len(said(chat_of(whole), tools)) == 2


@pytest.mark.parametrize("escape", ["m.content", "m.content | tojson", "m.content | e"])
def test_escaped_texts_are_not_lost(escape):
    sample = sample_of(user('say "Hi" & <Bye>\né'), says('"Hi" <b>\t&'))
    assert len(said(chat_of(CHATML.replace("m.content", escape)), sample)) == 1


def test_arguments_are_text_where_a_template_joins_or_prints_them():
    joined = CALLS.replace(" " + ARGUMENTS, "{{ ' ' + c.function.arguments }}")
    printed = CALLS.replace("c.function.arguments | tojson", "c.function.arguments")
    for template in (joined, printed):
        chat = chat_of(template)
        found = trained_texts(chat, chat.render(WEATHER, "assistant"))
        assert found[0] == '<call>get_weather {"city":"Oslo"}</call><|im_end|>'
    objects = sample_of(user("Weather"), says("", tool_calls=[call({"city": "Oslo"})]))
    chat, told = chat_of(joined), '<call>get_weather {"city": "Oslo"}</call><|im_end|>'
    assert trained_texts(chat, chat.render(objects, "assistant")) == [told]
    assert said(chat_of(CALLS), WEATHER)[0] == told


def test_call_ids_that_a_template_refuses_are_replaced_in_call_and_result():
    strict = CALLS.replace(
        "<call>",
        "{% if c.id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}"
        "<call>{{ c.id }} ",
    ).replace("{{ m.content }}", "{{ m.content }}{{ ' of ' + m.tool_call_id if m.tool_call_id }}")
    sample = sample_of(
        user("Weather"),
        says("", tool_calls=[call("{}", "call_8f2k1"), call("{}", "call00000"), call("{}", "x")]),
        result("sunny", "x"), result("rain", "call_8f2k1"), says("cold"),
    )  # fmt: skip
    chat = chat_of(strict)
    row = chat.render(sample, "assistant")
    text = chat.tokenizer.decode(row.ids)
    assert trained_texts(chat, row)[0] == (
        "<call>call00001 get_weather {}</call><call>call00000 get_weather {}</call>"
        "<call>call00002 get_weather {}</call><|im_end|>"
    )
    assert "sunny of call00002" in text
    assert "rain of call00001" in text
    assert row.notes == {"call_ids"}
    assert chat_of(CALLS).render(sample, "assistant").notes == set()


def named(**templates: str) -> Any:
    tokenizer = small_tokenizer()
    tokenizer.chat_template = dict(templates)
    return tokenizer


RAG = "Rules\n" + CHATML
WITH_TOOLS = LISTED + CALLS


def test_named_templates_are_chosen_by_name_and_tools_have_their_own(tmp_path):
    tools = dataclasses.replace(WEATHER, tools=(TOOL,))
    chat = load_chat(named(default=CHATML, rag=RAG, tool_use=WITH_TOOLS), "rag")
    assert chat.tokenizer.decode(chat.render(TALK, "all").ids).startswith("Rules\n<|im_start|>")
    assert said(chat, tools)[0] == '<call>get_weather {"city": "Oslo"}</call><|im_end|>'
    chat.tokenizer.chat_template = chat.saved
    chat.tokenizer.save_pretrained(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    assert saved.chat_template == {"default": RAG, "rag": RAG, "tool_use": WITH_TOOLS}
    for sample in (TALK, tools):
        ids = saved.apply_chat_template(
            list(sample.messages), tools=list(sample.tools) or None, return_dict=False
        )
        assert ids == chat.render(sample, "all").ids
        assert load_chat(saved, None).render(sample, "all").ids == ids


def test_names_without_a_default_are_listed():
    tokenizer = named(rag=RAG, tool_use=WITH_TOOLS)
    assert load_error(tokenizer, None) == (
        "model.chat_template: the tokenizer has the chat templates 'rag', 'tool_use' and none "
        "called 'default'; choose one of them, such as model.chat_template=rag"
    )
    assert load_error(tokenizer, "rug") == (
        "model.chat_template: 'rug' is neither a file nor a built-in template, nor one of the "
        "tokenizer's ('rag', 'tool_use'); did you mean 'rag'? (built in: chatml, plain)"
    )
    assert load_chat(named(rag=RAG), "chatml").saved == load_chat(small_tokenizer(), "chatml").saved


THINKING = CHATML.replace(
    "assistant\n{% endif %}",
    "assistant\n{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>"
    "\n\n{% endif %}{% endif %}",
).replace("<|im_start|>{{ m.role }}\n", "<|im_start|>{{ m.role }}\n{{ '<think>\n\n</think>\n\n' if "
          "m.role == 'assistant' and loop.last }}")  # fmt: skip


def test_variables_of_a_template_are_those_of_the_recipe_and_then_of_the_row():
    empty = "<think>\n\n</think>\n\n"
    assert said(chat_of(THINKING), TALK)[1] == f"{empty}red<|im_end|>"
    chat = chat_of(THINKING, enable_thinking=False)
    assert said(chat, TALK) == ["Hello there<|im_end|>", "red<|im_end|>"]
    assert chat.tokenizer.decode(chat.prompt(sample_of(user("Hi")))).endswith(empty)
    own = dataclasses.replace(TALK, template_kwargs={"enable_thinking": True})
    assert said(chat, own)[1] == f"{empty}red<|im_end|>"


def test_unknown_variables_are_refused_with_the_known_ones():
    with pytest.raises(FinetuneError) as error:
        chat_of(THINKING, enable_thinkin=False, messages=[])
    assert error.value.problems == (
        "model.chat_template_kwargs: 'messages' is set by the data, not by a variable",
        "model.chat_template_kwargs: the chat template does not read 'enable_thinkin'; did you "
        "mean 'enable_thinking'?; the variables that it reads: enable_thinking",
    )
    own = dataclasses.replace(TALK, template_kwargs={"thinking": True})
    told = "chat_template_kwargs: the chat template does not read 'thinking'"
    assert told in refusal(chat_of(THINKING), own)
    with pytest.raises(FinetuneError, match="the tokenizer has no chat template to read them"):
        load_chat(small_tokenizer(), None, {"enable_thinking": True})


def test_the_variables_of_a_template_are_not_those_that_it_sets():
    template = (
        "{% if not date_string is defined %}{% set date_string = 'x' %}{% endif %}{{ bos_token }}"
        "{% for m in messages %}{% if m.role %}{% set content = m.content %}{% endif %}"
        "{{ content }}{% endfor %}{{ tools }}{{ raise_exception }}{{ date_string }}"
        "{{ style | default('y') }}"
    )
    assert template_variables(template) == {"date_string", "bos_token", "style"}


@pytest.mark.parametrize("start", ["", "\n", "  {% if true %}x{% endif %}", "{#- c #} ", " y"])
def test_a_saved_template_renders_as_training_did_and_takes_other_values(start):
    values = {"n": 3, "on": True, "off": False, "no": None, "of": [1, {"k": "v"}]}
    values["text"] = 'a "b"\n\\ é 😀'
    reads = "{% if on %}1{% endif %}{{ [n, on, off, no, text, of] | tojson }}\n"
    tokenizer = small_tokenizer()
    template = start + reads + CHATML
    saved = with_defaults(template, values)
    messages = [user("Hi")]

    def render(template: str, **more: Any) -> str:
        return str(tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True, **more
        ))  # fmt: skip

    assert render(saved) == render(template, **values)
    assert render(saved, n=4) == render(template, **{**values, "n": 4})
    assert with_defaults(template, {}) == template


def test_the_saved_template_asks_as_training_did(tmp_path):
    chat = chat_of(THINKING, enable_thinking=False)
    chat.tokenizer.chat_template = chat.saved
    chat.tokenizer.save_pretrained(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    ids = saved.apply_chat_template([user("Hi")], add_generation_prompt=True, return_dict=False)
    assert ids == chat.prompt(sample_of(user("Hi")))
    assert load_chat(saved, None).render(TALK, "assistant") == chat.render(TALK, "assistant")


def counted(chat: Chat, *samples: dict[str, Any], data_format: str = "messages") -> dict[str, str]:
    """The counts that are not zero, each with its number and its first row."""
    rows = list(enumerate(samples, 1))
    tally = Encoder(SFT(), chat)(Chunk(0, data_format, "rows.jsonl", rows)).tally
    return {
        name: f"{tally.counts[name]} {place.rpartition(' ')[2]}"
        for name, place in tally.first.items()
    }


def row_of(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": list(messages)}


def test_unusual_rows_are_counted_with_the_first_of_them():
    plain = row_of(user("Hi"), says("Hello"))
    rendered = row_of(user("<|im_start|>user\nHi<|im_end|>"), says("Hello"))
    ended = row_of(user("Hi"), says("Hello<|im_end|>"))
    asked = row_of(user("Hi"), says(""), user("Bye"), says("Bye"))
    chat = load_chat(small_tokenizer(), "chatml")
    assert counted(chat, plain) == {}
    assert counted(chat, plain, rendered, ended, ended, asked) == {
        "markup_asked": "1 2", "markup_said": "2 3", "empty_turns": "1 5",
    }  # fmt: skip
    header = row_of(user("### Assistant:\nHello"), says("Hello"))
    assert counted(load_chat(small_tokenizer(), "plain"), plain, header) == {"markup_asked": "1 2"}
    texts = {"text": "Hi"}, {"text": "Hi</s>Bye"}
    assert counted(chat, *texts, data_format="text") == {"markup_said": "1 2"}


def test_a_bos_that_is_missing_or_there_twice_is_counted():
    plain = row_of(user("Hi"), says("Hello"))
    tokenizer = small_tokenizer(adds_bos=True)
    assert counted(Chat(tokenizer, CHATML), plain) == {"no_bos": "1 1"}
    assert counted(Chat(tokenizer, "{{ bos_token }}" + CHATML), plain) == {}
    assert counted(Chat(tokenizer, "{{ bos_token * 2 }}" + CHATML), plain) == {"two_bos": "1 1"}
    assert counted(Chat(small_tokenizer(), CHATML), plain) == {}
    assert Chat(tokenizer, None).render(Text("Hi"), "all").notes == set()


def test_an_answer_that_lacks_what_the_prompt_opens_is_counted():
    opens = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    chat = chat_of(opens)
    plain = row_of(user("Hi"), says("Hello"))
    thinks = row_of(user("Hi"), says("Hello"), user("Hi"), says("<think>\nfast</think>Hello"))
    bare = row_of(user("Hi"), says("<think>\nfast</think>Hello"))
    assert counted(chat, bare) == {}
    assert counted(chat, plain, thinks) == {"unserved": "2 1"}


RESPONSE = "{% macro response(r) %}<|out|>{{ r }}<|end|>{% endmacro %}"
LOOKING_AHEAD = (
    "{% for m in messages %}{% if m.role != 'tool' %}"
    "{% if m.role == 'user' %}<|User|>{{ m.content }}<|Assistant|>{% else %}"
    "{% for c in m.tool_calls or [] %}<|call|>{{ c.function.name }} " + ARGUMENTS + "<|end|>"
    "{% endfor %}"
    "{% for r in m.tool_responses or [] %}<|out|>{{ r.name }} {{ r.response }}<|end|>{% endfor %}"
    "{% set ns = namespace(done=not m.tool_calls) %}"
    "{% for k in range(loop.index0 + 1, messages | length) %}"
    "{% if messages[k].role != 'tool' %}{% set ns.done = true %}{% elif not ns.done %}"
    "{{ response(messages[k].content) }}{% endif %}{% endfor %}"
    "{{ m.content }}{{ '<|outs|>' if m.content }}{% endif %}{% endif %}{% endfor %}"
)  # fmt: skip
IN_ONE_MACRO = (
    "{% macro rest(at) %}{% for k in range(at, messages | length) %}"
    "{% if messages[k].role != 'tool' %}{% break %}{% endif %}{{ response(messages[k].content) }}"
    "{% endfor %}{% endmacro %}"
)
CALLED = '<|call|>get_weather {"city": "Oslo"}<|end|>'


@pytest.mark.parametrize("hidden", [False, True])
def test_results_that_a_template_writes_inside_the_turn_of_a_call_are_not_trained(hidden):
    template = RESPONSE + LOOKING_AHEAD
    if hidden:
        start = template.index("{% set ns = namespace")
        end = template.index("{{ m.content }}{{ '<|outs|>'")
        after = "{{ rest(loop.index) if m.tool_calls }}"
        template = (
            RESPONSE + IN_ONE_MACRO + template[len(RESPONSE) : start] + after + template[end:]
        )
    chat = chat_of(template, *DEEPSEEK_TOKENS)
    twice = [call({"city": "Oslo"}), call({"city": "Oslo"}, "abcdef124")]
    sample = sample_of(
        user("Weather"), says("", tool_calls=twice), result("rain"), result("rain", "abcdef124"),
        says("", tool_calls=twice[:1]), result("cold"), says("cold rain"),
    )  # fmt: skip
    assert said(chat, sample) == [CALLED * 2, CALLED, "cold rain<|outs|>"]


def test_results_in_a_message_of_the_assistant_are_not_trained():
    chat = chat_of(RESPONSE + LOOKING_AHEAD, *DEEPSEEK_TOKENS)
    native = [{"name": "get_weather", "response": "rain"}]
    calls = says("cold rain", tool_calls=[call({"city": "Oslo"})], tool_responses=native)
    assert said(chat, sample_of(user("Weather"), calls)) == [CALLED, "cold rain<|outs|>"]


@pytest.mark.parametrize("template", [CHATML, NUMBERS, MEASURED, IN_A_MACRO, PROMPT_IN_THE_LOOP])
@pytest.mark.parametrize("train_on", ["assistant", "completion", "all"])
def test_a_chunk_gives_the_rows_that_its_samples_give_one_by_one(template, train_on):
    contents = ["Hi", " Hello", "\n\nBye ", "é😀", "", "a\nb", "four <|im_end|>", "\u00a0x"]
    samples = [
        sample_of(user(contents[i % 8]), says(contents[(i * 3 + 1) % 8]), user("Hi"), says("4"))
        for i in range(16)
    ]
    chat, other = chat_of(template), chat_of(template)
    with chat.ahead(samples):
        rows = [chat.render(sample, train_on) for sample in samples]
    assert rows == [other.render(sample, train_on) for sample in samples]


def test_left_out_thoughts_and_a_fixed_date_are_reported_with_the_first_row(tmp_path):
    source = write_rows(tmp_path / "rows.jsonl", [{"messages": list(HISTORY.messages)}])
    chat = chat_of("{{ strftime_now('%Y') }}" + CUTTING_HISTORY)
    prepared = ready(recipe_of(source, "messages"), tmp_path / "cache", chat)
    told = "\n".join(describe(prepared.counts["train"]))
    left_out = "1 with thoughts in earlier turns that the template leaves out"
    assert f"{left_out} (first: {source} row 1)" in told
    assert "the chat template writes the current date" in told
