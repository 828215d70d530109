"""Why a row of the data set is rejected: the whole table. Every rejected row has one of these codes and a detail."""

from __future__ import annotations

REASONS = {
    "not_utf8": "the line is not UTF-8",
    "bad_json": "the line is not JSON",
    "line_too_long": "the line is longer than 16 MiB",
    "too_deep": "the JSON is nested too deeply",
    "duplicate_key": "an object names a key twice, so it may mean two things",
    "lone_surrogate": "a \\ud800-style escape without its other half: no UTF-8 text has that",
    "not_object": "the line is JSON, but not an object",
    "no_messages": "neither `messages` nor `conversations` is a list that holds something",
    "bad_message": "a message is not an object with a role and content",
    "unknown_role": "a role that is none of system, developer, user, assistant, tool and their known other names",
    "null_content": "a message has no content (allowed only beside tool calls)",
    "bad_content": "the content is neither text nor a list of parts",
    "not_text": "a content part is not text, an image for example: it is never left out silently",
    "bad_tools": "`tools` is not a list of objects",
    "no_assistant": "no assistant turn: nothing to supervise",
    "assistant_first": "the first turn after the system message is not the user's",
    "empty_assistant": "an assistant turn is empty",
    "control_token": "a text contains a control token of the tokenizer, which would end or fake a turn",
    "template_error": "the chat template refused the conversation",
    "mask_not_prefix": "the supervised span cannot be told: rendering fewer messages does not give a prefix",
    "no_supervised_tokens": "no supervised token is left, perhaps after truncation",
    "all_supervised": "every token would be supervised, which cannot be right",
}
