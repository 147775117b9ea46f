"""Images in conversations: parts for templates that write them, placeholders for others."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.errors import InvalidRequestError
from octavo.engine.chat_template import render_chat

#: As models of several families have them: of parts alone, of both, of text alone.
SMOLVLM = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}{% if message['content'][0]['type'] == "
    "'image' %}{{':'}}{% else %}{{': '}}{% endif %}{% for line in message['content'] %}{% if line['type'] == 'text' %}"
    "{{line['text']}}{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
LLAVA = (
    "{% for message in messages %}{% if message['role'] == 'user' %}USER: {% else %}ASSISTANT: {% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' ' }}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
QWEN = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' or "
    "'image' in content or 'image_url' in content %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content "
    "%}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT_ALONE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}{% endfor %}"
IMAGE = {"type": "image"}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def user(*parts: dict[str, str] | str) -> dict[str, Any]:
    return {"role": "user", "content": parts[0] if isinstance(parts[0], str) else list(parts)}


def rendered(template: str, *messages: dict[str, Any], **options: Any) -> str:
    return render_chat(template, messages, **{"image_placeholder": "<image>", **options})


def test_templates_that_write_images_get_parts() -> None:
    message = user(text("What is"), IMAGE, text("and"), IMAGE)
    assert rendered(SMOLVLM, message) == ("<|im_start|>User: What is<image>and<image><end_of_utterance>\nAssistant:")
    assert rendered(LLAVA, user(IMAGE, text("Hi"))) == "USER: <image>\nHi ASSISTANT:"
    assert "user\nWhat is<|vision_start|><|image_pad|><|vision_end|>and<|vision_start|>" in rendered(QWEN, message)


def test_texts_are_parts_too_for_templates_of_parts_alone() -> None:
    assert rendered(SMOLVLM, user("Hello")) == "<|im_start|>User: Hello<end_of_utterance>\nAssistant:"
    assert rendered(LLAVA, user("Hello")) == "USER: Hello ASSISTANT:"
    assert rendered(QWEN, user("Hello")).startswith("<|im_start|>user\nHello<|im_end|>")


def test_templates_of_text_alone_get_placeholders() -> None:
    assert rendered(TEXT_ALONE, user(IMAGE, text("What is it?"))) == "[user]<image>What is it?"
    assert rendered(TEXT_ALONE, user(text("a"), text("b"), IMAGE, IMAGE)) == "[user]a\nb<image><image>"


def test_the_last_message_can_be_continued() -> None:
    messages = [user(IMAGE, text("What?")), {"role": "assistant", "content": "It is"}]
    continued = {"add_generation_prompt": False, "continue_final_message": True}
    assert rendered(SMOLVLM, *messages, **continued).endswith("Assistant: It is")
    assert rendered(QWEN, *messages, **continued).endswith("<|im_start|>assistant\nIt is")


def test_models_without_images_refuse_the_part() -> None:
    with pytest.raises(InvalidRequestError, match="only content parts of type 'text' are supported, not 'image'"):
        render_chat(QWEN, [user(IMAGE, text("a"))])


PARTS = st.lists(st.one_of(st.just(IMAGE), st.text("ab <>\n", min_size=1).map(text)), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(st.lists(PARTS, min_size=1, max_size=4), st.sampled_from([SMOLVLM, LLAVA, QWEN]))
def test_any_mix_of_parts_is_written_as_transformers_does(contents: list[list[dict[str, str]]], template: str) -> None:
    """But for texts beside each other, between which there is a line break."""
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": "assistant" if i % 2 else "user", "content": apart(parts)} for i, parts in enumerate(contents)]
    expected, _ = render_jinja_template(conversations=[messages], chat_template=template, add_generation_prompt=True)
    assert rendered(template, *messages) == expected[0]


def apart(parts: list[dict[str, str]]) -> list[dict[str, str]]:
    """The parts without a text that follows another."""
    return [part for i, part in enumerate(parts) if part is IMAGE or i == 0 or parts[i - 1] is IMAGE]
