"""What tests do on the playground: ask, set, and let the server answer as if a model had written it."""

from __future__ import annotations

import json
from typing import Any

from tests.browser.browser import Visit

#: What a model may write to get at the user.
HOSTILE = """Hello <script>window.hacked = 1</script> <img src=x onerror="window.hacked = 2">
[click](javascript:window.hacked=3) ![a picture](https://evil.example/a.png) <https://evil.example>

# A title with <b>markup</b>

- one **bold**
- two `code <i>`

| a | b |
| --- | --- |
| <svg onload="window.hacked=4"> | 2 |

```html
<iframe src="https://evil.example"></iframe>
```

The area is $\\pi r^2$.
"""


def open_settings(shown: Visit) -> None:
    """Opens the drawer with all its groups; does nothing where it is open."""
    page = shown.page
    if not page.locator(".settings").count():
        page.get_by_role("button", name="Settings", exact=True).click()
    page.locator(".setting").first.wait_for()
    for group in page.locator(".settings > .group:not([open]) > summary").all()[::-1]:
        group.click()


def setting(shown: Visit, name: str) -> Any:
    return shown.page.locator(f"#setting-{name}")


def ask(shown: Visit, text: str, **settings: str) -> None:
    """Sends a message with these settings."""
    if settings:
        open_settings(shown)
    for name, value in settings.items():
        setting(shown, name).fill(value)
    shown.page.locator("#question").fill(text)
    shown.page.get_by_role("button", name="Send", exact=True).click()


def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def streamed(shown: Visit, *deltas: dict[str, Any], finish: str = "stop") -> None:
    """Makes the server send these parts of an answer from now on."""
    chunks = [*(chunk(delta) for delta in deltas), chunk({}, finish)]
    body = "".join(f"data: {json.dumps(one)}\n\n" for one in chunks) + "data: [DONE]\n\n"
    headers = {"content-type": "text/event-stream"}
    shown.page.route("**/v1/chat/completions", lambda route: route.fulfill(status=200, headers=headers, body=body))


def answered(shown: Visit, text: str, finish: str = "stop") -> None:
    """Makes the server answer with this text from now on."""
    streamed(shown, *({"content": text[i : i + 7]} for i in range(0, len(text), 7)), finish=finish)


def stats(shown: Visit) -> Any:
    return shown.page.locator(".stats").last


def done(shown: Visit) -> None:
    """Waits for the end of the last answer."""
    shown.page.locator(".turn.assistant").last.get_by_role("button", name="Regenerate").wait_for()


def sent_by(shown: Visit, act: Any) -> Any:
    """The body of the chat request that an act sends."""
    with shown.page.expect_request("**/v1/chat/completions") as sent:
        act()
    return sent.value.post_data_json
