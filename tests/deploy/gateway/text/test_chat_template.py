"""Chat templates: those of models, in a sandbox, with the globals that templates expect."""

import json
from pathlib import Path

import pytest

from longshore.deploy.gateway.text.chat_template import (
    MAX_TEMPLATE_CHARACTERS,
    PLAIN_TEMPLATE,
    ChatTemplate,
    TemplateRejected,
)
from longshore.deploy.gateway.text.tokenizer import check_text_files, load_tokenizer
from longshore.protocol.errors import ConfigError
from tests.deploy.tiny_tokenizer import BOS_ID, EOS_ID, save_tokenizer

CHAT = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Here."}]


def test_messages_are_rendered_up_to_where_the_answer_begins(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    text = tokenizer.chat_template.render(CHAT)
    assert text == "<s>[user]Where?</s>[assistant]Here.</s>[assistant]"
    token_ids = tokenizer.encode_rendered(text)
    assert token_ids.count(BOS_ID) == 1
    assert token_ids.count(EOS_ID) == 2


def test_folder_without_template_gets_the_plain_one_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tokenizer(tmp_path, chat_template=None)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.chat_template.render(CHAT) == "<s>user: Where?\nassistant: Here.\nassistant:"
    assert "has no chat template" in caplog.text


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% if tools is not none %}tools{% endif %}", ""),
        ("{% if documents is none %}none{% endif %}", "none"),
        ("a{% generation %}{{ messages[0].content }}{% endgeneration %}b", "aWhere?b"),
        ("{% for i in [1, 2] %}{% break %}{% endfor %}ok", "ok"),
    ],
)
def test_templates_find_what_transformers_gives_them(source: str, expected: str) -> None:
    assert ChatTemplate(source, {}).render(CHAT) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 // 0 }}",
        "{{ messages[9].content }}",
        "{{ 'x' + 1 }}",
        "{{ [] | first + 1 }}",
        "{{ 5 | dictsort }}",
        "{{ 5 | format('a') }}",
    ],
)
def test_template_that_fails_rejects_the_messages(source: str) -> None:
    with pytest.raises(TemplateRejected):
        ChatTemplate(source, {}).render(CHAT)


def test_template_files_override_in_order(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("from the folder")
    override = tmp_path / "mine.jinja"
    override.write_text("from the flag")
    for file, expected in ((None, "from the folder"), (override, "from the flag")):
        tokenizer = load_tokenizer(tmp_path, chat_template_file=file)
        assert tokenizer is not None
        assert tokenizer.chat_template.render(CHAT) == expected


def test_default_one_of_several_named_templates_is_used(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.chat_template.render(CHAT) == "plain"


def test_chats_with_tools_get_the_template_for_them(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    for template in (tokenizer.chat_template, tokenizer.chat_template.twin()):
        assert template.for_tools(None).render(CHAT) == "plain"
        assert template.for_tools([{}]).render(CHAT) == "tools"


def test_folder_without_tokenizer_has_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load_tokenizer(tmp_path) is None
    assert "prompts must be token ids" in caplog.text


def test_template_can_reject_messages() -> None:
    template = ChatTemplate("{{ raise_exception('no system role here') }}", {})
    with pytest.raises(TemplateRejected, match="no system role here"):
        template.render(CHAT)


def test_templates_have_json_dates_and_loop_controls() -> None:
    source = (
        "{{ messages[0] | tojson }}{{ strftime_now('%Y') | length }}"
        "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.role }}"
        "{% endfor %}"
    )
    assert ChatTemplate(source, {}).render(CHAT) == '{"role": "user", "content": "Where?"}4user'


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append('x') }}",
    ],
)
def test_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(TemplateRejected, match=r"unsafe|immutable|not safe"):
        ChatTemplate(source, {}).render(CHAT)


def test_template_that_does_not_compile_is_rejected_at_start() -> None:
    with pytest.raises(ConfigError, match=r"does not compile.*--chat-template"):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% if a %}" * 500 + "{% endif %}" * 500, "recursion"),
        ("{% for a in b %}" * 50 + "{% endfor %}" * 50, "nested blocks"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion"),
        ("{{ 1" + " + 1" * 20_000 + " }}", "recursion"),
        ("{{ " + "1" * 5000 + " }}", "digits"),
        ("{{ a | none }}", "No filter named"),
        ("a" * (MAX_TEMPLATE_CHARACTERS + 1), "the limit is"),
    ],
    ids=["ifs", "loops", "brackets", "sum", "number", "filter", "size"],
)
def test_a_template_that_breaks_the_compiler_is_rejected_in_one_line(
    source: str, reason: str
) -> None:
    with pytest.raises(ConfigError) as rejection:
        ChatTemplate(source, {})
    assert reason in str(rejection.value)
    assert "\n" not in str(rejection.value)
    assert len(str(rejection.value)) < 500


@pytest.mark.parametrize("named", [[5], [None, {"name": "default", "template": 5}], [[]], [{}]])
def test_named_templates_that_make_no_sense_are_ignored(tmp_path: Path, named: object) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    check_text_files(tmp_path, None, None)


def test_unreadable_files_are_rejected_by_name(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is not JSON"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        load_tokenizer(tmp_path)


def test_a_template_file_that_is_missing_is_rejected_with_its_setting(tmp_path: Path) -> None:
    missing = tmp_path / "missing.jinja"
    with pytest.raises(ConfigError) as rejection:
        check_text_files(tmp_path, None, missing)
    assert str(rejection.value) == (
        f"chat_template: {missing} cannot be read: No such file or directory"
    )


def test_plain_template_ends_where_the_answer_begins() -> None:
    assert ChatTemplate(PLAIN_TEMPLATE, {}).render(CHAT[:1]) == "user: Where?\nassistant:"
